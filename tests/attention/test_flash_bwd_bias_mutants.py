"""Planted faults in the text of flash_bwd_bias: the tests' own check must see every one of them."""

from tests.attention.held_cases import PACKED, SIZES, case
from tests.helpers.judged import judge
from tests.helpers.mutants import mutant_tests

# So many that a part of the walk has tiles of two batches, heads, queries or keys.
MANY = {"batch": 8, "heads": 8, "kv_heads": 8}


def dense(**fields):
    return case(**SIZES | {"dtype": "float32"} | fields)


PROBLEMS = {
    "whole": dense(attn_bias="float32 bhqk", causal=True),
    "pairs of keys": dense(attn_bias="float32 bhqk", kv_length=100),
    "of heads": dense(**MANY, attn_bias="float32 hqk"),
    "of batches": dense(**MANY, attn_bias="float32 bqk"),
    "of keys": dense(**MANY, attn_bias="float32 k", causal=True),
    "of queries": dense(**MANY, attn_bias="float32 q"),
    "of everything": dense(attn_bias="float32 ", seed=1),  # which is not -inf
    "slopes": dense(alibi_slopes="h", causal=True),
    "packed": case(**PACKED | {"dtype": "float32"}, attn_bias="float32 hqk"),
}
MUTANTS = {
    "whole": """
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
    "pairs of keys": """
        keys of a pair swapped:
            (DBIAS_ELEMENT(value.{~x), DBIAS_ELEMENT(value.y => y), DBIAS_ELEMENT(value.x~}))
    """,
    "of heads": """
        head of the wrong place [race]: own_head * params.dbias_strides.{~head => query~}
        rows of the batch before: {~batch != loaded_batch || =>~} head
        keys of the batch before: {~batch != staged_batch || =>~} kv_head
        no barrier before staging [race]:
            {~// Every SIMD group has read the tiles of the block before.
            threadgroup_barrier(mem_flags::mem_threadgroup); =>~}
    """,
    "of batches": """
        head loop one short [out_of_bounds]: if (++head < heads.end{~=> - 1~})
        rows of the head before: {~|| head != loaded_head =>~}
        keys of the head before: {~|| kv_head != staged_kv_head =>~}
        wrong KV head: head {~/ problem.queries_per_kv => % 2~}
    """,
    "of keys": """
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
    "of queries": """
        key tiles one short [out_of_bounds or wrong]: if (++kv_tile < kv_tiles.end{~=> - 1~})
        row sum of one lane: {~fragment_row_sum(of_columns.x + of_columns.y) => of_columns.x~}
        one column fragment: {~of_columns += tile.fragments[i][j]; =>~}
        keys of the tile before: {~|| at.kv_tile != staged_kv_tile =>~}
    """,
    "of everything": """
        one SIMD group's sum: i < {~COLUMN_SUMS => BLOCK_K~}
    """,
    "slopes": """
        sign of the distance: gradient *= {~- =>~}Fragment
        distance of the first key: fabs(distance {~- 1.0f =>~})
        distance in the block at 0: rules.distance {~- block =>~}
    """,
    "packed": """
        rows of the first sequence:
            operand.reset(dout, strides, batch, head, {~sequence.q_start => 0~})
        statistics of the first sequence:
            row_offset(strides, batch, head, 0) {~+ sequence.q_start =>~}
    """,
}


test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(
    MUTANTS, "flash_bwd_bias", run=lambda name: judge(PROBLEMS[name])
)
