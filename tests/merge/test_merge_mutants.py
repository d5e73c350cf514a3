"""Planted faults in the text of merge.metal: the tests' own checks must see every one of them."""

import math

import torch

from tests.helpers.mutants import mutant_tests
from tests.merge.test_merge import (
    check_in_place,
    check_masked,
    check_splits,
    check_state,
    normal,
    some_partials,
    some_states,
)


def states_of_every_kind():
    for head_dim in (32, 33):
        states = list(some_states(2, 3, 5, head_dim, spread=100.0))
        states[0][0], states[1][0] = math.nan, -math.inf
        states[2][:, 1], states[3][:, 1] = math.nan, -math.inf
        states[0][1, 1] = -0.0  # only a copy keeps the sign
        check_state(*states, device="cpu")
    check_state(*some_states(9, 3, 32, packed=True), device="cpu")
    empty = list(some_states(2, 3, 33, packed=True))
    empty[3][0] = math.inf
    check_in_place(*empty, device="cpu", infinity_is_empty=True)
    check_masked(*some_states(2, 3, 5, 33), torch.arange(10).view(2, 5) % 3 > 0, device="cpu")
    assert torch.ops.metal_attn.merge_state(*empty, infinity_is_empty=True)[0].isfinite().all()


def splits_of_every_kind():
    for head_dim in (36, 31):
        outs, lses = some_partials(2, 3, 3, 41, head_dim, spread=100.0)
        lses[0] *= 0.01
        lses[0, :, :, ::2] = -math.inf
        lses[0, 1] = -math.inf
        outs[lses == -math.inf] = math.nan
        check_splits(outs, lses, device="cpu")
        check_splits(outs, 0.01 * lses, sink=normal(3), device="cpu")


MUTANTS = {
    states_of_every_kind: """
        weights swapped: {~weight_a * value_a + weight_b => weight_b * value_a + weight_a~}
        not normalised: const float factor = {~normaliser.finalize() => 1.0f~};
        lse of one: {~merged_lse = normaliser.logsumexp(); =>~}
        empty a taken: Chunk merged = {~has_a ? a : b => a~}
        empty b not taken: has_a {~&& has_b =>~}
        row of another head: head = index {~/ length =>~} % heads
        past the last row [out_of_bounds]: {~&& position.y < params.shape.rows =>~}
        written before all have read [race]: {~threadgroup_barrier(mem_flags::mem_device); =>~}
        written before all have read, mem_none [race]:
            threadgroup_barrier(mem_flags::{~mem_device => mem_none~});
        written before all have read, mem_threadgroup [race]:
            threadgroup_barrier(mem_flags::{~mem_device => mem_threadgroup~});
        mask of another row: mask[row.{~offset(params.mask_strides) => row~}]
        +inf merged: given {~== INFINITY ? -INFINITY : given =>~}
    """,
    splits_of_every_kind: """
        maximum not subtracted: return fast::exp2({~(x - row_max) => x~} * M_LOG2E_F)
        sum not rescaled: {~sum *= =>~} normaliser.raise(simd_max
        maximum of one lane: {~simd_max( =>~}max(normaliser.row_max, own_lse){~) =>~}
        partials in half: sum += weights[i] * {~loaded[i] => (rint(loaded[i] * 1024.0f) / 1024.0f)~}
        dead partial read [out_of_bounds]: {~weights[i] >= 0.0f && =>~} in_row
        dead partial read, weight 0 [out_of_bounds]:
            {~own_lse == -INFINITY ? NO_KEYS : =>~} own_weight
        splits swapped [out_of_bounds]: simd_shuffle(shared_weight, {~split => ushort(split ^ 1)~})
        last block skipped: block {~< => + 32 <=~} params.splits; block
        split past the last [out_of_bounds]: {~block + lane < params.splits => true~} ?
        lanes not summed: sum = {~sum_splits(sum) => sum~} *
        sink dropped: {~normaliser.row_sum += normaliser.weight(logit); =>~}
        sink counted twice: normaliser.row_sum += {~=> 2.0f *~} normaliser.weight(logit);
        sum not lowered to the sink: {~sum *= =>~} normaliser.raise(max(normaliser.row_max, logit))
        sink of another head: sink[{~row.head => 0~}]
        column past the row [out_of_bounds]: {~&& in_row =>~}) {
        past the last row [out_of_bounds]: if ({~index >= params.shape.rows => false~})
    """,
}
test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(MUTANTS, "merge")
