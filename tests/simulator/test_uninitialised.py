"""Reads of device memory that no kernel has written, and writes to buffers declared const."""

import pytest
import torch

from tests.decode import flash_decode_problems as problems
from tests.helpers.mutants import expect_caught, plant
from torch_metal_attn import flash_attn_func
from torch_metal_attn.simulator import SimulatorFault, compile_shader, simulate

SOURCE = """#include <metal_stdlib>
using namespace metal;
kernel void put(device float* o [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  o[i] = i;
}
kernel void add(device float* o [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  o[i] += 1;
}
kernel void count(device atomic_uint* o [[buffer(0)]]) {
  atomic_fetch_add_explicit(o, 1u, memory_order_relaxed);
}
kernel void clear(device atomic_uint* o [[buffer(0)]]) {
  atomic_store_explicit(o, 0u, memory_order_relaxed);
}
kernel void write_through_a_cast(const device float* o [[buffer(0)]], device float* p [[buffer(1)]],
                                 uint i [[thread_position_in_grid]]) {
  ((device float*)(ulong)o)[i] = i;
}
"""


@pytest.fixture(scope="module")
def library():
    return compile_shader(SOURCE, check=True)


def test_reads_of_unwritten_elements_are_faults(library):
    o = torch.zeros(8)
    with simulate(check=True, uninitialised=[o]):
        library.put(o, threads=5)
        library.add(o, threads=5)
        with pytest.raises(SimulatorFault, match=r"buffer\(0\): byte 20 has not been") as caught:
            library.add(o, threads=6)
        assert (caught.value.kind, caught.value.kernel) == ("uninitialised", "add")
        assert SOURCE.splitlines()[caught.value.line - 1] == "  o[i] += 1;"
    library.add(o)
    assert o.tolist() == [2, 3, 4, 5, 6, 1, 1, 1]


def test_only_the_elements_of_the_tensor_are_uninitialised(library):
    whole = torch.zeros(4, 4)
    column = whole[1:3, 1].expand(3, 2)
    with simulate(check=True, uninitialised=[column]):
        library.add(whole, threads=5)
        library.add(whole[1, 2:], threads=3)
        for start in (5, 9):
            with pytest.raises(SimulatorFault):
                library.add(whole.flatten()[start:], threads=1)


def test_an_atomic_update_of_an_unwritten_element_is_a_fault(library):
    n = torch.zeros(1, dtype=torch.int32)
    with simulate(check=True, uninitialised=[n]):
        with pytest.raises(SimulatorFault):
            library.count(n, threads=1)
        library.clear(n, threads=1)
        library.count(n, threads=70)
    assert n.item() == 70


def test_tensors_that_an_op_allocates_are_uninitialised(monkeypatch):
    plant(
        monkeypatch,
        "flash_decode",
        "result.has_row(tile_row)) {\n        result.split.store_lse",
        "result.has_row(tile_row + 1)) {\n        result.split.store_lse",
    )
    expect_caught(lambda: problems.run("splits"), fault="uninitialised", kernel="merge_splits")


def test_memory_that_an_earlier_op_allocated_is_initialised_again():
    # torch reuses the memory of freed tensors for the next op.
    with simulate(check=True):
        for _ in range(3):
            q = torch.randn(1, 40, 2, 8)
            out = flash_attn_func(q, q, q)
            flash_attn_func(out, out, out)


def test_a_write_to_a_const_buffer_is_a_fault(library):
    o, p = torch.zeros(8), torch.zeros(8)
    with pytest.raises(SimulatorFault, match=r"read-only buffer\(0\)") as caught:
        library.write_through_a_cast(o, p, threads=1)
    assert caught.value.kind == "constant_write"
    library.write_through_a_cast(p, p)  # the second argument is writable
    assert p.tolist() == list(range(8))


def test_a_library_that_does_not_check_is_refused():
    o = torch.zeros(8)
    library = compile_shader(SOURCE)
    with (
        simulate(check=True, uninitialised=[o]),
        pytest.raises(ValueError, match="add: argument 0 is in simulate's uninitialised"),
    ):
        library.add(o)
