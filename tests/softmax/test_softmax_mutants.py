"""Planted faults in the text of softmax.metal: the tests' own checks must see every one of them."""

import math

import pytest
import torch

from tests.helpers.mutants import each_unchanged, expect_caught, pairs, plant_among
from tests.softmax.test_softmax import check_causal_mask, check_softmax, normal
from torch_metal_attn import simulate


def rows_of_every_kind():
    """Short, long and longest rows; wide, ragged and strided ones, the last one ends the memory."""
    for x in (
        normal(9, 65),
        torch.linspace(-30, 30, 5000).reshape(1, 5000).repeat(3, 1),
        normal(1, 17000, dtype=torch.float16),
        normal(4 * 68 - 2).as_strided((4, 66), (68, 1)),
        normal(40, 3).t(),
    ):
        check_softmax(x, device="cpu")
    x = torch.full((3, 70), -math.inf)
    x[1, 3] = 0.0
    x[2, 3] = math.nan
    check_softmax(x, device="cpu")


def masks_of_every_kind():
    for scores in (normal(2, 33, 40), normal(9, 65), normal(65, 9).t(), normal(2, 1100)):
        check_causal_mask(scores, 3, device="cpu")


# What a fault changes in the shader's text, and the fault that the simulator then reports; None
# where only the numbers can show it.
SOFTMAX_MUTANTS = {
    "sum not rescaled": ("  row_sum *= correction;", "", None),
    "maximum of one lane": ("raise(simd_max(row_max))", "raise(row_max)", None),
    "sum of one lane": ("row_sum = simd_sum(row_sum)", "row_sum = row_sum", None),
    "maximum not carried": ("float new_max = row_max;", "float new_max = MASKED_ROW_MAX;", None),
    "one value left out": (
        "i < VALUES; i++) {\n      sum",
        "i < VALUES - 1; i++) {\n      sum",
        None,
    ),
    "base 2": ("fast::exp2((x - row_max) * M_LOG2E_F)", "fast::exp2(x - row_max)", None),
    "-inf rows are not 0": ("row_sum == 0.0f ? 0.0f : 1.0f / row_sum", "1.0f / row_sum", None),
    "NaN lost": ("row_sum == 0.0f ? 0.0f", "!(row_sum > 0.0f) ? 0.0f", None),
    "scaled by 0.98": ("weight(items[i]) * factor", "weight(items[i]) * 0.98f * factor", None),
    "last block skipped": (
        "block < length; block += ROW_BLOCK) {\n    load_items",
        "block + ROW_BLOCK < length; block += ROW_BLOCK) {\n    load_items",
        None,
    ),
    "one SIMD group's part": ("row_max[lane];", "row_max[0];", None),
    "no barrier": ("threadgroup_barrier(mem_flags::mem_threadgroup);", "", "uninitialised"),
    "barrier orders nothing": (
        "threadgroup_barrier(mem_flags::mem_threadgroup);",
        "threadgroup_barrier(mem_flags::mem_none);",
        "race",
    ),
    "past the row read": (
        "position < length ? float(row[position * stride])",
        "true ? float(row[position * stride])",
        "out_of_bounds",
    ),
    "past the row read, wide": ("first + ITEMS <= length", "first < length", "out_of_bounds"),
    "past the row stored": (
        "position >= begin && position < length",
        "position >= begin",
        "race",
    ),
    "past the last row": ("if (row >= params.rows)", "if (false)", "race"),
}

MASK_MUTANTS = {
    "diagonal hidden": ("query + params.q_offset + 1;", "query + params.q_offset;", None),
    "one key past the diagonal": (
        "query + params.q_offset + 1;",
        "query + params.q_offset + 2;",
        None,
    ),
    "offset ignored": ("query + params.q_offset + 1;", "query + 1;", None),
    "query ignored": ("query + params.q_offset + 1;", "params.q_offset + 1;", None),
    "rows of the batch counted on": ("row % params.q_length", "row", None),
    "chunk of the diagonal stored": ("first >= begin && first", "first", None),
    "visible key stored": (
        "position >= begin && position < length",
        "position < length",
        None,
    ),
    "last key skipped": ("block < params.kv_length;", "block + 8 < params.kv_length;", None),
    "past the row stored": (
        "position >= begin && position < length",
        "position >= begin",
        "race",
    ),
}
CASES = [("softmax", *case) for case in SOFTMAX_MUTANTS.items()] + [
    ("apply_causal_mask", *case) for case in MASK_MUTANTS.items()
]
CHECKS = {"softmax": rows_of_every_kind, "apply_causal_mask": masks_of_every_kind}


def shown_by(kernel):
    return pairs({name: mutant for k, name, mutant in CASES if k == kernel})


@pytest.mark.parametrize(
    "kernel, mutant", [pytest.param(k, m, id=f"{k}: {name}") for k, name, m in CASES]
)
def test_mutant_is_caught(kernel, mutant, monkeypatch):
    old, new, fault = mutant
    plant_among(monkeypatch, "softmax", old, new, shown_by(kernel))
    expect_caught(CHECKS[kernel], fault=fault, kernel=kernel)


@pytest.mark.parametrize("kernel", CHECKS)
def test_the_unchanged_kernel_passes(kernel):
    for _ in each_unchanged("softmax", shown_by(kernel)):
        with simulate(check=True):
            CHECKS[kernel]()
