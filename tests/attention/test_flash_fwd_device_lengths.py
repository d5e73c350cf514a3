"""Lengths that only the device can see: nothing is read outside, and invalid ones give NaN.

On mps the host does not read them. Here they become invalid between the op's checks and the kernel.
"""

import pytest
import torch

from tests.attention.flash_fwd_check import make_packed, make_qkv
from tests.attention.head_dims import HOME
from torch_metal_attn import simulate
from torch_metal_attn.simulator import engine

INT_MIN, INT_MAX = -(2**31), 2**31 - 1


def after_the_checks(monkeypatch, tensor, values):
    """`tensor` takes `values` right before the kernel runs."""
    run = engine.run

    def run_with_bad_values(*arguments, **options):
        tensor.copy_(torch.tensor(values))
        return run(*arguments, **options)

    monkeypatch.setattr(engine, "run", run_with_bad_values)


@pytest.mark.parametrize("bad", [-1, 66, INT_MIN, INT_MAX])
@pytest.mark.parametrize("name", ["seqused_k", "leftpad_k"])
def test_per_sequence_length(name, bad, monkeypatch):
    q, k, v = make_qkv(batch=3, head_dim=HOME, dtype=torch.float16)
    lengths = torch.tensor([60, 30, 65]).int()
    with simulate(check=True):
        expected, expected_lse = torch.ops.metal_attn.flash_fwd(q, k, v, **{name: lengths})
        after_the_checks(monkeypatch, lengths, [60, bad, 65])
        out, lse = torch.ops.metal_attn.flash_fwd(q, k, v, **{name: lengths})
    assert out[1].isnan().all()
    assert lse[1].isnan().all()
    assert torch.equal(out[::2], expected[::2])
    assert torch.equal(lse[::2], expected_lse[::2])


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


def test_queries_of_no_sequence_are_zero(device):
    q, k, v, *packing = make_packed([20, 0, 40], [30, 5, 60], head_dim=HOME, dtype=torch.float16)
    q = torch.cat([q, torch.ones(9, *q.shape[1:]).half()])
    arguments = [value.to(device) if torch.is_tensor(value) else value for value in (q, k, v)]
    packing = [value.to(device) if torch.is_tensor(value) else value for value in packing]
    out, lse = torch.ops.metal_attn.flash_varlen_fwd(
        *arguments, *packing, learnable_sink=torch.ones(2).to(device)
    )
    assert (out[60:] == 0).all()
    assert (lse[:, 60:] == -torch.inf).all()
    assert out[:60].isfinite().all()
