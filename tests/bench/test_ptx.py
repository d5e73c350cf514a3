"""Metal text compiled for NVIDIA's back end."""

import pytest

from bench.replay.ptx import Source, compile_ptx
from torch_metal_attn.simulator.build import ShaderCompileError

# Adds COUNT products to as many accumulators, all alive at once.
TEXT = """
#include <metal_simdgroup_matrix>
#include <metal_stdlib>
using namespace metal;
kernel void products(device const half* a [[buffer(0)]], device float* out [[buffer(3)]],
                     constant int& steps [[buffer(1)]],
                     ushort thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float tile[256];
  simdgroup_matrix<float, 8, 8> sums[COUNT];
  simdgroup_matrix<half, 8, 8> left;
  for (int i = 0; i < COUNT; i++) sums[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  for (int step = 0; step < steps; step++) {
    simdgroup_load(left, a + 64 * step);
    for (int i = 0; i < COUNT; i++) simdgroup_multiply_accumulate(sums[i], left, left, sums[i]);
  }
  tile[thread_index] = simd_sum(float(thread_index));
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[thread_index] = tile[thread_index ^ 33];
  for (int i = 0; i < COUNT; i++) simdgroup_store(sums[i], out + 64 * i);
}
"""


def test_ptx_has_the_buffers_and_threads() -> None:
    ptx = compile_ptx(Source(TEXT, "products", 64, {"COUNT": 2}))
    assert ptx.buffers == [0, 1, 3]
    assert ptx.symbol == "gpu_products"
    for part in (".maxntid 64, 1, 1", "bar.sync", "shfl.sync.bfly", "f32.f16.f16"):
        assert part in ptx.text


def test_a_fault_of_the_text_is_its_compilers_message() -> None:
    with pytest.raises(ShaderCompileError, match="COUNT"):
        compile_ptx(Source(TEXT, "products", 64))


def test_a_kernel_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="no kernel sums; it has products"):
        compile_ptx(Source(TEXT, "sums", 64, {"COUNT": 2}))
