"""What Metal would get of append_kv and decode_step: text, buffers and grid, run on the CPU."""

import pytest
import torch

from tests.cache.append_check import same_memory
from tests.decode.test_decode_step import problem
from tests.runtime.test_launch import run_what_was_launched

CACHES = ("k_cache", "v_cache", "k_scale", "v_scale")
KEPT = {
    "float16": {"leftpad": [0, 3]},
    # Not by its bytes: those the fake takes for params.
    "q8_0 in pages": {"format": "q8_0", "page": 8, "length": 3},
}


@pytest.mark.parametrize("kept", KEPT)
def test_append_kv(served, kept):
    tensors = problem(rotary_dim=32, **KEPT[kept])
    expected = {name: same_memory(x) for name, x in tensors.items()}
    torch.ops.metal_attn.append_kv(**expected)
    served.ops.append_kv(**tensors)
    run_what_was_launched(served, "append_kv", tensors.values())
    written = [name for name in CACHES if name in tensors]
    for name in written:
        torch.testing.assert_close(tensors[name], expected[name], equal_nan=True)


@pytest.mark.parametrize("kept", KEPT)
def test_decode_step(served, kept):
    tensors = problem(rotary_dim=32, **KEPT[kept])
    theirs = {name: same_memory(x) for name, x in tensors.items()}
    expected = torch.ops.metal_attn.decode_step(**theirs, causal=True, num_splits=1)
    results = served.ops.decode_step(**tensors, causal=True, num_splits=1)
    run_what_was_launched(served, "flash_decode", [*tensors.values(), *results])
    for result, value in zip(results, expected, strict=True):
        torch.testing.assert_close(result, value, rtol=2e-3, atol=2e-3)


def test_splits_are_merged_in_a_second_dispatch(served):
    served.ops.decode_step(**problem(rotary_dim=32), num_splits=2)
    dispatches = [line for line in served.log() if line.startswith("dispatch")]
    assert len(dispatches) == 2
    first, second = ([] for _ in range(2))
    for line in served.log():
        (first if "dispatch" not in "".join(first) else second).append(line)
    given = {line.split()[2] for line in first if line.startswith("tensor")}
    merged = {line.split()[2] for line in second if line.startswith("tensor")}
    assert len(given & merged) == 2, "the partial out and log-sum-exp"
