"""flash_fwd on tensor tiles: every feature in half precision, on the matrix units of M5."""

import pytest
import torch

from tests.attention import test_flash_fwd_mutants as problems
from tests.attention.flash_fwd_check import check_either_precision, check_flash_fwd, make_qkv
from tests.attention.held_cases import FORWARD, LENGTHS, PACKED, SCORES, SIZES, case, hold
from tests.helpers.judged import judge
from tests.helpers.mutants import mutant_tests
from torch_metal_attn import allow_tf32, explain, simulate
from torch_metal_attn.runtime import extension
from torch_metal_attn.testing import running
from torch_metal_attn.testing.features import FEATURES
from torch_metal_attn.tools.verify import cases as listed

pytestmark = pytest.mark.usefixtures("m5")
F16 = torch.float16
CPU = torch.device("cpu")
KERNEL = "flash_fwd_tensor"


def wide_rows():
    """Scores have two chains, Q is read twice, and the last slice of V is a span too long."""
    judge(problems.dense(batch=1, heads=2, head_dim=136, v_head_dim=288, dtype="bfloat16"))


def few_rows():
    return make_qkv(q_length=40, kv_length=90, head_dim=16, dtype=F16)


def equal_values():
    """The mean of equal values is exact, although weights are truncated."""
    q, k, v = few_rows()
    out, _ = torch.ops.metal_attn.flash_fwd(4 * q, k, torch.ones_like(v))
    assert (out == 1).all()


def infinite_value():
    """The last key, whose value is infinite, is in a partial block of keys."""
    q, k, v = few_rows()
    v[:, :, -1, 3] = torch.inf
    out, _ = torch.ops.metal_attn.flash_fwd(q, k, v)
    assert (out[..., 3] == torch.inf).all()


def either_precision():
    check_either_precision(lambda: torch.ops.metal_attn.flash_fwd(*few_rows()))


def scores():
    judge(problems.dense(**SCORES, alibi_slopes="h", causal=True, q_offset=-2, dtype="bfloat16"))


GROUPED, PACKED = SIZES | FORWARD, PACKED | FORWARD
CASES = {
    "windows": problems.PROBLEMS["windows"],
    # Partial tiles of queries and keys, and rows that see no key.
    "sizes": [
        case(**GROUPED | {"q_length": q, "kv_length": k}, causal=True, q_offset=-2)
        for q, k in ((1, 1), (65, 31), (33, 0), (0, 9))
    ],
    "chunks": [
        case(**GROUPED, **LENGTHS, attention_chunk=21, causal=True, q_offset=0, cache="indexed"),
        # There is NaN after each row.
        case(
            **GROUPED | LENGTHS | {"attention_chunk": 21, "head_dim": 11, "v_head_dim": 5},
            **problems.PADDED | {"rotary": "q", "rotary_columns": 8},
        ),
    ],
    # Masks and biases of odd and of even width. Rows of even width are read in pairs.
    "masks and biases": [
        case(
            **GROUPED | SCORES | {"kv_length": width, "alibi_slopes": "h", "causal": True},
            attn_mask="bool bhqk",
            attn_bias=f"{bias} bhqk",
            dtype=dtype,
        )
        for width, bias, dtype in ((101, "float32", "bfloat16"), (100, "float16", "float16"))
    ],
    "packed": [
        *problems.PROBLEMS["packed"],
        case(**PACKED, cache="paged", page=24, window_size_left=30, dtype="bfloat16"),
    ],
    "pages": problems.PROBLEMS["pages"],
}


@pytest.mark.parametrize("cases", CASES.values(), ids=CASES)
def test_features_run_on_tensor_tiles(cases):
    with simulate(check=True) as run:
        hold(cases, CPU)
    assert KERNEL in run.counters
    assert "flash_fwd" not in run.counters


def test_formats_run_on_tensor_tiles():
    with simulate(check=True) as run:
        for name in ("formats", "scales of fp8"):
            problems.run(name)
    assert set(run.counters) == {KERNEL}


@pytest.mark.parametrize("lane_map", ["apple9", 7])
def test_other_lane_maps_are_wrong(lane_map):
    """Results are finite but wrong. tests/runtime/test_tensor_gate.py detects such a lane map."""
    with simulate(lane_map=lane_map), pytest.raises(AssertionError):
        check_flash_fwd(*few_rows(), device=CPU)


def test_calls_that_have_no_tensor_tiles(monkeypatch, gpu):
    q, k, v = make_qkv(head_dim=16, dtype=F16)
    attend, decode = torch.ops.metal_attn.flash_fwd, torch.ops.metal_attn.flash_decode
    with simulate(check=True) as run:
        attend(q.float(), k.float(), v.float())
        attend(q.float(), k, v)
        decode(q[:, :, :1], k, v)
        monkeypatch.setenv("TORCH_METAL_ATTN_TENSOR_TILES", "off")
        attend(q, k, v)
        monkeypatch.setenv("TORCH_METAL_ATTN_TENSOR_TILES", "auto")
        gpu("Apple M4")
        attend(q, k, v)
        assert KERNEL not in run.counters
        monkeypatch.setenv("TORCH_METAL_ATTN_TENSOR_TILES", "on")
        attend(q, k, v)
    assert run.counters[KERNEL].launches == 1


def test_explain_says_why_tensor_tiles_are_not_used(monkeypatch):
    def reason(dtype):
        q, k, v = make_qkv(head_dim=64, dtype=dtype)
        return extension.launches(torch.ops.metal_attn_explain.flash_fwd(q, k, v))[0]["reason"]

    assert reason(F16).startswith("tensor tiles: ")
    assert reason(torch.float32).endswith(
        "no tensor tiles, as tensor operations reduce float32 to 11 bits, and TF32 is not allowed"
    )
    monkeypatch.setenv("TORCH_METAL_ATTN_TENSOR_TILES", "off")
    assert reason(F16).endswith("no tensor tiles, as TORCH_METAL_ATTN_TENSOR_TILES is off")
    monkeypatch.setenv("TORCH_METAL_ATTN_TENSOR_TILES", "1")
    wrong = "TORCH_METAL_ATTN_TENSOR_TILES is '1'; it must be off, auto or on"
    with pytest.raises(ValueError, match=wrong):
        reason(F16)
    assert wrong in explain(*make_qkv(dtype=F16)).refusal


@pytest.mark.parametrize("how, tiles, dtypes", [("on 8x8 tiles", "8x8", 2), ("in TF32", "TF32", 1)])
def test_verify_repeats_features_on_other_tiles(how, tiles, dtypes, gpu):
    """verify repeats each feature with tensor tiles off, and in TF32 even if it is not allowed."""
    families = {f"flash_fwd {how}", f"flash_bwd {how}"}
    again = [each for each in listed.full() if each.family in families]
    assert {each.family for each in again} == families
    assert {each.case.tiles for each in again} == {tiles}
    assert len(again) == 2 * dtypes * len(FEATURES)
    with simulate(check=True) as run:
        assert running.run(case(dtype="float32" if dtypes == 1 else "float16", tiles=tiles), CPU).ok
        assert {"tensor" in name for name in run.counters if "delta" not in name} == {dtypes == 1}
        with allow_tf32():
            assert running.run(case(dtype="float32"), CPU).ok  # within float32's bounds
        assert "flash_fwd" in run.counters
    gpu("Apple M4")
    assert not families & {each.family for each in listed.full()}


MUTANTS = {
    "plain": """
        a unit of family 9 [misaligned]: fragment_column(lane) * (TENSOR_TILES ? {~4 => 2~} : 1)
        keys of a lane in another order: key / 2 * {~4 + key % 2 * 16 => 16 + key % 2 * 4~}
        slots of a left operand off by one:
            left.fragments[{~s / LANE_COLUMNS][s => (s + 1) % TENSOR_LEFT_SLOTS / LANE_COLUMNS][(s
            + 1)~} % LANE_COLUMNS]
        halves of a left operand swapped: TENSOR_HALF * {~half_span => (1 - half_span)~} + p]
        halves of a result swapped:
            {~s / SPAN_FRAGMENTS => (1 - s / SPAN_FRAGMENTS)~} * TENSOR_HALF + s % TENSOR_HALF
        sums not accumulated: mode::{~multiply_accumulate => multiply~}
        output not rescaled: total {~* corrections[i] =>~} +
        sum not rescaled: {~lane_sum *= correction; =>~} UNROLL for (short j = 0; j < SPAN_FRAGMENTS
        a SIMD group leaves early [divergent_barrier]:
            {~=> if (simdgroup_query > tile.last_query) { return; }~}for (int kv_block =
            blocks.first();
        lanes leave early [partial_simd or divergent_barrier]:
            if ({~=> lane_query + 8 > tile.last_query ||~}!seen && !COLUMNS_SPLIT)
        key past the end read [out_of_bounds]: source.find({~clamp(key, begin, end - 1) => key~})
    """,
    infinite_value: """
        values that do not exist: exist[i] = {~key >= begin && key < end => true~}
    """,
    equal_values: """
        divided by the sum before the cut: {~softmax.weights[i].row_sum(keys_sum) => keys_sum~}
    """,
    either_precision: """
        weights not cut: {~weights[j] = cut(weights[j]); =>~}
        weights cut to 12 bits: KEPT_BITS = {~0xffffe000u => 0xfffff000u~}
    """,
    wide_rows: """
        second chain dropped: {~result.add(chain); =>~}
        columns of the last slice after the row [out_of_bounds]:
            {~COLUMNS == GRID_COLUMNS || column < COLUMNS => true~}
    """,
    scores: """
        sink not in the sum: keep_scale / {~with_sink( =>~}values_sum{~, sink_weight) =>~}
        kept weights not scaled: {~TENSOR_TILES && DROPOUT ? dropout.keep_scale : =>~} 1.0f
        words of a draw reversed: bit(words[{~=> 3 -~}i], 2 * pair + i)
    """,
}

test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(
    MUTANTS, KERNEL, run=problems.run, together=True
)
