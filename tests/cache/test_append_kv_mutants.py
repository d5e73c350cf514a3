"""Planted faults in append_kv. The checks of the tests must notice each one."""

from functools import partial

import pytest
import torch

from tests.attention.test_flash_fwd_device_lengths import after_the_checks
from tests.helpers.judged import arguments, judge
from tests.helpers.mutants import mutant_tests
from tests.helpers.steps import append, check_special
from torch_metal_attn import simulate

MUTANTS = {
    "plain": """
        one position late: position = place.first + row{~=> + 1~};
        first sequence's length: cache_seqlens[{~batch => 0~}]
        wrong stride of batches: cache_batch_stride = cache_strides.batch{~=> + cache_strides.row~}
        v by k's strides [out_of_bounds]: params.{~v_cache_strides => k_cache_strides~}
        last row left out: min(end{~=> - 1~}, params.capacity
        new rows read outside [out_of_bounds]: rows + row * row_stride{~=> + 100000~};
    """,
    "no room": """
        rows that do not fit [out_of_bounds]: {~min(end, params.capacity - place.first) => end~}
    """,
    "negative lengths": """
        negative lengths used [out_of_bounds]: {~place.first < 0 ? 0 : =>~}
    """,
    "paged": """
        wrong stride of pages [race]: cache_batch_stride = cache_strides.{~batch => head~}
        row of the sequence in a page [race]: uint(row) % {~PAGE_ROWS => (PAGE_ROWS / 2)~}
        row as if pages were powers of 2 [race]: {~uint(row) % PAGE_ROWS => row & (PAGE_ROWS - 1)~}
        eight rows in one page [simd_lane]: pages.page_of(position{~=> / 8 * 8~})
        pages of sequence 0 [race]: block_table {~+ batch * params.append.block_table_stride =>~}
        page of the first row [simd_lane]: pages.page_of({~position => place.first~})
    """,
    "rounded": """
        neighbours swapped as they are rounded: Element(elements[i{~=> ^ 1~}])
    """,
    "no page": """
        invalid pages [out_of_bounds]: {~batch != NO_PAGE => true~}
        pages too high [out_of_bounds]: number {~< cache_size ? max(number, NO_PAGE) : NO_PAGE =>~}
    """,
    "no batch": """
        invalid batch [out_of_bounds]: {~batch >= 0 && batch < params.cache_size => true~}
    """,
    "indexed": """
        index ignored: {~cache_batch_idx[batch] => batch~}
    """,
    "rotated": """
        k not rotated: AppendRows<KV_FORMAT, HEAD_DIM_QK, {~NEW_K_ROTARY => false~}> k
        rotated at the wrong row: {~place.first_rotary => int64_t(place.first)~} + step, column
        rotated at the first row: place.first_rotary {~+ step =>~}, column
        padding of the first sequence: leftpad_k[{~batch => 0~}]
        q not rotated: {~head < rope.q_heads => false~}
        q's tokens not counted: {~params.rotate_q_by_token != 0 ? token : =>~} 0
        q's last tokens left out: rope.length - {~=> 1 -~} first_token
    """,
    "last columns rotated": """
        first columns rotated too [out_of_bounds]:
            {~(ROTARY_FIRST == 0 || column >= ROTARY_FIRST) && =>~} column
        as many columns fewer: column < {~ROTARY_FIRST + =>~} ROTARY_DIM
        q's first columns rotated: rope.q_strides.head {~+ ROTARY_FIRST =>~}
        partner in the first columns: row, {~ROTARY_FIRST + =>~} rotary_partner(offset,
    """,
    "no table row": """
        missing table row [out_of_bounds]: {~rotary_row < table_rows => true~}
    """,
    "rotated at once": """
        q's tokens counted: {~params.rotate_q_by_token != 0 ? token : 0 => token~}
    """,
    "q8_0": """
        codes not clamped [wrong or float_to_integer]:
            uchar(char({~clamp(quotients[i], -127.0f, 127.0f) => quotients[i]~}))
        other scale: {~column / SHARED => (column / SHARED + 1) % (COLUMNS / SHARED)~} * NUMBERS + i
        scale of a lane: distance < {~BLOCK_LANES => 2~}
        scale of two blocks: distance < {~=> 2 *~} BLOCK_LANES
        a step that is not rounded: usable ? {~float(scale) => fabs(extreme) / 127.0f~} : 1.0f
        NaN unseen: & {~0x7fffffffu => 0x7f800000u~}
    """,
    "q4_0": """
        nibbles swapped: {~low | (high => high | (low~} << 4)
        sign of the last of equals: (lane & distance) {~!= => ==~} 0
        nibbles not clamped: quotients[2 * i] + 8.0f, 0.0f, {~15.0f => 16.0f~}
    """,
    "q3_g32": """
        scale and minimum swapped: Scale(numbers[{~=> NUMBERS - 1 -~}i])
        the group's last value unseen:
            high = max(high, simd_shuffle_xor(high, {~distance => min(distance, ushort(1))~}))
        the minimum of one lane: {~low = min(low, simd_shuffle_xor(low, distance)) =>~}
        NaN unseen in a group: {~isnan(values[i]) ? INFINITY : =>~} values[i]
        a minimum that is not rounded: (values[i] - {~float(minimum) => low~}) / float(scale)
        zero's sign kept: low {~== 0.0f ? 0.0f : low =>~}
        codes above the last: {~clamp(quotient, 0.0f, LAST => max(quotient, 0.0f~})
        a minimum that no float16 holds: isfinite(float(scale)) {~&& isfinite(float(minimum)) =>~}
    """,
    "fp8": """
        halves away from even: {~0x7ffffu + ((bits >> 20) & 1u) => 0x80000u~}
        steps below 2^-6: magnitude < {~0.015625f => 0.0078125f~}
        scale of another head: {~kv_head * strides.head => 0~}]);
        sign lost: {~(as_type<uint>(value) >> 24) & 0x80u => 0~}
    """,
}


def with_impossible_values(name, values, **fields):
    """Calls the op with impossible values of argument `name`, set after the op's checks."""
    call = arguments(append(**{"length": 5, "lengths": (0, 1), "capacity": 32} | fields))
    # No memory follows a cloned cache, so that rows after it are out of bounds.
    call |= {cache: call[cache].clone() for cache in ("k_cache", "v_cache")}
    before = call["k_cache"].view(torch.int16).clone()
    with pytest.MonkeyPatch.context() as monkeypatch:
        after_the_checks(monkeypatch, call[name], values)
        torch.ops.metal_attn.append_kv(**call)
    return call, before


def check_unwritten(name, values, **fields):
    call, before = with_impossible_values(name, values, **fields)
    assert torch.equal(call["k_cache"].view(torch.int16), before)


SIZES = {"length": 5, "lengths": (3, 11), "capacity": 32}
ROTATED = SIZES | {"leftpad_k": (2, 1), "rotary_columns": 64, "heads": 6}
LAST = {"head_dim": 96, "rotary_columns": 32, "rotary_last": True, "heads": 6}
CASES = {
    "plain": {"v_head_dim": 32},
    "paged": {"cache": "paged", "page": 5, "capacity": 35, "length": 21},
    "rounded": {"dtype": "float32", "cache_dtype": "float16"},
    "indexed": {"cache": "indexed"},
    "rotated": ROTATED,
    "rotated at once": ROTATED | {"by_token": False},
    "last columns rotated": LAST,
}
SPECIAL = {
    "q8_0": {"format": "q8_0"},
    "q4_0": {"format": "q4_0"},
    "q3_g32": {"format": "q3_g32", "v_format": "q3_g64", "dtype": "float32"},
    "fp8": {"format": "fp8_e4m3"},
}


def no_table_row():
    """Missing rows of the tables give NaN in k and q, and are not read."""
    call, _ = with_impossible_values("leftpad_k", [9, -70], **ROTATED | {"leftpad_k": (0, 0)})
    k, v = call["k_cache"], call["v_cache"]
    assert k[0, :, 3:8].isnan().all()
    assert k[1, :, 11:16].isnan().all()
    assert call["q"].isnan().all()
    assert torch.equal(v[0, :, 3:8], call["v"][0])


CHECKS = {
    **{name: partial(judge, append(**SIZES | fields)) for name, fields in CASES.items()},
    **{name: partial(check_special, **fields) for name, fields in SPECIAL.items()},
    "no room": lambda: check_unwritten("cache_seqlens", [32, 2**31 - 1]),
    "negative lengths": lambda: check_unwritten("cache_seqlens", [-40, -(2**31)]),
    "no page": lambda: check_unwritten("block_table", [[-1] * 4, [11] * 4], cache="paged", page=8),
    "no batch": lambda: check_unwritten("cache_batch_idx", [-7, 9], cache="indexed"),
    "no table row": no_table_row,
}
test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(
    MUTANTS, "append_kv", run=lambda name: CHECKS[name]()
)


def test_rows_that_fit_are_written():
    with simulate(check=True):
        call, before = with_impossible_values("cache_seqlens", [30, 29])
    k, cache = call["k"], call["k_cache"]
    assert torch.equal(cache[0, :, 30:], k[0, :, :2])
    assert torch.equal(cache[1, :, 29:], k[1, :, :3])
    assert torch.equal(cache.view(torch.int16)[:, :, :29], before[:, :, :29])
