"""Planted faults in what the gradient kernels' queries see: masks, bands, lengths, packed rows."""

import math

import pytest
import torch

from tests.attention.flash_bwd_check import (
    assert_gradients,
    backward,
    check_flash_varlen_bwd,
    judge,
    make_gradients,
)
from tests.attention.flash_bwd_features import problem, show
from tests.attention.flash_fwd_check import make_packed
from tests.attention.flash_fwd_options import ints
from tests.helpers.mutants import cases, expect_caught, plant
from torch_metal_attn import simulate

HIDES_DQ = "if (kv_block < of_last.begin || kv_block + BLOCK_K > of_first.end)"
HIDES_DKV = "if (q_block < of_last.begin || q_block + BLOCK_Q > of_first.end)"
SKIPS_DQ = "if (kv_block >= seen_end || kv_block + BLOCK_K <= seen_begin "
SKIPS_DKV = "if (q_block >= seen_end || q_block + BLOCK_Q <= seen_begin)"


def nan_outside(dtype, device):
    """Lengths with NaN in the memory of what does not exist."""
    (q, k, v), _ = problem("plain", dtype)
    options = {"seqused_k": ints(90, 50), "leftpad_k": ints(5, 35)}
    dout, dlse = make_gradients(q, v, q.shape[:3])
    oracle, errors = judge(q, k, v, dout, dlse, options)
    for b, (first, end) in enumerate([(5, 90), (35, 50)]):
        for tensor in (k, v):
            tensor[b, :, :first] = math.nan
            tensor[b, :, end:] = math.nan
    _, *found, _ = backward(q, k, v, dout, dlse, device, options)
    assert_gradients(found, oracle, errors, (q, k, v), dout, options)


def packed(dtype, device):
    """With rows of no sequence on both sides, and an empty sequence."""
    q, k, v, *packing = make_packed(
        [40, 0, 77], [50, 3, 64], heads=4, kv_heads=2, head_dim=16, dtype=dtype
    )
    q, k, v = torch.cat([q, q[:9]]), torch.cat([k, k[:5]]), torch.cat([v, v[:5]])
    options = {"window_size_left": 40, "causal": True, "dlse": True}
    check_flash_varlen_bwd(q, k, v, *packing, **options, device=device)


MUTANTS = {
    "mask, whole rows": {
        "weights of a row without a key": (
            "dq",
            "lse < LOWEST_LSE ? INFINITY : lse",
            "lse == INFINITY ? INFINITY : lse",
        ),
        "weights of a row without a key, dkv": (
            "dkv",
            "lse < LOWEST_LSE ? INFINITY : lse",
            "lse == INFINITY ? INFINITY : lse",
        ),
    },
    "causal, top left": {
        "band never applied": ("dq", HIDES_DQ, "if (false)"),
        "band never applied, dkv": ("dkv", HIDES_DKV, "if (false)"),
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
        "tile begins at its last key": (
            "dkv",
            "visible.queries_of(max(tile_key, first_key)).begin",
            "visible.queries_of(min(tile_key + BLOCK_K - 1, last_key)).begin",
        ),
        "visibility of the next key": (
            "dkv",
            "visible.apply<true>(weights, lane_key,",
            "visible.apply<true>(weights, lane_key + 1,",
        ),
        "visibility not transposed": (
            "dkv",
            "visible.apply<true>(weights",
            "visible.apply<false>(weights",
        ),
    },
    "window, causal": {
        "last visible queries skipped": (
            "dkv",
            SKIPS_DKV,
            SKIPS_DKV.replace("q_block >=", "q_block + 8 >="),
        ),
        "first visible queries skipped": (
            "dkv",
            SKIPS_DKV,
            SKIPS_DKV.replace("<= seen_begin", "<= seen_begin + 8"),
        ),
        "last visible keys skipped": (
            "dq",
            SKIPS_DQ,
            SKIPS_DQ.replace("kv_block >=", "kv_block + 8 >="),
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
            HIDES_DKV,
            "if (q_block < of_last.begin)",
        ),
        "right edge never applied": (
            "dkv",
            HIDES_DKV,
            "if (q_block + BLOCK_Q > of_first.end)",
        ),
        "tile ends at its first key": (
            "dkv",
            "visible.queries_of(min(tile_key + BLOCK_K - 1, last_key)).end : 0",
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
        "dk and dv behind the keys unwritten": ("dkv", "if (key >= rows)", "if (key > last_key)"),
    },
    nan_outside: {
        "keys behind the last not zeroed": (
            "dq",
            "row >= begin && row < end ? values : uint4(0)",
            "values",
        ),
        "keys behind the last not zeroed in pairs": ("dq", "if (ZEROED)", "if (false)"),
        "keys before the first not zeroed": (
            "dq",
            "row >= begin && row < end ? values : uint4(0)",
            "row < end ? values : uint4(0)",
        ),
        "gradients of keys that do not exist": (
            "dkv",
            "key >= first_key && key <= last_key;",
            "true;",
        ),
        "gradients of keys before the first": (
            "dkv",
            "key >= first_key && key <= last_key;",
            "key <= last_key;",
        ),
    },
    "mask": {
        "mask not transposed": (
            "dkv",
            "rows.reset(first, strides.key, strides.query, row, last_key, last_query)",
            "rows.reset(first, strides.query, strides.key, row, last_key, last_query)",
            "out_of_bounds",
        ),
        "mask of the even query": ("dkv", "shown.y ? score.y", "shown.x ? score.y"),
        "mask of the KV head": (
            "dkv",
            "rules =\n        inputs.score_rules<ROW_FRAGMENTS, true>(batch, head,",
            "rules =\n        inputs.score_rules<ROW_FRAGMENTS, true>(batch, kv_head,",
        ),
        "mask's key past the end read": (
            "dkv",
            "rows[i] = mask + min(row + i * FRAGMENT, last_row) * row_stride;",
            "rows[i] = mask + (row + i * FRAGMENT) * row_stride;",
            "out_of_bounds",
        ),
        "mask's query past the end read": (
            "dkv",
            "min(column + 1, last_column)",
            "(column + 1)",
            "out_of_bounds",
        ),
    },
    packed: {
        "delta of no sequence unwritten": (
            "dq",
            "    if (slice == 0) {\n      exact_rows.fill",
            "    if (false) {\n      exact_rows.fill",
        ),
        "first query of the first sequence": (
            "dkv",
            "first_row(dout, params.dout_strides, batch, head, sequence.q_start)",
            "first_row(dout, params.dout_strides, batch, head, 0)",
        ),
        "dq of the first sequence": (
            "dq",
            "dq_rows.reset(dq, params.dq_strides, batch, head, sequence.q_start, slice)",
            "dq_rows.reset(dq, params.dq_strides, batch, head, 0, slice)",
        ),
        "dk of the first sequence": (
            "dkv",
            "params.dk_strides, batch, kv_head, sequence.kv_start, slice)",
            "params.dk_strides, batch, kv_head, 0, slice)",
        ),
        "log-sum-exp of the first sequence": (
            "dq",
            "head * params.lse_strides.head + sequence.q_start",
            "head * params.lse_strides.head",
        ),
        "statistics of the first sequence": (
            "dkv",
            "head * params.lse_strides.head + sequence.q_start",
            "head * params.lse_strides.head",
        ),
        "rows of no sequence unwritten": (
            "dkv",
            "dk_rows.fill(value, first, rows, threadgroups.x * THREADS);",
            "",
        ),
        "queries of no sequence unwritten": (
            "dq",
            "dq_rows.fill(sequence.impossible ? NAN : 0.0f, "
            "threadgroup_position.x * THREADS + thread_index,\n                 "
            "sequence.q_length, threadgroups.x * THREADS);",
            "",
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
