"""Metal text compiled for AMD's and NVIDIA's back ends."""

import pytest

from bench.targets import compile_amdgpu, compile_ptx
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


@pytest.mark.parametrize(("count", "spills"), [(40, False), (80, True)])
def test_accumulators_take_a_pair_of_registers_each(count: int, spills: bool) -> None:
    found = compile_amdgpu(TEXT, "products", 64, defines={"COUNT": count})
    assert (found.spilled > 0) == (found.scratch > 0) == spills
    if not spills:
        assert 2 * count < found.used < 2 * count + 20


def test_ptx_has_the_buffers_and_limits() -> None:
    ptx = compile_ptx(TEXT, "products", 64, defines={"COUNT": 2}, registers=96)
    assert ptx.buffers == [0, 1, 3]
    assert ptx.symbol == "gpu_products"
    for part in (".maxntid 64, 1, 1", ".maxnreg 96", "bar.sync", "shfl.sync.bfly", "f32.f16.f16"):
        assert part in ptx.text


def test_a_fault_of_the_text_is_its_compilers_message() -> None:
    with pytest.raises(ShaderCompileError, match="COUNT"):
        compile_amdgpu(TEXT, "products", 64)


def test_a_kernel_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="no kernel sums; it has products"):
        compile_amdgpu(TEXT, "sums", 64, defines={"COUNT": 2})
