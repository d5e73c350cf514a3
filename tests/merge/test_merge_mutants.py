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


DEVICE_BARRIER = "threadgroup_barrier(mem_flags::mem_device);"

MUTANTS = {
    states_of_every_kind: {
        "weights swapped": ("weight_a * value_a + weight_b", "weight_b * value_a + weight_a"),
        "not normalised": (
            "const float factor = normaliser.finalize();",
            "const float factor = 1.0f;",
        ),
        "lse of one": ("merged_lse = normaliser.logsumexp();", ""),
        "empty a taken": ("Chunk merged = has_a ? a : b", "Chunk merged = a"),
        "empty b not taken": ("has_a && has_b", "has_a"),
        "row of another head": ("head = index / length % heads", "head = index % heads"),
        "past the last row": ("&& position.y < params.shape.rows", "", "out_of_bounds"),
        "written before all have read": (DEVICE_BARRIER, "", "race"),
        "written before all have read: mem_none": (
            DEVICE_BARRIER,
            DEVICE_BARRIER.replace("mem_device", "mem_none"),
            "race",
        ),
        "written before all have read: mem_threadgroup": (
            DEVICE_BARRIER,
            DEVICE_BARRIER.replace("mem_device", "mem_threadgroup"),
            "race",
        ),
        "mask of another row": ("mask[row.offset(params.mask_strides)]", "mask[row.row]"),
        "+inf merged": ("given == INFINITY ? -INFINITY : given", "given"),
    },
    splits_of_every_kind: {
        "maximum not subtracted": (
            "return fast::exp2((x - row_max) * M_LOG2E_F)",
            "return fast::exp2(x * M_LOG2E_F)",
        ),
        "sum not rescaled": ("sum *= normaliser.raise(simd_max", "normaliser.raise(simd_max"),
        "maximum of one lane": (
            "simd_max(max(normaliser.row_max, own_lse))",
            "max(normaliser.row_max, own_lse)",
        ),
        "partials in half": (
            "sum += weights[i] * loaded[i]",
            "sum += weights[i] * (rint(loaded[i] * 1024.0f) / 1024.0f)",
        ),
        "dead partial read": ("weights[i] >= 0.0f && in_row", "in_row", "out_of_bounds"),
        "dead partial read, weight 0": (
            "own_lse == -INFINITY ? NO_KEYS : own_weight",
            "own_weight",
            "out_of_bounds",
        ),
        "splits swapped": (
            "simd_shuffle(shared_weight, split)",
            "simd_shuffle(shared_weight, ushort(split ^ 1))",
            "out_of_bounds",
        ),
        "last block skipped": (
            "block < params.splits; block",
            "block + 32 <= params.splits; block",
        ),
        "split past the last": ("block + lane < params.splits ?", "true ?", "out_of_bounds"),
        "lanes not summed": ("sum = sum_splits(sum) *", "sum = sum *"),
        "sink dropped": ("normaliser.row_sum += normaliser.weight(logit);", ""),
        "sink counted twice": (
            "normaliser.row_sum += normaliser.weight(logit);",
            "normaliser.row_sum += 2.0f * normaliser.weight(logit);",
        ),
        "sum not lowered to the sink": (
            "sum *= normaliser.raise(max(normaliser.row_max, logit))",
            "normaliser.raise(max(normaliser.row_max, logit))",
        ),
        "sink of another head": ("sink[row.head]", "sink[0]"),
        "column past the row": ("&& in_row) {", ") {", "out_of_bounds"),
        "past the last row": ("if (index >= params.shape.rows)", "if (false)", "out_of_bounds"),
    },
}
test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(MUTANTS, "merge")
