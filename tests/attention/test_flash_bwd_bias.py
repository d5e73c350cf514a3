"""Gradients of attn_bias, of an additive attn_mask and of alibi_slopes."""

import pytest
import torch

from tests.attention.flash_bwd_check import make_gradients
from tests.attention.flash_fwd_check import make_qkv
from tests.attention.held_cases import HOME, PACKED, SIZES, case
from tests.attention.test_flash_fwd_device_lengths import after_the_checks
from tests.helpers.judged import judge
from tests.helpers.mutants import mutant_tests
from torch_metal_attn import simulate
from torch_metal_attn.reference import attention
from torch_metal_attn.runtime import extension
from torch_metal_attn.testing.judge import ints, normal

# GQA, two query tiles or more, partial blocks of keys.
SHAPE = {"batch": 2, "heads": 4, "kv_heads": 2, "q_length": 77, "kv_length": 101, "head_dim": HOME}


def problem(**shape):
    q, k, v = make_qkv(**SHAPE | shape, dtype=torch.float16)
    return q, k, v, *make_gradients(q, v, q.shape[:3])


def launch_of(q, k, v, **options):
    lse = torch.zeros(q.shape[:3])
    dout = v.new_empty(1, 1, 1, v.shape[3]).expand(*q.shape[:3], v.shape[3])
    op = torch.ops.metal_attn_explain.flash_bwd_bias
    return extension.launches(op(dout, q, k, v, lse, lse, **options))[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_partial_results_are_linear_in_the_bias(dtype):
    """A small bias has splits, which keep the GPU busy. A large bias is not split."""
    q, k = torch.empty(2, 64, 16, 1, 64, dtype=dtype).expand(2, 64, 16, 4096, 64)
    for sizes in ((4096, 4096), (4096,), (16, 4096, 1), (1,), (64, 1, 1, 1)):
        actual = launch_of(q, k, k, attn_bias=torch.zeros(sizes))
        columns, rows, depth = actual["grid"]
        assert actual["splits"] == 1 or columns * rows * depth < 2 * 240
        assert columns * rows * depth >= min(240, 64 * 16)


@pytest.mark.parametrize("op", ["bias", "slopes"])
def test_impossible_lengths_are_nan(op, monkeypatch):
    """On mps only the kernels see the lengths. They return NaN and read nothing out of bounds."""
    lengths = ints(60, 30, 65)
    q, k, v, dout, dlse = problem(batch=3, heads=2, q_length=33, kv_length=65)
    options = {"attn_bias": normal(3, 1, 33, 65), "alibi_slopes": normal(3, 2)}
    options["seqused_k"] = lengths
    _, lse = attention(q, k, v, **options)
    with simulate(check=True):
        after_the_checks(monkeypatch, lengths, [60, 66, 65])
        run = getattr(torch.ops.metal_attn, f"flash_bwd_{op}")
        actual = run(dout, q, k, v, lse, dlse, **options)
    assert actual[1].isnan().all()
    assert actual[::2].isfinite().all()


@pytest.mark.parametrize("op", ["bias", "slopes"])
def test_registration(op):
    q, k, v, dout, dlse = problem()
    run = getattr(torch.ops.metal_attn, f"flash_bwd_{op}").default
    added = {"attn_bias": normal(1, 77, 101).half(), "alibi_slopes": normal(4).abs()}
    torch.library.opcheck(run, (dout, q, k, v, dlse, dlse), added)
    added["attn_bias"].requires_grad_()
    with pytest.raises(NotImplementedError, match=f"flash_bwd_{op} has no gradient"):
        run(dout, q, k, v, dlse, dlse, **added).sum().backward()


# With so many batches and heads, a split has tiles of two batches, heads, queries or keys.
MANY = {"batch": 8, "heads": 8, "kv_heads": 8}


def dense(**fields):
    return case(**SIZES | {"dtype": "float32"} | fields)


PROBLEMS = {
    "whole": dense(attn_bias="float32 bhqk", causal=True),
    "pairs of keys": dense(attn_bias="float32 bhqk", kv_length=100),
    "bias hqk": dense(**MANY, attn_bias="float32 hqk"),
    "bias bqk": dense(**MANY, attn_bias="float32 bqk"),
    "bias k": dense(**MANY, attn_bias="float32 k", causal=True),
    "bias q": dense(**MANY, attn_bias="float32 q"),
    "one number": dense(attn_bias="float32 ", seed=1),  # with this seed the bias is not -inf
    "slopes": dense(alibi_slopes="h", causal=True),
    "packed": case(**PACKED | {"dtype": "float32"}, attn_bias="float32 hqk"),
}
MUTANTS = {
    "whole": """
        delta left out: {~(weight_gradient - deltas[i]) => weight_gradient~}
        weights not from the log-sum-exp: score {~- lse_log2s[i] =>~}
        band never applied: if ({~!seen.all_in(block, BLOCK_K) => false~})
        query past the last stored [race]: if ({~query >= params.problem.q_length => false~}) {
        key past the last stored [out_of_bounds or race]:
            if (!DBIAS_PAIRS {~&& key + 1 < params.problem.kv_length =>~})
        batch of the wrong place [race]: own_batch * params.dbias_strides.{~batch => head~}
        no barrier after staging [uninitialised or race]:
            {~// Wait until the tiles are completely written.
            threadgroup_barrier(mem_flags::mem_threadgroup); =>~}
    """,
    "pairs of keys": """
        swapped: (DBIAS_ELEMENT(value.{~x), DBIAS_ELEMENT(value.y => y), DBIAS_ELEMENT(value.x~}))
    """,
    "bias hqk": """
        head of the wrong place [race]: own_head * params.dbias_strides.{~head => query~}
        rows of the batch before: {~batch != loaded_batch || =>~} head
        keys of the batch before: {~batch != staged_batch || =>~} kv_head
        no barrier before staging [race]:
            {~// Wait until every SIMD group has read the previous tiles.
            threadgroup_barrier(mem_flags::mem_threadgroup); =>~}
    """,
    "bias bqk": """
        head loop one short [out_of_bounds]: if (++head < heads.end{~=> - 1~})
        rows of the head before: {~|| head != loaded_head =>~}
        keys of the head before: {~|| kv_head != staged_kv_head =>~}
        wrong KV head: head {~/ problem.queries_per_kv => % 2~}
    """,
    "bias k": """
        rows after the last: const bool exists = {~lane_query + i * FRAGMENT <= last_query => true~}
        query tiles one short [out_of_bounds]: if (++q_tile < q_tiles.end{~=> - 1~})
        column sum over half the rows: {~x += simd_shuffle_xor(x, ushort(4)); =>~}
        one SIMD group left out: for (short i = {~0 => 1~}; i < SIMDGROUPS; i++) { total
        no barrier before the sum [race or uninitialised]:
            {~threadgroup_barrier(mem_flags::mem_threadgroup); =>~} result.write_columns
        split one tile short: + params.split_tiles{~=> - 1~}, params
        splits in one place [race or wrong]: {~split * params.split_stride => 0~} +
    """,
    "bias q": """
        key tiles one short [out_of_bounds or wrong]: if (++kv_tile < kv_tiles.end{~=> - 1~})
        row sum of one lane:
            {~fragment_row_sum(sum_over_columns.x + sum_over_columns.y) => sum_over_columns.x~}
        one column fragment: {~sum_over_columns += tile.fragments[i][j]; =>~}
        keys of the tile before: {~|| walk.kv_tile != staged_kv_tile =>~}
    """,
    "one number": """
        one SIMD group's sum: i < {~COLUMN_SUMS => BLOCK_K~}
    """,
    "slopes": """
        sign of the distance: gradient *= {~- =>~}Fragment
        distance of the first key: fabs(distance {~- 1.0f =>~})
        distance in the block at 0: rules.distance {~- block =>~}
    """,
    "packed": """
        rows of sequence 0: operand.reset(dout, strides, batch, head, {~sequence.q_start => 0~})
        statistics of sequence 0: row_offset(strides, batch, head, 0) {~+ sequence.q_start =>~}
    """,
}

test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(
    MUTANTS, "flash_bwd_bias", run=lambda name: judge(PROBLEMS[name])
)
