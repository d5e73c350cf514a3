"""Planted faults in the text of append_kv: the tests' own checks must see each."""

import pytest
import torch

from tests.attention.test_flash_fwd_device_lengths import after_the_checks
from tests.cache.append_check import check, make
from tests.helpers.mutants import each_unchanged, expect_caught, pairs, plant_among
from torch_metal_attn import simulate

# What a fault changes in the shader's text, the check that must see it, and the fault that the
# simulator then reports; None where only the bits can show it.
MUTANTS = {
    # Where rows go.
    "one position late": (
        "plain",
        "position = place.first + row;",
        "position = place.first + row + 1;",
        None,
    ),
    "first sequence's length": ("plain", "cache_seqlens[batch]", "cache_seqlens[0]", None),
    "wrong stride of batches": (
        "plain",
        "cache_batch_stride = cache_strides.batch",
        "cache_batch_stride = cache_strides.batch + cache_strides.row",
        None,
    ),
    "v by k's strides": (
        "plain",
        "params.v_cache_strides",
        "params.k_cache_strides",
        "out_of_bounds",
    ),
    "last row left out": (
        "plain",
        "min(end, params.capacity",
        "min(end - 1, params.capacity",
        None,
    ),
    "rows that do not fit": (
        "no room",
        "min(end, params.capacity - place.first)",
        "end",
        "out_of_bounds",
    ),
    "lengths below nothing": ("below nothing", "place.first < 0 ? 0 :", "", "out_of_bounds"),
    "wrong stride of pages": (
        "paged",
        "cache_batch_stride = cache_strides.batch",
        "cache_batch_stride = cache_strides.head",
        "race",
    ),
    "row of the sequence in a page": (
        "paged",
        "uint(row) % PAGE_ROWS",
        "uint(row) % (PAGE_ROWS / 2)",
        "race",
    ),
    "row as if pages were powers of two": (
        "paged",
        "uint(row) % PAGE_ROWS",
        "row & (PAGE_ROWS - 1)",
        "race",
    ),
    "neighbours swapped as they are rounded": (
        "rounded",
        "KV_ELEMENT(elements[i])",
        "KV_ELEMENT(elements[i ^ 1])",
        None,
    ),
    "eight rows in one page": (
        "paged",
        "pages.page_of(position)",
        "pages.page_of(position / 8 * 8)",
        "simd_lane",
    ),
    "pages of the first sequence": (
        "paged",
        "block_table + batch * params.append.block_table_stride",
        "block_table",
        "race",
    ),
    "page of the first row": (
        "paged",
        "pages.page_of(position)",
        "pages.page_of(place.first)",
        "simd_lane",
    ),
    "pages that are none": ("no page", "batch != NO_PAGE", "true", "out_of_bounds"),
    "pages past the last": (
        "no page",
        "number < cache_size ? max(number, NO_PAGE) : NO_PAGE",
        "number",
        "out_of_bounds",
    ),
    "batch that is none": (
        "no batch",
        "batch >= 0 && batch < params.cache_size",
        "true",
        "out_of_bounds",
    ),
    "index ignored": ("indexed", "cache_batch_idx[batch]", "batch", None),
    # What they hold.
    "new rows read outside": (
        "plain",
        "rows + row * row_stride;",
        "rows + row * row_stride + 100000;",
        "out_of_bounds",
    ),
    "k not rotated": (
        "rotated",
        "AppendRows<HEAD_DIM_QK, NEW_K_ROTARY> k",
        "AppendRows<HEAD_DIM_QK, false> k",
        None,
    ),
    "rotated at the wrong row": (
        "rotated",
        "place.first_rotary + row, column",
        "int64_t(place.first) + row, column",
        None,
    ),
    "rotated at the first row": (
        "rotated",
        "place.first_rotary + row, column",
        "place.first_rotary, column",
        None,
    ),
    "padding of the first sequence": ("rotated", "leftpad_k[batch]", "leftpad_k[0]", None),
    "table row that is none": ("no table row", "rotary_row < table_rows", "true", "out_of_bounds"),
    "q not rotated": ("rotated", "head < rope.q_heads", "false", None),
    "q's tokens not counted": ("rotated", "params.q_advances != 0 ? token : 0", "0", None),
    "q's tokens counted": ("rotated at once", "params.q_advances != 0 ? token : 0", "token", None),
    "q's last tokens left out": (
        "rotated",
        "rope.length - first_token",
        "rope.length - 1 - first_token",
        None,
    ),
    # How it is packed.
    "scale of another block": (
        "q8_0",
        "column / SCALE_COLUMNS] = KV",
        "(column / SCALE_COLUMNS + 1) % (COLUMNS / SCALE_COLUMNS)] = KV",
        None,
    ),
    "scale of a lane": ("q8_0", "distance < BLOCK_LANES", "distance < 2", None),
    "scale of two blocks": ("q8_0", "distance < BLOCK_LANES", "distance < 2 * BLOCK_LANES", None),
    "a step that is not rounded": (
        "q8_0",
        "usable ? float(scale) : 1.0f",
        "usable ? fabs(extreme) / 127.0f : 1.0f",
        None,
    ),
    "nibbles swapped": ("q4_0", "low | (high << 4)", "high | (low << 4)", None),
    "sign of the last of equals": (
        "q4_0",
        "(lane & distance) != 0",
        "(lane & distance) == 0",
        None,
    ),
    "nibbles not clamped": (
        "q4_0",
        "quotients[2 * i] + 8.0f, 0.0f, 15.0f",
        "quotients[2 * i] + 8.0f, 0.0f, 16.0f",
        None,
    ),
    "NaN unseen": ("q8_0", "& 0x7fffffffu", "& 0x7f800000u", None),
    "halves away from even": ("fp8", "0x7ffffu + ((bits >> 20) & 1u)", "0x80000u", None),
    "steps below 2^-6": ("fp8", "magnitude < 0.015625f", "magnitude < 0.0078125f", None),
    "scale of another head": ("fp8", "kv_head * strides.head]);", "0]);", None),
    "sign lost": ("fp8", "(as_type<uint>(value) >> 24) & 0x80u", "0", None),
}


def special(format):
    """Ties, equals of either sign, NaN, and numbers below the normal ones."""
    problem = make(format=format, seqlens=[3, 11], length=9)
    for name in ("k", "v"):
        x = problem.tensors[name]
        x[:, :, 1, 33], x[:, :, 1, 60] = 50, -50
        x[:, :, 2, 33], x[:, :, 2, 60] = -50, 50
        x[:, :, 3] = (x[:, :, 3] * 8).round() / 64
        x[:, :, 4, 5] = torch.nan
        x[:, :, 5] *= 1e-3
        if format == "fp8_e4m3":
            problem.tensors[f"{name}_scale"] = torch.tensor([[0.25, 0.5], [1.0, 2.0]])
    check(problem)


def after(monkeypatch, name, values, **options):
    """`name` takes impossible values behind the checks; what is there stays in its bounds."""
    problem = make(dtype=torch.float16, **options)
    # The caches end where their memory does.
    for cache in ("k_cache", "v_cache"):
        problem.tensors[cache] = problem.tensors[cache].clone()
    before = problem.tensors["k_cache"].view(torch.int16).clone()
    after_the_checks(monkeypatch, problem.tensors[name], values)
    problem.run()
    return problem, before


def one_written(monkeypatch, name, values, **options):
    """Nothing is written for two sequences with invalid values."""
    problem, before = after(monkeypatch, name, values, **options)
    assert torch.equal(problem.tensors["k_cache"].view(torch.int16), before)


ROTATED = {"seqlens": [3, 11], "leftpad": [2, 1], "rotary_dim": 64, "q_heads": 3}

CHECKS = {
    "plain": lambda _: check(make(head_dim_v=32, seqlens=[3, 11])),
    "paged": lambda _: check(make(page=5, length=21, seqlens=[3, 11])),
    "rounded": lambda _: check(make(dtype=torch.float32, cache_dtype=torch.float16)),
    "indexed": lambda _: check(make(cache_batch_idx=[2, 0])),
    "rotated": lambda _: check(make(**ROTATED)),
    "rotated at once": lambda _: check(make(**ROTATED, rotate_q_by_token=False)),
    "q8_0": lambda _: special("q8_0"),
    "q4_0": lambda _: special("q4_0"),
    "fp8": lambda _: special("fp8_e4m3"),
    "no room": lambda patch: one_written(patch, "cache_seqlens", [32, 2**31 - 1], seqlens=[0, 1]),
    "below nothing": lambda patch: one_written(
        patch, "cache_seqlens", [-40, -(2**31)], seqlens=[0, 1]
    ),
    "no page": lambda patch: one_written(
        patch, "block_table", [[-1] * 4, [11] * 4], page=8, seqlens=[0, 1]
    ),
    "no batch": lambda patch: one_written(
        patch, "cache_batch_idx", [-7, 9], cache_batch_idx=[0, 1]
    ),
    "no table row": lambda patch: no_table_row(patch),
}


def no_table_row(monkeypatch):
    """Rows of the tables that do not exist give NaN in k and in q, and are not read."""
    problem, _ = after(monkeypatch, "leftpad_k", [9, -70], **ROTATED | {"leftpad": [0, 0]})
    k = problem.tensors["k_cache"]
    assert k[0, :, 3:8].isnan().all()
    assert k[1, :, 11:16].isnan().all()
    assert problem.tensors["q"].isnan().all()
    v = problem.tensors["v_cache"]
    assert torch.equal(v[0, :, 3:8], problem.tensors["v"][0])


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name, monkeypatch):
    checked, old, new, fault = MUTANTS[name]
    plant_among(monkeypatch, "append_kv", old, new, pairs(MUTANTS, checked))
    expect_caught(lambda: CHECKS[checked](monkeypatch), fault=fault, kernel="append_kv")


@pytest.mark.parametrize("checked", CHECKS)
def test_the_unchanged_kernel_passes(checked, monkeypatch):
    for _ in each_unchanged("append_kv", pairs(MUTANTS, checked)):
        with simulate(check=True):
            CHECKS[checked](monkeypatch)


def test_rows_that_fit_are_written(monkeypatch):
    """Where only some do, those; so a cache that is full stays whole."""
    with simulate(check=True):
        problem, _ = after(monkeypatch, "cache_seqlens", [30, 29], seqlens=[0, 1])
    k, cache = problem.tensors["k"], problem.tensors["k_cache"]
    assert torch.equal(cache[0, :, 30:], k[0, :, :2])
    assert torch.equal(cache[1, :, 29:], k[1, :, :3])
    assert cache[:, :, :29].isnan().all()
