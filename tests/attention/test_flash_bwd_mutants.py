"""Planted faults in the gradient kernels' text: the tests' own check must see every one of them."""

import math

import torch

from tests.attention.flash_bwd_check import (
    assert_gradients,
    backward,
    check_flash_bwd,
    check_flash_varlen_bwd,
    judge,
    make_gradients,
)
from tests.attention.flash_bwd_features import FEATURES, check, problem
from tests.attention.flash_fwd_check import make_packed, make_qkv
from tests.attention.flash_fwd_options import ints
from tests.attention.head_dims import HOME
from tests.helpers.mutants import mutant_tests, repeated

CPU = torch.device("cpu")
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
# By numbers, or as a fault: which comes first depends on the schedule.
SEEN = ("race", "uninitialised", None)
PARTS_LEFT = "// The parts are there.\n        "
WHOLE = "// The tiles are whole.\n      "
SEEN_BY_ANY = "block < by_any.end && block + count > by_any.begin"
SEEN_BY_ALL = "block >= by_all.begin && block + count <= by_all.end"


def nan_outside(device):
    """Lengths with NaN in the memory of what does not exist."""
    (q, k, v), _ = problem("plain")
    options = {"seqused_k": ints(90, 50), "leftpad_k": ints(5, 35)}
    dout, dlse = make_gradients(q, v, q.shape[:3])
    oracle, errors = judge(q, k, v, dout, dlse, options)
    for b, (first, end) in enumerate([(5, 90), (35, 50)]):
        for tensor in (k, v):
            tensor[b, :, :first] = math.nan
            tensor[b, :, end:] = math.nan
    _, *found, _ = backward(q, k, v, dout, dlse, device, options)
    assert_gradients(found, oracle, errors, (q, k, v), dout, options)


def packed(device):
    """With more rows of no sequence than of any on both sides, and an empty sequence."""
    q, k, v, *packing = make_packed(
        [40, 0, 77], [50, 3, 64], heads=4, kv_heads=2, head_dim=HOME, dtype=torch.float16
    )
    q, k, v = torch.cat([q, q, q]), torch.cat([k, k]), torch.cat([v, v])
    options = {"window_size_left": 40, "causal": True, "dlse": True}
    check_flash_varlen_bwd(q, k, v, *packing, **options, device=device)


def unrefined(feature):
    """The problem of a feature where the walk over the keys does not repair delta."""

    def shown(device):
        qkv, options = problem(feature)
        check_flash_bwd(*qkv, **options, exact_delta=False, device=device)

    shown.__name__ = f"unrefined, {feature}"
    return shown


def shared_rows(device):
    """Two SIMD groups of dq have half of the columns each."""
    qkv = make_qkv(
        heads=1, kv_heads=1, q_length=40, kv_length=50, head_dim=192, dtype=torch.float16
    )
    check_flash_bwd(*qkv, causal=True, device=device)


# By the problem that shows them: the kernel, what a fault changes in its text, and where numbers
# do not show it the fault that the simulator reports.
MUTANTS = {
    shared_rows: {
        "own part twice": ("dq", "other = simdgroup ^ 1", "other = simdgroup"),
        "columns of q or k of the first": (
            "dq",
            "queries.part * OWN_QK_COLUMNS",
            "0 * OWN_QK_COLUMNS",
        ),
        "columns of v or dout of the first": (
            "dq",
            "queries.part * OWN_V_COLUMNS",
            "0 * OWN_V_COLUMNS",
        ),
        "no barrier before the sum": ("dq", PARTS_LEFT + BARRIER, "", SEEN),
        "columns of dq of the first": (
            "dq",
            "queries.part * OWN_DQ_COLUMNS",
            "0 * OWN_DQ_COLUMNS",
            SEEN,
        ),
    },
    "plain": {
        "dq without the scale": (
            "dq",
            "dq_tile.fragments[i][d] * scale",
            "dq_tile.fragments[i][d]",
        ),
        "dk without the scale": (
            "dkv",
            "dk_tile.fragments[i][d] * params.softmax_scale",
            "dk_tile.fragments[i][d]",
        ),
        "dv with the scale": (
            "dkv",
            "exists ? dv_tile.fragments[i][d]",
            "exists ? dv_tile.fragments[i][d] * params.softmax_scale",
        ),
        "dq without delta": (
            "dq",
            "(gradients.fragments[i][j] - deltas[i])",
            "gradients.fragments[i][j]",
        ),
        "dk without delta": (
            "dkv",
            "(gradients.fragments[i][j] - delta)",
            "gradients.fragments[i][j]",
        ),
        "delta added": (
            "dq",
            "(gradients.fragments[i][j] - deltas[i])",
            "(gradients.fragments[i][j] + deltas[i])",
        ),
        "delta past the end": (
            "delta",
            "if (row >= params.problem.q_total)",
            "if (false)",
            "race",
        ),
        "log-sum-exp taken for base 2": ("dq", "lse * M_LOG2E_F", "lse"),
        "log-sum-exp of another head": (
            "dq",
            "buffers.statistics(params.lse_strides, place.batch, place.head, sequence)",
            "buffers.statistics(params.lse_strides, place.batch, place.kv_head, sequence)",
        ),
        "log-sum-exp of another query": (
            "dkv",
            "exists ? statistics.origin(query)",
            "exists ? statistics.origin(max(query - 1, 0))",
        ),
        "delta of another query": (
            "dkv",
            "exists ? statistics.delta_of(query)",
            "exists ? statistics.delta_of(max(query - 1, 0))",
        ),
        "a query head skipped": ("dkv", "int member = 0;", "int member = 1;"),
        "only one query head": ("dkv", "member < members", "member < 1"),
        "the first query head each time": (
            "dkv",
            "keys.split * members + member",
            "keys.split * members",
        ),
        "heads of another group": (
            "dkv",
            "keys.kv_head * problem.queries_per_kv + keys.split * members + member",
            "keys.kv_head + member * 2",
        ),
        "wrong KV head": ("dq", "head / params.queries_per_kv", "head % params.queries_per_kv"),
        "dout of another head": (
            "dkv",
            "buffers.out_gradients(params.dout_strides, batch, head, sequence)",
            "buffers.out_gradients(params.dout_strides, batch, keys.kv_head, sequence)",
        ),
        "q in k's place": (
            "dkv",
            "accumulate<ELEMENT, DK_SLICE, OWN_DK_COLUMNS>(dk_tile, gradients, q_rows_lane)",
            "accumulate<ELEMENT, DK_SLICE, OWN_DK_COLUMNS>(dk_tile, weights, q_rows_lane)",
        ),
        "rows of a pair swapped": (
            "dkv",
            "interleave<T>(even_row, odd_row, low, high)",
            "interleave<T>(odd_row, even_row, low, high)",
        ),
        "statistics past the end": (
            "dkv",
            "exists ? statistics.origin(query) : INFINITY",
            "statistics.origin(query)",
            "out_of_bounds",
        ),
        "no barrier before staging": (
            "dq",
            BARRIER + "      stage_pairs",
            "stage_pairs",
            "race",
        ),
        "no barrier after staging": (
            "dq",
            WHOLE + BARRIER,
            "",
            "uninitialised",
        ),
        "dkv: no barrier before staging": (
            "dkv",
            BARRIER + "      stage_pairs",
            "stage_pairs",
            "race",
        ),
        "dkv: no barrier after staging": (
            "dkv",
            WHOLE + BARRIER,
            "",
            "uninitialised",
        ),
        "dkv: barrier orders nothing": (
            "dkv",
            WHOLE + BARRIER,
            BARRIER.replace("mem_threadgroup", "mem_none"),
            "race",
        ),
        "row past the end staged": ("dq", "min(row + 1, end - 1)", "row + 1", "out_of_bounds"),
        "row past the end staged, dkv": (
            "dkv",
            repeated("place = source.find(min(row, end - 1))"),
            "place = source.find(row)",
            "out_of_bounds",
        ),
        "query past the end read": (
            "dq",
            "return min(row + i * FRAGMENT, last_row)",
            "return row + i * FRAGMENT",
            "out_of_bounds",
        ),
        "key past the end read": (
            "dkv",
            "return min(row + i * FRAGMENT, last_row)",
            "return row + i * FRAGMENT",
            "out_of_bounds",
        ),
        "query past the end stored": (
            "dq",
            "if (!queries.exists(i))",
            "if (false)",
            "race",
        ),
        "key past the end stored": ("dkv", "if (key >= sequence.kv_rows)", "if (false)", "race"),
        "half a tile staged": (
            "dkv",
            repeated("i < (UNITS + THREADS - 1) / THREADS"),
            "i < UNITS / THREADS / 2",
            "uninitialised",
        ),
    },
    unrefined("dlse"): {
        "dlse added": ("delta", "sum -= dlse", "sum += dlse"),
        "dlse ignored": ("delta", "#if DLSE\n    sum", "#if 0\n    sum"),
        "dlse of the first row": ("delta", "row * params.dlse_strides.row", "0"),
        "dlse of the first head": ("delta", "head * params.dlse_strides.head", "0"),
    },
    "mask, whole rows": {
        "weights of a row without a key": (
            "dq",
            "lse < LOWEST_LSE ? INFINITY : lse",
            "lse == INFINITY ? INFINITY : lse",
        ),
    },
    "causal, top left": {
        "band never applied": ("dq", SEEN_BY_ALL, "true"),
        "band never applied, dkv": ("dkv", SEEN_BY_ALL, "true"),
        "diagonal hidden from keys": (
            "dkv",
            "key - q_offset - window_right)",
            "key - q_offset - window_right + 1)",
        ),
        "a query before the diagonal": (
            "dkv",
            "key - q_offset - window_right)",
            "key - q_offset - window_right - 1)",
        ),
        "offset ignored": (
            "dkv",
            "key - q_offset - window_right)",
            "key - q_offset - window_right + 24)",
        ),
        "tile begins at the last key of all": (
            "dkv",
            "visible.queries_of(max(tile_key, sequence.first_key)).begin",
            "visible.queries_of(last()).begin",
        ),
        "visibility of the next key": (
            "dkv",
            "visible.apply<true>(scores, lane_key,",
            "visible.apply<true>(scores, lane_key + 1,",
        ),
        "visibility not transposed": (
            "dkv",
            "visible.apply<true>(scores",
            "visible.apply<false>(scores",
        ),
    },
    "window, causal": {
        "last visible queries skipped": (
            "dkv",
            SEEN_BY_ANY,
            SEEN_BY_ANY.replace("block <", "block + 8 <"),
        ),
        "first visible queries skipped": (
            "dkv",
            SEEN_BY_ANY,
            SEEN_BY_ANY.replace("by_any.begin", "by_any.begin + 8"),
        ),
        "last visible keys skipped": (
            "dq",
            SEEN_BY_ANY,
            SEEN_BY_ANY.replace("block <", "block + 8 <"),
        ),
    },
    "window": {
        "left window one short": (
            "dkv",
            "key - q_offset + window_left + 1",
            "key - q_offset + window_left",
        ),
        "left window one long": (
            "dkv",
            "key - q_offset + window_left + 1",
            "key - q_offset + window_left + 2",
        ),
        "right window one short": (
            "dkv",
            "key - q_offset - window_right)",
            "key - q_offset - window_right + 1)",
        ),
        "right window one long": (
            "dkv",
            "key - q_offset - window_right)",
            "key - q_offset - window_right - 1)",
        ),
        "left edge never applied": (
            "dkv",
            SEEN_BY_ALL,
            "block >= by_all.begin",
        ),
        "right edge never applied": (
            "dkv",
            SEEN_BY_ALL,
            "block + count <= by_all.end",
        ),
        "tile ends at its first key": (
            "dkv",
            "visible.queries_of(min(tile_key + BLOCK_K - 1, last())).end : 0",
            "visible.queries_of(tile_key).end : 0",
        ),
    },
    "chunk": {
        "chunk begins one early": (
            "dkv",
            "max(begin, chunk_start - q_offset)",
            "max(begin, chunk_start - q_offset - 1)",
        ),
        "chunk ends one late": (
            "dkv",
            "chunk_start - q_offset + chunk",
            "chunk_start - q_offset + chunk + 1",
        ),
        "chunk ends one early": (
            "dkv",
            "chunk_start - q_offset + chunk",
            "chunk_start - q_offset + chunk - 1",
        ),
    },
    "seqused_k": {
        "dk and dv behind the keys unwritten": (
            "dkv",
            "if (key >= sequence.kv_rows)",
            "if (key > last())",
        ),
    },
    nan_outside: {
        "keys behind the last not zeroed": ("dq", "if (ZEROED)", "if (false)"),
        "keys before the first not zeroed": (
            "dq",
            "row >= begin && row < end ? even",
            "row < end ? even",
        ),
        "gradients of keys that do not exist": (
            "dkv",
            "key >= sequence.first_key && key <= last();",
            "true;",
        ),
        "gradients of keys before the first": (
            "dkv",
            "key >= sequence.first_key && key <= last();",
            "key <= last();",
        ),
    },
    "mask": {
        "mask not transposed": (
            "dkv",
            "Offset(TRANSPOSED ? strides.key : strides.query)",
            "Offset(strides.query)",
            "out_of_bounds",
        ),
        "mask of the even query": ("dkv", "shown.y ? score.y", "shown.x ? score.y"),
        "mask of the KV head": (
            "dkv",
            "rules.reset(inputs, batch, head,",
            "rules.reset(inputs, batch, keys.kv_head,",
        ),
        "mask's key past the end read": (
            "dkv",
            "Offset(min(row + i * FRAGMENT, last_row)) * row_stride",
            "Offset(row + i * FRAGMENT) * row_stride",
            "out_of_bounds",
        ),
        "mask's query past the end read": (
            "dkv",
            "min(column + 1, last_column)",
            "(column + 1)",
            "out_of_bounds",
        ),
    },
    "bias": {
        "bias dropped": (
            "dkv",
            "score += Fragment<float>(base_2(added.x), base_2(added.y));",
            "",
        ),
        "bias of the next block": (
            "dkv",
            "first_column + lane_column + column_offset(j);",
            "lane_column + column_offset(j);",
        ),
    },
    "softcap": {
        "slope of the cap dropped": ("dq", "gradients.multiply(slopes);", ""),
        "slope of the cap dropped, dkv": ("dkv", "gradients.multiply(slopes);", ""),
        "slope 1 - tanh": ("dq", "1.0f - capped * capped", "1.0f - capped"),
        "slope of the scaled cap": (
            "dkv",
            "1.0f - capped * capped",
            "1.0f - capped * capped * params.cap_log2 * params.cap_log2",
        ),
        "cap ignored": (
            "dq",
            "scores.scale(params.cap_log2)",
            "scores.scale(params.scale_log2)",
        ),
    },
    "alibi at an offset": {
        "offset's sign not transposed": (
            "dkv",
            "(TRANSPOSED ? -visible.q_offset : visible.q_offset)",
            "visible.q_offset",
        ),
        "slope of the KV head": (
            "dkv",
            "rules.reset(inputs, batch, head,",
            "rules.reset(inputs, batch, keys.kv_head,",
        ),
        "distance of the even column": ("dkv", "fabs(first - 1.0f)", "fabs(first)"),
    },
    "rotary": {
        "q not rotated in pairs": (
            "dkv",
            "return rotary.rotated_chunk<COLUMNS>(tensor, place.row, place.position, column);",
            "return load_chunk<COLUMNS>(tensor, place.row, column);",
        ),
        "k not rotated": (
            "dkv",
            "? rotary.rotated(tensor, offset(row), row, column)",
            "? tensor[offset(row) + column]",
        ),
        "q not rotated": (
            "dq",
            "? rotary.rotated(tensor, offset(row), row, column)",
            "? tensor[offset(row) + column]",
        ),
        "rows of the first table": (
            "dkv",
            "params.q_cos_strides, q_sin, params.q_sin_strides, batch)",
            "params.q_cos_strides, q_sin, params.q_sin_strides, 0)",
        ),
    },
    "slices": {
        "slice of dq not moved": (
            "dq",
            "row_offset(strides, batch, head, start) + slice * SLICE",
            "row_offset(strides, batch, head, start)",
            "race",
        ),
        "slice of k not moved": ("dq", "queries.place.slice * DQ_SLICE + first_dq", "first_dq"),
        "slice of q not moved": ("dkv", "keys.slice * DK_SLICE + first_dk", "first_dk"),
        "slice of dout not moved": ("dkv", "keys.slice * DV_SLICE + first_dv", "first_dv"),
        "fragment behind the last column": (
            "dq",
            "WHOLE ? d : min(d, rows.last)",
            "d",
            "threadgroup_out_of_bounds",
        ),
    },
    "odd head dim": {
        "column behind the last stored": (
            "dkv",
            "if (column + 1 < columns)",
            "if (true)",
            "race",
        ),
    },
    unrefined("plain"): {
        "delta of one lane": ("delta", "sum = simd_sum(sum);", ""),
        "delta of the first columns": (
            "delta",
            "column < HEAD_DIM_V; column += SIMD_LANES",
            "column < HEAD_DIM_V / 2; column += SIMD_LANES",
        ),
    },
    packed: {
        "delta of no sequence unwritten": (
            "dq",
            "if (EXACT_DELTA && place.slice == 0) {\n      delta_rows.fill",
            "if (false) {\n      delta_rows.fill",
        ),
        "first query of the first sequence": (
            "dkv",
            "operand.reset(dout, strides, batch, head, sequence.q_start)",
            "operand.reset(dout, strides, batch, head, 0)",
        ),
        "dq of the first sequence": (
            "dq",
            "dq_rows.reset(dq, params.dq_strides, batch, head, first, place.slice)",
            "dq_rows.reset(dq, params.dq_strides, batch, head, 0, place.slice)",
            "race",
        ),
        "dk of the first sequence": (
            "dkv",
            "params.dk_strides, batch, kv_head,\n                  sequence.kv_start, slice)",
            "params.dk_strides, batch, kv_head, 0, slice)",
            "race",
        ),
        "log-sum-exp of the first sequence": (
            "dq",
            "row_offset(strides, batch, head, 0) + sequence.q_start",
            "row_offset(strides, batch, head, 0)",
        ),
        "statistics of the first sequence": (
            "dkv",
            "row_offset(strides, batch, head, 0) + sequence.q_start",
            "row_offset(strides, batch, head, 0)",
        ),
        "rows of no sequence unwritten": (
            "dkv",
            "dk_rows.fill(value, first, sequence.kv_rows, step);",
            "",
        ),
        "queries of no sequence unwritten": (
            "dq",
            "dq_rows.fill(value, first, sequence.q_length, step);",
            "",
        ),
    },
}


def show(shown):
    if shown in FEATURES:
        check(shown, CPU)
    else:
        shown(CPU)


test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(
    MUTANTS, "flash_bwd_{}", run=show
)
