"""Planted faults in the gradient kernels' text: the tests' own check must see every one of them.

Those in what a query sees are in test_flash_bwd_visibility_mutants.py.
"""

import pytest
import torch

from tests.attention.flash_bwd_check import check_flash_bwd
from tests.attention.flash_bwd_features import problem, show
from tests.attention.flash_bwd_sharp import check_sharp
from tests.helpers.mutants import cases, expect_caught, plant
from torch_metal_attn import simulate

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"


def unrefined(feature):
    """The problem of a feature where the walk over the keys does not repair delta."""

    def shown(dtype, device):
        qkv, options = problem(feature, dtype)
        check_flash_bwd(*qkv, **options, exact_delta=False, device=device)

    shown.__name__ = f"unrefined, {feature}"
    return shown


def sharp(name, only=None):
    """A problem of flash_bwd_sharp, in `only` if other dtypes do not show the fault."""

    def shown(dtype, device):
        check_sharp(name, only or dtype, device)

    shown.__name__ = f"sharp, {name}"
    return shown


MUTANTS = {
    "plain": {
        "dq without the scale": (
            "dq",
            "dq_tile.fragments[i][d] * scale",
            "dq_tile.fragments[i][d]",
        ),
        "dk without the scale": (
            "dkv",
            "dk_tile.fragments[i][d] * problem.softmax_scale",
            "dk_tile.fragments[i][d]",
        ),
        "dv with the scale": (
            "dkv",
            "exists ? dv_tile.fragments[i][d]",
            "exists ? dv_tile.fragments[i][d] * problem.softmax_scale",
        ),
        "dq without delta": (
            "dq",
            "(gradients.fragments[i][j] - deltas[i])",
            "gradients.fragments[i][j]",
        ),
        "dk without delta": (
            "dkv",
            "(gradients.fragments[i][j] - row_delta)",
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
            "out_of_bounds",
        ),
        "log-sum-exp taken for base 2": ("dq", "lse * M_LOG2E_F", "lse"),
        "log-sum-exp taken for base 2, dkv": ("dkv", "lse * M_LOG2E_F", "lse"),
        "log-sum-exp of another head": (
            "dq",
            "head * params.lse_strides.head",
            "kv_head * params.lse_strides.head",
        ),
        "log-sum-exp of another query": (
            "dkv",
            "weight_origin(lse[statistics + query])",
            "weight_origin(lse[statistics + max(query - 1, 0)])",
        ),
        "delta of another query": (
            "dkv",
            "delta[statistics + query]",
            "delta[statistics + max(query - 1, 0)]",
        ),
        "a query head skipped": ("dkv", "int member = 0;", "int member = 1;"),
        "only one query head": ("dkv", "member < problem.queries_per_kv", "member < 1"),
        "the first query head each time": (
            "dkv",
            "kv_head * problem.queries_per_kv + member",
            "kv_head * problem.queries_per_kv",
        ),
        "heads of another group": (
            "dkv",
            "kv_head * problem.queries_per_kv + member",
            "kv_head + member * 2",
        ),
        "wrong KV head": ("dq", "head / problem.queries_per_kv", "head % problem.queries_per_kv"),
        "dout of another head": (
            "dkv",
            "first_row(dout, params.dout_strides, batch, head,",
            "first_row(dout, params.dout_strides, batch, kv_head,",
        ),
        "q in k's place": (
            "dkv",
            "accumulate<ELEMENT, DK_SLICE>(dk_tile, gradients, q_rows_lane)",
            "accumulate<ELEMENT, DK_SLICE>(dk_tile, weights, q_rows_lane)",
        ),
        "rows of a pair swapped": (
            "dkv",
            "interleave<T>(even_row, odd_row, low, high)",
            "interleave<T>(odd_row, even_row, low, high)",
        ),
        "statistics past the end": (
            "dkv",
            "exists ? weight_origin(lse[statistics + query]) : INFINITY",
            "weight_origin(lse[statistics + query])",
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
            BARRIER + "      if (kv_block",
            "if (kv_block",
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
            BARRIER + "      if (q_block",
            "if (q_block",
            "uninitialised",
        ),
        "dkv: barrier orders nothing": (
            "dkv",
            BARRIER + "      if (q_block",
            BARRIER.replace("mem_threadgroup", "mem_none") + "if (q_block",
            "race",
        ),
        "row past the end staged": ("dq", "min(row + 1, end - 1)", "row + 1", "out_of_bounds"),
        "row past the end staged, dkv": (
            "dkv",
            "place = source.find(min(row, end - 1))",
            "place = source.find(row)",
            "out_of_bounds",
        ),
        "query past the end read": (
            "dq",
            "positions[i] = min(row + i * FRAGMENT, last_row)",
            "positions[i] = row + i * FRAGMENT",
            "out_of_bounds",
        ),
        "key past the end read": (
            "dkv",
            "positions[i] = min(row + i * FRAGMENT, last_row)",
            "positions[i] = row + i * FRAGMENT",
            "out_of_bounds",
        ),
        "query past the end stored": (
            "dq",
            "if (query > last_query)",
            "if (false)",
            "out_of_bounds",
        ),
        "key past the end stored": ("dkv", "if (key >= rows)", "if (false)", "out_of_bounds"),
        "half a tile staged": (
            "dkv",
            "i < (UNITS + THREADS - 1) / THREADS",
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
    "bias": {
        "bias dropped": (
            "dkv",
            "score += Fragment<float>(base_2(added.x), base_2(added.y));",
            "",
        ),
        "bias of the next block": (
            "dkv",
            "first_column + lane_column + j * FRAGMENT;",
            "lane_column + j * FRAGMENT;",
        ),
    },
    "softcap": {
        "slope of the cap dropped": ("dq", "gradients.multiply(slopes);", ""),
        "slope of the cap dropped, dkv": ("dkv", "gradients.multiply(slopes);", ""),
        "slope 1 - tanh": ("dq", "1.0f - capped * capped", "1.0f - capped"),
        "slope 1 - tanh, dkv": ("dkv", "1.0f - capped * capped", "1.0f - capped"),
        "slope of the scaled cap": (
            "dkv",
            "1.0f - capped * capped",
            "1.0f - capped * capped * params.cap_log2 * params.cap_log2",
        ),
        "cap ignored": (
            "dq",
            "scores.scale(params.cap_log2);\n#else",
            "scores.scale(params.scale_log2);\n#else",
        ),
    },
    "alibi, causal": {
        "offset's sign not transposed": (
            "dkv",
            "(TRANSPOSED ? -visible.q_offset : visible.q_offset)",
            "visible.q_offset",
        ),
        "slope of the KV head": (
            "dkv",
            "rules =\n        inputs.score_rules<ROW_FRAGMENTS, true>(batch, head,",
            "rules =\n        inputs.score_rules<ROW_FRAGMENTS, true>(batch, kv_head,",
        ),
        "distance of the even column": ("dkv", "fabs(first - 1.0f)", "fabs(first)"),
    },
    "rotary": {
        "q not rotated in pairs": (
            "dkv",
            "return rotary.rotated_chunk<COLUMNS>(place.row, place.position, column);",
            "return load_chunk<COLUMNS>(place.row, column);",
        ),
        "k not rotated": (
            "dkv",
            "? rotary.rotated(rows + row * row_stride, row, column)",
            "? rows[row * row_stride + column]",
        ),
        "q not rotated": (
            "dq",
            "? rotary.rotated(rows + row * row_stride, row, column)",
            "? rows[row * row_stride + column]",
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
            "start * strides.row + slice * SLICE",
            "start * strides.row",
        ),
        "slice of dk and dv not moved": (
            "dkv",
            "start * strides.row + slice * SLICE",
            "start * strides.row",
        ),
        "slice of k not moved": ("dq", "slice * DQ_SLICE,", "0,"),
        "slice of q not moved": ("dkv", "slice * DK_SLICE,", "0,"),
        "slice of dout not moved": ("dkv", "slice * DV_SLICE,", "0,"),
    },
    "odd head dim": {
        "column behind the last stored": (
            "dkv",
            "if (column + 1 < columns)",
            "if (true)",
            "out_of_bounds",
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
    sharp("offset values"): {
        "no second walk": ("dq", "if (any_again == 0.0f)", "if (true)"),
        "second walk of one SIMD group": (
            "dq",
            "(walk > 0 && !again)",
            "(walk > 0 && simdgroup > 0)",
        ),
        "second walk adds": ("dq", "deltas[i] = excess;", "deltas[i] = -excess;"),
        "second walk with values": (
            "dq",
            "gradients.fill(0.0f);",
            "multiply_transposed<ELEMENT, V_COLUMNS>(gradients, dout_tile, v_pairs_lane);",
        ),
        "no barrier after the vote": (
            "dq",
            BARRIER + "    float any_again",
            "float any_again",
            ("race", "uninitialised"),
        ),
    },
    sharp("values to 9", torch.float32): {
        "weights not divided by their sum": (
            "dkv",
            "exists ? normalisers[statistics + query] : 1.0f",
            "1.0f",
        ),
    },
    sharp("everything"): {
        "rounded delta": (
            "dq",
            "Fragment<float>(deltas[i] + excess, 0.0f)",
            "Fragment<float>(deltas[i], 0.0f)",
        ),
        "sink not in the sum": ("dq", "sums[i].gradients -= sink_weight * deltas[i];", ""),
        "gradient of the log-sum-exp not in the sum": (
            "dq",
            "excess -= dlse",
            "excess -= 0.0f * dlse",
        ),
    },
}


@pytest.mark.parametrize("shown, kernel, old, new, fault", cases(MUTANTS, size=4))
def test_mutant_is_caught(shown, kernel, old, new, fault, monkeypatch):
    family = f"flash_bwd_{kernel}"
    plant(monkeypatch, family, old, new)
    expect_caught(lambda: show(shown), fault=fault, kernel=family)


@pytest.mark.parametrize("shown", MUTANTS, ids=lambda shown: getattr(shown, "__name__", shown))
def test_the_unchanged_kernels_pass(shown):
    with simulate(check=True):
        show(shown)
