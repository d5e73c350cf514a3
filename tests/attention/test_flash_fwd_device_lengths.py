"""Lengths and places that only the device sees: nothing is read outside, invalid ones give NaN.

On mps the host does not read them. Here they become invalid between the op's checks and the kernel.
"""

import pytest
import torch

from tests.attention.flash_fwd_check import make_packed, make_qkv
from tests.attention.held_cases import HOME
from tests.cache.kv_caches import paged
from torch_metal_attn import simulate
from torch_metal_attn.simulator import engine
from torch_metal_attn.testing.judge import ints

INT_MIN, INT_MAX = -(2**31), 2**31 - 1


def after_the_checks(monkeypatch, tensor, values):
    """`tensor` takes `values` right before the kernel runs."""
    run = engine.run

    def run_with_bad_values(*arguments, **options):
        tensor.copy_(torch.tensor(values))
        return run(*arguments, **options)

    monkeypatch.setattr(engine, "run", run_with_bad_values)


def results_of(run, tensor, values):
    """The results of `run()` if `tensor` takes `values` right before the kernel runs."""
    before = tensor.clone()
    with pytest.MonkeyPatch.context() as patch:
        after_the_checks(patch, tensor, values)
        results = run()
    tensor.copy_(before)
    return results


# Good numbers of each sequence, the first bad one, and the other options.
NUMBERS = {
    "seqused_k": ([60, 30, 65], 66, {"leftpad_k": ints(0, 0, 0)}),
    "leftpad_k": ([60, 30, 65], 66, {"seqused_k": ints(65, 65, 65)}),
    "cache_batch_idx": ([2, 0, 1], 3, {}),
}


@pytest.mark.parametrize("bad", [-1, None, INT_MIN, INT_MAX])
@pytest.mark.parametrize("name", NUMBERS)
def test_number_of_a_sequence(name, bad, monkeypatch):
    q, k, v = make_qkv(batch=3, head_dim=HOME, dtype=torch.float16)
    good, first_bad, others = NUMBERS[name]
    options = others | {name: (numbers := ints(*good))}
    with simulate(check=True):
        expected, expected_lse = torch.ops.metal_attn.flash_fwd(q, k, v, **options)
        bad = first_bad if bad is None else bad
        after_the_checks(monkeypatch, numbers, [good[0], bad, good[2]])
        out, lse = torch.ops.metal_attn.flash_fwd(q, k, v, **options)
    assert out[1].isnan().all()
    assert lse[1].isnan().all()
    assert torch.equal(out[::2], expected[::2])
    assert torch.equal(lse[::2], expected_lse[::2])


@pytest.mark.parametrize("bad", [-1, 9, INT_MIN, INT_MAX])
def test_number_of_a_page(bad, monkeypatch):
    q, k, v = make_qkv(batch=2, q_length=40, kv_length=40, head_dim=32, dtype=torch.float16)
    keys, values, where = paged(k, v, [40, 40], 16)
    table = where["block_table"]
    broken = table.clone()
    broken[0, 1] = bad  # keys 16..31
    options = {"causal": True, "seqused_k": torch.tensor([40, 40]).int(), "block_table": table}
    with simulate(check=True):
        expected, expected_lse = torch.ops.metal_attn.flash_fwd(q, keys, values, **options)
        after_the_checks(monkeypatch, table, broken.tolist())
        out, lse = torch.ops.metal_attn.flash_fwd(q, keys, values, **options)
    assert out[0, :, 16:].isnan().all()
    assert lse[0, :, 16:].isnan().all()
    assert torch.equal(out[0, :, :16], expected[0, :, :16])
    assert torch.equal(out[1], expected[1])
    assert torch.equal(lse[1], expected_lse[1])


# Sequences of 20, 40 and 10 queries, and of 30, 5 and 60 keys; which of them must be NaN.
PACKED = {
    "queries past the end": ("cu_seqlens_q", [0, 20, 60, 71], [2]),
    "queries far past the end": ("cu_seqlens_q", [0, 20, 60, INT_MAX], [2]),
    "more queries than the longest": ("cu_seqlens_q", [0, 20, 20, 70], [2]),
    "queries before the start": ("cu_seqlens_q", [INT_MIN, 20, 60, 70], [0]),
    "first queries skipped": ("cu_seqlens_q", [3, 20, 60, 70], [0]),
    "keys past the end": ("cu_seqlens_k", [0, 30, 35, 96], [2]),
    "keys far past the end": ("cu_seqlens_k", [0, 30, 35, INT_MAX], [2]),
    "keys before the start": ("cu_seqlens_k", [-1, 30, 35, 95], [0]),
    "more keys than the longest": ("cu_seqlens_k", [0, 30, 30, 95], [2]),
    "keys go back": ("cu_seqlens_k", [0, 30, 25, 60], [1]),
}


@pytest.mark.parametrize("case", PACKED)
def test_packed_sequences(case, monkeypatch):
    name, values, nan_sequences = PACKED[case]
    q, k, v, *packing = make_packed([20, 40, 10], [30, 5, 60], head_dim=HOME, dtype=torch.float16)
    bounds = packing[0] if name == "cu_seqlens_q" else packing[1]
    rows = torch.tensor([0, 20, 60, 70])
    after_the_checks(monkeypatch, bounds, values)
    with simulate(check=True):
        out, lse = torch.ops.metal_attn.flash_varlen_fwd(q, k, v, *packing, causal=True)
    for sequence in nan_sequences:
        start = max(values[sequence], 0) if name == "cu_seqlens_q" else rows[sequence]
        end = min(values[sequence + 1], 70) if name == "cu_seqlens_q" else rows[sequence + 1]
        start = 0 if sequence == 0 else start
        assert out[start:end].isnan().all()
        assert lse[:, start:end].isnan().all()
    assert not out.isnan().all()
