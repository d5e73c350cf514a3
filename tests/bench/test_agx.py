"""Mesa's compiler for G13: its listing, the model of a GPU core, and the choice of tiles."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from bench.agx import candidates, choose, lens, listing, model, spirv, table
from bench.front_end import Source
from torch_metal_attn.simulator.build import ShaderCompileError

# Adds COUNT products to COUNT accumulators, which are all live at the same time.
TEXT = """
#include <metal_simdgroup_matrix>
#include <metal_stdlib>
#define UNROLL _Pragma("clang loop unroll(full)")
using namespace metal;
kernel void products(device const ELEMENT* a [[buffer(0)]], device float* out [[buffer(3)]],
                     constant int& steps [[buffer(1)]],
                     uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float tile[256];
  simdgroup_matrix<float, 8, 8> sums[COUNT];
  simdgroup_matrix<ELEMENT, 8, 8> left;
  UNROLL for (int i = 0; i < COUNT; i++) sums[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  for (int step = 0; step < steps; step++) {
    simdgroup_load(left, a + 64 * step);
    UNROLL for (int i = 0; i < COUNT; i++)
      simdgroup_multiply_accumulate(sums[i], left, left, sums[i]);
  }
  tile[thread_index] = simd_sum(float(thread_index));
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[thread_index] = tile[thread_index ^ 33];
  UNROLL for (int i = 0; i < COUNT; i++) simdgroup_store(sums[i], out + 64 * i);
}
"""
# A loop inside another loop, as the driver prints it.
LISTING = """\
halves 101
threads 1024
scratch 8
block 0 at 128 1
 mov_imm
block 1 at 136 2
 device_load 8
 threadgroup_barrier
block 2 at 160 2 3
 local_load 4
 simd_matrix_fmadd
 simd_matrix_fmadd
 exp2
block 3 at 200 1 4
 ffma
 stack_load 4
 while_icmp
block 4 at 230
 stop
code 110
threadgroup 2048
"""
needs_driver = pytest.mark.skipif(not lens.DRIVER.exists(), reason="bench/agx/setup.sh was not run")


def compiled(loop: listing.Loop, threads: int = 1024, threadgroup: int = 0) -> lens.Compiled:
    return lens.Compiled(50.5, threads, 128, 0, threadgroup, loop)


def test_loops_of_a_listing_are_found():
    result = listing.parse(LISTING)
    assert (result.halves, result.threads, result.scratch) == (101, 1024, 8)
    assert (result.code, result.threadgroup) == (110, 2048)
    inner, outer = result.loops()
    assert (inner.blocks, inner.code, inner.products) == (range(2, 3), 40, 2)
    assert (outer.blocks, outer.code, outer.opcodes.total()) == (range(1, 4), 94, 9)


def test_cycles_are_added_up_for_each_unit():
    _, outer = listing.parse(LISTING).loops()
    # Two products, an exp2 and an ffma; memory, barriers and control flow are free.
    assert outer.arithmetic == 2 * listing.PRODUCT_CYCLES + 2
    assert outer.complex == 4
    # Four SIMD groups of 32 lanes at 64 bytes a cycle. Spills are device memory.
    assert outer.threadgroup == 4 * 32 * 4 / 64
    assert outer.device == 4 * 32 * (8 + 4) / 64
    assert outer.cycles == outer.arithmetic


def test_threadgroup_memory_limits_what_a_core_holds():
    _, outer = listing.parse(LISTING).loops()
    assert compiled(outer).resident == 32
    assert compiled(outer, threads=448).resident == 12
    assert compiled(outer, threadgroup=29 * 1024).resident == 8
    assert compiled(outer, threadgroup=2048).resident == 32


def test_other_simd_groups_hide_the_waits_of_one():
    _, outer = listing.parse(LISTING).loops()
    by_itself = model.alone(outer)
    assert by_itself == 2 * listing.PRODUCT_CYCLES + 2 * 4 + 2 * model.MEMORY_WAIT
    crowded, sparse = compiled(outer), compiled(outer, threads=128)
    assert model.iteration(crowded) == by_itself / 8
    assert model.iteration(sparse) == by_itself
    assert model.share_of_limit(crowded) == pytest.approx(8 * model.share_of_limit(sparse))
    assert model.bytes_a_cycle(sparse) == pytest.approx(4 * 32 * 8 / by_itself)


def test_bfloats_are_converted():
    ir = """define void @f(<2 x bfloat> %p, float %x) {
  %1 = fpext <2 x bfloat> %p to <2 x float>
  %2 = fptrunc float %x to bfloat
  %3 = fadd float %x, 1.0
  %4 = fpext bfloat 0xR3F80 to float
}"""
    words = spirv.without_bfloat(ir)
    assert "bfloat " not in words.replace("bfloat(", "")
    assert "%2 = call i16 @agx_to_bfloat(float %x)" in words
    assert "%4 = call float @agx_from_bfloat(i16 16256)" in words
    assert words.count("call float @agx_from_bfloat") == 3
    assert "%1 = insertelement <2 x float> %agx.1.0.v, float %agx.1.1.c, i32 1" in words
    with pytest.raises(lens.LensError, match="arithmetic on bfloats"):
        spirv.without_bfloat("  %1 = fadd bfloat %x, %y")


@needs_driver
@pytest.mark.parametrize(
    ("count", "element", "spills"),
    [(40, "half", False), (80, "half", True), (2, "float", False), (2, "bfloat", False)],
)
def test_accumulators_take_a_pair_of_registers_each(count, element, spills):
    result = lens.compile_agx(Source(TEXT, "products", 64, {"COUNT": count, "ELEMENT": element}))
    assert (result.spills > 0) == spills
    assert 2 * count < result.demand < 2 * count + 12
    assert result.main.products == count
    assert result.threadgroup == 1024


@needs_driver
def test_a_failing_job_does_not_end_the_others():
    right = Source(TEXT, "products", 64, {"COUNT": 2, "ELEMENT": "half"})
    wrong = Source(TEXT, "products", 64)
    first, second, third = lens.compile_all([right, wrong, right], workers=2)
    assert "COUNT" in str(second)
    assert isinstance(second, ShaderCompileError)
    assert first == third


def test_a_missing_driver_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(lens, "DRIVER", tmp_path / "agx_lens")
    with pytest.raises(lens.LensError, match=r"build it with bench/agx/setup\.sh"):
        lens.run_driver("", "gpu_products", 64)


def candidate(*tile: int, registers: float = 50.5, spills: int = 0) -> choose.Candidate:
    one = candidates.Class("FLASH_BWD_DQ", 32, 64, 0, "Light", ragged=False)
    _, outer = listing.parse(LISTING).loops()
    result = {
        (torch.float32, name): replace(compiled(outer), demand=registers, spills=spills)
        for name in ("none", *candidates.LIGHT)
    }
    return choose.Candidate(one, tile, result)


# Columns of a slice, block, row fragments, SIMD groups, column SIMD groups, two places for rows.
FAST, SLOW = (576, 32, 1, 4, 1, 1, 0), (576, 16, 1, 4, 1, 1, 0)


def test_the_fastest_tile_that_fits_is_chosen():
    assert choose.best([candidate(*SLOW), candidate(*FAST)]).tile == FAST
    assert choose.best([candidate(*SLOW), candidate(*FAST, registers=118.5)]).tile == SLOW
    assert choose.best([candidate(*SLOW), candidate(*FAST, spills=2)]).tile == SLOW
    # If none fits, the tile with the fewest registers is chosen.
    worse = candidate(*FAST, registers=140)
    assert choose.best([worse, candidate(*SLOW, registers=130)]).tile == SLOW


@needs_driver
def test_a_row_has_the_registers_that_the_generator_finds(tmp_path, monkeypatch):
    """The tile of a small class is compiled; its second result comes from the stored files."""
    one = candidates.Class("FLASH_BWD_BIAS", 32, 64, 0, "Rotary", ragged=False)
    rows = table.read_rows(table.TABLE.read_text())["FLASH_BWD_BIAS"]
    row = next(row for row in rows if row.bits == 32 and row.columns >= 64)
    monkeypatch.setattr(choose, "candidates", lambda one: [row.tile])
    compile_ = partial(lens.compile_all, store=tmp_path)
    (result,) = choose.choose([one], compile_).values()
    assert (result.tile, result.registers) == (row.tile, row.registers)
    kept = sorted(tmp_path.iterdir())
    assert choose.choose([one], compile_)[one] == result
    assert sorted(tmp_path.iterdir()) == kept
