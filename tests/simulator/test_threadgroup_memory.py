"""The threadgroup memory that is known before a run equals the memory that the run uses."""

import pytest
import torch

from torch_metal_attn.simulator import compile_shader

SOURCE = """
#include <metal_stdlib>
using namespace metal;
constant bool BIG [[function_constant(0)]];

struct Pair { float a; char b; };

template <typename T, int N>
void sum(device float* out, uint i, threadgroup T* x) {
  x[i % N] = T(i);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = float(x[(i + 1) % N]);
}
template <typename T, int N>
[[kernel]] void typed(device float* out [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {
  threadgroup T x[N];
  threadgroup Pair pairs[3];
  pairs[i % 3].a = 1;
  sum<T, N>(out, i, x);
}
template [[host_name("half_7")]] kernel void typed<half, 7>(device float*, uint);
template [[host_name("float_40")]] kernel void typed<float, 40>(device float*, uint);
kernel void aligned(device float* out, uint i [[thread_index_in_threadgroup]]) {
  threadgroup __attribute__((aligned)) char one;
  alignas(64) threadgroup int two[2][3];
  one = 1;
  two[1][2] = 3;
  out[i] = one + two[1][2];
}
kernel void perhaps(device float* out, uint i [[thread_index_in_threadgroup]]) {
  if (BIG) {
    threadgroup float scratch[1000];
    sum<float, 1000>(out, i, scratch);
  }
  for (int turn = 0; turn < 3; ++turn) {
    threadgroup uint again[4];
    again[i % 4] = turn;
    out[i] = again[i % 4];
  }
}
kernel void none(device float* out, threadgroup float* x [[threadgroup(0)]]) { out[0] = 1; }
"""


@pytest.mark.parametrize("big", [False, True])
def test_static_length_equals_the_memory_of_a_run(big):
    library = compile_shader(SOURCE, constants={"BIG": big})
    out = torch.zeros(1)
    known = {}
    for name in dir(library):
        kernel = getattr(library, name)
        memory = {0: 4} if name == "none" else {}
        kernel(out, threadgroup_bytes=memory)
        known[name] = kernel.static_thread_group_memory_length
        assert known[name] == library.last_counters.threadgroup_bytes - 4 * len(memory)
    expected = {"half_7": 16 + 24, "float_40": 160 + 24, "aligned": 64 + 24, "none": 0}
    assert known == expected | {"perhaps": 4016 if big else 16}
