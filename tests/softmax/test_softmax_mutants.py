"""Planted faults in the text of softmax.metal: the tests' own checks must see every one of them."""

import dataclasses
import math

import torch

from tests.helpers.judged import judge
from tests.helpers.mutants import mutant_tests
from tests.softmax.test_softmax import check_softmax
from torch_metal_attn.testing import Softmax
from torch_metal_attn.testing.judge import normal


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
    mask = Softmax("apply_causal_mask_", q_offset=3)
    for shape in ((2, 33, 40), (9, 65), (2, 1100)):
        judge(dataclasses.replace(mask, shape=shape))
    judge(dataclasses.replace(mask, shape=(9, 65), layout=("order 10",)))


# What a fault changes in the shader's text, and the fault that the simulator then reports; None
# where only the numbers can show it.
MUTANTS = {
    rows_of_every_kind: """
        sum not rescaled: {~row_sum *= correction; =>~}
        maximum of one lane: raise({~simd_max(row_max) => row_max~})
        sum of one lane: row_sum = {~simd_sum(row_sum) => row_sum~}
        maximum not carried: float new_max = {~row_max => MASKED_ROW_MAX~};
        one value left out: i < VALUES{~=> - 1~}; i++) { sum
        base 2: fast::exp2({~(x - row_max) * M_LOG2E_F => x - row_max~})
        -inf rows are not 0: {~row_sum == 0.0f ? 0.0f : =>~} 1.0f / row_sum
        NaN lost: {~row_sum == 0.0f => !(row_sum > 0.0f)~} ? 0.0f
        scaled by 0.98: weight(items[i]) * {~=> 0.98f *~} factor
        last block skipped [everywhere]:
            block {~=> + ROW_BLOCK~} < length; block += ROW_BLOCK) { load_items
        one SIMD group's part: row_max[{~lane => 0~}];
        no barrier [uninitialised]: {~threadgroup_barrier(mem_flags::mem_threadgroup); =>~}
        barrier orders nothing [race]:
            threadgroup_barrier(mem_flags::{~mem_threadgroup => mem_none~});
        past the row read [out_of_bounds]:
            {~position < length => true~} ? float(row[position * stride])
        past the row read, wide [out_of_bounds]: first {~+ ITEMS <= => <~} length
        past the row stored [race]: position >= begin {~&& position < length =>~}
        past the last row [everywhere, race]: if ({~row >= params.rows => false~})
    """,
    masks_of_every_kind: """
        diagonal hidden: query + params.q_offset {~+ 1 =>~};
        one key past the diagonal: query + params.q_offset + {~1 => 2~};
        offset ignored: query + {~params.q_offset + =>~} 1;
        query ignored: {~query + =>~} params.q_offset + 1;
        rows of the batch counted on: row {~% params.q_length =>~}
        chunk of the diagonal stored: first {~>= begin && first =>~}
        visible key stored: position {~>= begin && position =>~} < length
        last key skipped: block {~=> + 8~} < params.kv_length;
        past the row stored [race]: position >= begin {~&& position < length =>~}
    """,
}

test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(MUTANTS, "softmax")
