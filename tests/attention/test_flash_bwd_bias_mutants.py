"""Planted faults in the text of flash_bwd_bias: the tests' own check must see every one of them."""

import torch

from tests.attention import flash_bwd_bias_check
from tests.attention.flash_bwd_bias_check import check_bias
from tests.attention.flash_fwd_check import make_packed, make_qkv
from tests.attention.head_dims import HOME
from tests.helpers.mutants import expect_caught, mutant_tests
from torch_metal_attn.reference import attention

SHAPE = {"batch": 2, "heads": 4, "kv_heads": 2, "q_length": 77, "kv_length": 101, "head_dim": HOME}
SLOPES = torch.tensor([0.3, 0.1, 0.02, 0.5])


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


# So many that a part of the walk has tiles of two batches, heads, queries or keys.
MANY = SHAPE | {"batch": 8, "heads": 8, "kv_heads": 8}


def dense(bias, shape=SHAPE, **options):
    check_bias(*make_qkv(**shape), attn_bias=bias, **options, device="cpu")


def whole():
    dense(normal(2, 4, 77, 101), causal=True)


def pairs_of_keys():
    q, k, v = make_qkv(**SHAPE | {"kv_length": 100})
    check_bias(q, k, v, attn_bias=normal(2, 4, 77, 100), device="cpu")


def of_heads():
    """Shared by the batches."""
    dense(normal(1, 8, 77, 101), MANY)


def of_batches():
    dense(normal(8, 1, 77, 101), MANY)


def of_keys():
    dense(normal(101), MANY, causal=True)


def of_queries():
    dense(normal(77, 1), MANY)


def of_everything():
    dense(normal(1))


def slopes():
    check_bias(*make_qkv(**SHAPE), alibi_slopes=SLOPES, causal=True, device="cpu")


def packed():
    packing = make_packed([40, 0, 77], [50, 3, 64], heads=4, kv_heads=2, head_dim=HOME)
    check_bias(*packing, attn_bias=normal(4, 77, 64), causal=True, device="cpu")


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
MUTANTS = {
    whole: """
        delta left out: {~(weight_gradient - deltas[i]) => weight_gradient~}
        weights not from the log-sum-exp: score {~- origins[i] =>~}
        band never applied: if ({~!seen.all_in(block, BLOCK_K) => false~})
        query past the last stored [race]: if ({~query >= params.problem.q_length => false~}) {
        key past the last stored [out_of_bounds or race]:
            if (!DBIAS_PAIRS {~&& key + 1 < params.problem.kv_length =>~})
        batch of the wrong place [race]: own_batch * params.dbias_strides.{~batch => head~}
        no barrier after staging [uninitialised or race]:
            {~// The tiles are whole. threadgroup_barrier(mem_flags::mem_threadgroup); =>~}
    """,
    pairs_of_keys: """
        keys of a pair swapped:
            (DBIAS_ELEMENT(value.{~x), DBIAS_ELEMENT(value.y => y), DBIAS_ELEMENT(value.x~}))
    """,
    of_heads: """
        head of the wrong place [race]: own_head * params.dbias_strides.{~head => query~}
        rows of the batch before: {~batch != loaded_batch || =>~} head
        keys of the batch before: {~batch != staged_batch || =>~} kv_head
        no barrier before staging [race]:
            {~// Every SIMD group has read the tiles of the block before.
            threadgroup_barrier(mem_flags::mem_threadgroup); =>~}
    """,
    of_batches: """
        head loop one short [out_of_bounds]: if (++head < heads.end{~=> - 1~})
        rows of the head before: {~|| head != loaded_head =>~}
        keys of the head before: {~|| kv_head != staged_kv_head =>~}
        wrong KV head: head {~/ problem.queries_per_kv => % 2~}
    """,
    of_keys: """
        rows past the last summed:
            const bool exists = {~lane_query + i * FRAGMENT <= last_query => true~}
        query tiles one short [out_of_bounds]: if (++q_tile < q_tiles.end{~=> - 1~})
        column sum over half the rows: {~x += simd_shuffle_xor(x, ushort(4)); =>~}
        one SIMD group left out: for (short i = {~0 => 1~}; i < SIMDGROUPS; i++) { total
        no barrier before the sum [race or uninitialised]:
            {~threadgroup_barrier(mem_flags::mem_threadgroup); =>~} result.write_columns
        split one tile short: + params.split_tiles{~=> - 1~}, params
        splits in one place [race or wrong]: {~split * params.split_stride => 0~} +
    """,
    of_queries: """
        key tiles one short [out_of_bounds or wrong]: if (++kv_tile < kv_tiles.end{~=> - 1~})
        row sum of one lane: {~fragment_row_sum(of_columns.x + of_columns.y) => of_columns.x~}
        one column fragment: {~of_columns += tile.fragments[i][j]; =>~}
        keys of the tile before: {~|| at.kv_tile != staged_kv_tile =>~}
    """,
    of_everything: """
        one SIMD group's sum: i < {~COLUMN_SUMS => BLOCK_K~}
    """,
    slopes: """
        sign of the distance: gradient *= {~- =>~}Fragment
        distance of the first key: fabs(distance {~- 1.0f =>~})
        distance in the block at 0: rules.distance {~- block =>~}
    """,
    packed: """
        rows of the first sequence:
            operand.reset(dout, strides, batch, head, {~sequence.q_start => 0~})
        statistics of the first sequence:
            row_offset(strides, batch, head, 0) {~+ sequence.q_start =>~}
    """,
}


test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(MUTANTS, "flash_bwd_bias")


def test_a_rounded_delta_is_caught(monkeypatch):
    """As flash_bwd's is without exact_delta, here by 2^-11 of out."""
    statistics = flash_bwd_bias_check.row_statistics

    def rounded(dout, dlse, q, k, v, packing, options):
        out, _ = attention(q, k, v, **options)
        lse, _, normalisers = statistics(dout, dlse, q, k, v, packing, options)
        return lse, (dout.float() * out.float()).sum(-1) - dlse, normalisers

    monkeypatch.setattr(flash_bwd_bias_check, "row_statistics", rounded)
    # Of a bias that all keys share the gradient is 0.
    qkv, bias = make_qkv(**SHAPE, dtype=torch.float16), normal(2, 4, 77, 1)
    expect_caught(lambda: check_bias(*qkv, attn_bias=bias, causal=True, device="cpu"))
