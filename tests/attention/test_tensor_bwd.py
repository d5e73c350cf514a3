"""flash_bwd on tensor tiles: every feature in half precision, on the matrix units of M5."""

from functools import partial

import pytest
import torch

from bench.bench_inner_loops import ours
from tests.attention.flash_bwd_check import backward, check_flash_bwd, make_gradients
from tests.attention.flash_bwd_features import (
    FEW,
    check_the_same_bits,
    featured,
    packed,
    problem,
    run,
)
from tests.attention.flash_fwd_check import check_either_precision, make_qkv
from tests.attention.held_cases import HOME, case
from tests.attention.test_flash_bwd_sharp import check_sharp
from tests.attention.test_flash_fwd_device_lengths import results_of
from tests.helpers.judged import judge
from tests.helpers.mutants import mutant_tests
from torch_metal_attn import explain, simulate
from torch_metal_attn.runtime import extension

pytestmark = pytest.mark.usefixtures("m5")
F16 = torch.float16
CPU = torch.device("cpu")
KERNELS = {"flash_bwd_dq_tensor", "flash_bwd_dkv_tensor"}


def every_score_option():
    lengths = "both lengths, causal, rotary, interleaved"
    return problem(lengths, "softcap, all, rotary, odd", head_dim=136, v_head_dim=32)


def shared_rows():
    judge(case(**FEW, head_dim=136, v_head_dim=32, causal=True))


def slices():
    judge(case(**FEW, head_dim=288, v_head_dim=40, causal=True, dtype="bfloat16"))


def causal():
    edges = ("causal, rows without a key", "window at an offset", "window past the keys")
    judge(*map(featured, edges))


def two_blocks():
    """Two blocks of queries and of keys. Some SIMD groups have no rows."""
    return make_qkv(q_length=45, kv_length=90, head_dim=HOME, dtype=F16)


def small():
    check_flash_bwd(*two_blocks(), dlse=False, device=CPU)


def either_precision():
    q, k, v = two_blocks()
    dout, _ = make_gradients(q, v, q.shape[:3])
    check_either_precision(lambda: backward(q, k, v, dout, None, CPU, {}))


def one_key():
    """The only weight is 1, which 11 bits represent exactly, so dv equals dout."""
    q, k, v = make_qkv(q_length=1, kv_length=1, head_dim=HOME, dtype=F16)
    dout, _ = make_gradients(q, v, q.shape[:3])
    *_, dv, _ = backward(q, k, v, dout, None, CPU, {})
    assert torch.equal(dv, dout)


def infinite_gradient():
    """The last query, whose dout is infinite, is in a partial block of queries."""
    q, k, v = two_blocks()
    dout, _ = make_gradients(q, v, q.shape[:3])
    dout[:, :, -1, 3] = torch.inf
    *_, dv, _ = backward(q, k, v, dout, None, CPU, {})
    assert (dv[..., 3] == torch.inf).all()
    assert dv[..., :3].isfinite().all()


def invalid_length():
    """An invalid length that only the kernels see makes the gradients of its sequence NaN."""
    (q, k, v), _ = problem("plain")
    _, options = problem("nan outside")
    dout, dlse = make_gradients(q, v, q.shape[:3])
    run = partial(backward, q, k, v, dout, dlse, CPU, options)
    expected, actual = run(), results_of(run, options["seqused_k"], [90, 102])
    for gradient, valid in zip(actual[2:5], expected[2:5], strict=True):
        assert torch.equal(gradient[0], valid[0])
        assert gradient[1].isnan().all()


# Problems without planted faults. test_the_unchanged_kernels_pass runs the problems with faults.
def together():
    qkv, options = every_score_option()
    check_flash_bwd(*qkv, **options, device=CPU)


def masked():
    for mask in ("mask", "mask, transposed"):
        qkv, options = problem("odd head dim", "chunk, causal, padded", mask)
        check_flash_bwd(*qkv, **options, device=CPU)


def sizes():
    for q_length, kv_length in ((1, 1), (0, 9), (33, 0), (17, 70)):
        qkv = make_qkv(q_length=q_length, kv_length=kv_length, head_dim=HOME, dtype=F16)
        check_flash_bwd(*qkv, dlse=False, device=CPU)


@pytest.mark.parametrize("problem", [together, masked, sizes])
def test_features_run_on_tensor_tiles(problem):
    with simulate(check=True) as run:
        problem()
    assert set(run.counters) >= KERNELS
    assert not {"flash_bwd_dq", "flash_bwd_dkv"} & set(run.counters)


def test_the_same_bits_in_any_order():
    check_the_same_bits(*every_score_option())


def test_explain_says_why_tensor_tiles_are_not_used(monkeypatch, gpu):
    def training(dtype):
        return explain(*make_qkv(head_dim=64, dtype=dtype), backward=True).training

    assert set(training(F16).kernels) == KERNELS
    matrix_tiles = training(torch.float32)
    assert set(matrix_tiles.kernels) == {"flash_bwd_dq", "flash_bwd_dkv"}
    why = "tensor operations reduce float32 to 11 bits, and TF32 is not allowed"
    for kernel in matrix_tiles.kernels.values():
        assert kernel.reason == f"no tensor tiles, as {why}"
    gpu("Apple M4")
    assert not KERNELS & set(training(F16).kernels)
    monkeypatch.setenv("TORCH_METAL_ATTN_TENSOR_TILES", "on")
    assert set(training(F16).kernels) == KERNELS


@pytest.mark.parametrize("head_dim, shared", [(64, 1), (80, 2), (128, 2), (256, 2)])
def test_simdgroups_share_wide_rows(head_dim, shared):
    q, k, v = make_qkv(head_dim=head_dim, dtype=F16)
    packed = torch.ops.metal_attn_explain.flash_bwd(q, None, q, k, v, q, torch.zeros(q.shape[:3]))
    kernels = {launch["kernel"]: launch for launch in extension.launches(packed)}
    kernel = kernels["flash_bwd_dkv_tensor"]
    assert int(kernel["defines"].get("COLUMN_SIMDGROUPS", 1)) == shared
    assert kernel["threadgroup_bytes"] == (16384 if shared > 1 else 0)


@pytest.mark.parametrize(
    "kernel, head_dim, products, loads, shuffles",
    [
        ("flash_fwd_tensor", 64, 8, 16, 4),
        ("flash_fwd_tensor", 128, 16, 40, 4),
        ("flash_bwd_dq_tensor", 64, 12, 24, 0),
        ("flash_bwd_dkv_tensor", 64, 16, 42, 16),
    ],
)
def test_inner_loop(kernel, head_dim, products, loads, shuffles):
    counts = ours(kernel, head_dim, F16)
    assert counts["products"] == products
    assert counts["device loads"] <= loads
    assert counts["shuffles"] <= shuffles
    assert counts["converts"] == 0
    assert counts["barriers"] <= 1


MUTANTS = {
    small: """
        dkv: unit of family 9 [misaligned]: fragment_column(lane) * (TENSOR_TILES ? {~4 => 2~} : 1)
        dkv: queries of a lane in another order: key / 2 * {~4 + key % 2 * 16 => 16 + key % 2 * 4~}
        dkv: slots of a left operand off by one:
            left.fragments[{~s / LANE_COLUMNS][s => (s + 1) % TENSOR_LEFT_SLOTS / LANE_COLUMNS][(s
            + 1)~} % LANE_COLUMNS]
        dkv: sums not accumulated: mode::{~multiply_accumulate => multiply~}
        dkv: scores without transposition: tensor_mma<{~true => false~}>(result
        dq: gradients with a transposition: tensor_mma<{~false => true~}>(block
        dkv: lse of the first column: columns_of(own_lse_log2, column {~+ column_offset(j) =>~})
        dkv: another delta: columns_of(own_delta, {~=> (~} column + column_offset(j)){~=> ^ 2)~}
        dkv: q in k's place: dk_tile, {~gradients => weights~}, queries, q_places
        dkv: a SIMD group leaves early [divergent_barrier]: if (!seen) { {~continue => return~};
        dq: a SIMD group leaves early [divergent_barrier]:
            if (!seen || (pass > 0 && !second_pass)) { {~continue => return~};
        dq: lanes leave early [partial_simd or divergent_barrier]:
            if (!seen || {~=> !queries.exists(1) ||~} (pass > 0
        dq: columns of 8x8 tiles [race or wrong]: column + {~column_offset(d) => d * FRAGMENT~}
        dq: without delta: {~( =>~}gradients.fragments[i][j] {~- deltas[i]) =>~}
    """,
    causal: """
        dkv: mask of the other side: visible.apply<{~true => false~}>(scores
        dkv: blocks of the last key skipped: block {~=> + count~} < union_range.end
        dq: edges not masked: block {~+ count =>~} <= intersection_range.end
    """,
    "nan outside": """
        dq: rows before the first key: source.find({~clamp(key, begin => min(key~}, end - 1))
    """,
    invalid_length: """
        dq, dkv: impossible lengths as clamped: ({~impossible || =>~} batch == params.batch)
    """,
    packed: """
        dq, dkv: spare rows computed: {~(impossible || batch == params.batch) => impossible~}
    """,
    infinite_gradient: """
        dkv: queries that do not exist: exist[i] = {~key >= begin && key < end => true~}
    """,
    shared_rows: """
        dkv: own part twice: other = simdgroup {~^ 1 =>~}
        dkv: columns of k of the first: {~keys.part => 0~} * OWN_QK_COLUMNS
        dkv: columns after the row [out_of_bounds]:
            return {~columns == COLUMN_SIMDGROUPS * own_spans(columns) * SPAN_COLUMNS => true~};
        dkv: no barrier before the sum [race or uninitialised or wrong]:
            {~// Wait until all parts are written.
            threadgroup_barrier(mem_flags::mem_threadgroup); =>~}
        dkv: no barrier before the next parts [race or wrong]:
            {~// Wait until both SIMD groups have read the previous parts.
            threadgroup_barrier(mem_flags::mem_threadgroup); =>~}
    """,
    slices: """
        dkv: columns of the last slice after the row [out_of_bounds]:
            {~COLUMNS == GRID_COLUMNS || column < COLUMNS => true~}
        dkv: second chain dropped: {~result.add(chain); =>~}
        dkv: second chain past the own spans: {~min(SPANS, =>~} short(first + CHAIN){~) =>~}
        dq: own part twice: other = simdgroup {~^ 1 =>~}
        dq: columns of q of the first: {~queries.part => 0~} * OWN_QK_COLUMNS
    """,
    either_precision: """
        dq, dkv: gradients not rounded: {~round_to_cut(gradients); =>~}
        dkv: weights not rounded: {~round_to_cut(weights); =>~}
    """,
    one_key: """
        dkv: numbers of 11 bits changed: CUT_CENTRE = {~1.00048828125f => 1.0015f~}
    """,
    partial(check_sharp, "everything", F16, CPU): """
        dkv: 8x8 draws: column + {~column_offset(number % COLUMNS) => number % COLUMNS * FRAGMENT~}
        dkv: weights kept: {~dropout.apply(weights, kept); =>~}
    """,
    partial(check_sharp, "offset values", F16, CPU): """
        dq: no second pass: if ({~!any_simdgroup(second_pass, votes, simdgroup, lane) => true~})
        dq: second pass adds: deltas[i] = {~=> -~} error.delta_error;
    """,
}

test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(
    MUTANTS, "flash_bwd_{}_tensor", run=run, together=True
)
