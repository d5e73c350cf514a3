"""Planted faults in the text of merge.metal: the tests' own checks must see every one of them."""

import torch

from tests.helpers.judged import judge
from tests.helpers.mutants import mutant_tests
from tests.merge.test_merge import check_copies, check_masked, some_states
from torch_metal_attn.testing import Merge

SIZES = {"batch": 2, "heads": 3, "length": 5, "empty": 0.3}


def states_of_every_kind():
    judge(
        *(Merge(**SIZES, head_dim=head_dim) for head_dim in (32, 33)),
        Merge(packed=True, heads=3, length=9, head_dim=32),
        *(
            Merge("merge_state_", packed=True, heads=3, length=2, head_dim=33, **options)
            for options in ({}, {"empty": 0.3, "infinity_is_empty": True})
        ),
    )
    check_copies(torch.float32, "cpu")
    check_masked(*some_states(2, 3, 5, 33), torch.arange(10).view(2, 5) % 3 > 0, device="cpu")


def splits_of_every_kind():
    sizes = SIZES | {"call": "merge_splits", "splits": 41}
    for head_dim in (36, 31):
        judge(*(Merge(**sizes, head_dim=head_dim, sink=sink) for sink in ("", "float32")))
    judge(Merge(**sizes | {"splits": 2}, head_dim=36, sink="float32"))


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
