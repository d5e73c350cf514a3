"""How CPU tensors find their kernel, and what explain says of it; test_every_op.py has the rest."""

import torch

import torch_metal_attn
from tests.attention.autograd_check import make_qkv

flash_fwd = torch.ops.metal_attn.flash_fwd


def test_outputs_are_poisoned(monkeypatch):
    """What the other tests rest on: a kernel that writes nothing is seen."""
    from torch_metal_attn.simulator import engine

    assert torch.empty(3).isnan().all()
    monkeypatch.setattr(engine, "run", lambda *arguments, **options: engine.Counters())
    with torch_metal_attn.simulate(check=True):
        out, lse = flash_fwd(*make_qkv())
    assert out.isnan().all()
    assert lse.isnan().all()


def test_environment_turns_the_simulator_on(monkeypatch):
    monkeypatch.setenv("TORCH_METAL_ATTN_BACKEND", "simulator")
    q, k, v = make_qkv()
    assert torch_metal_attn.explain(q, k, v).backend == "simulator"
    monkeypatch.setenv("TORCH_METAL_ATTN_BACKEND", "reference")
    assert torch_metal_attn.explain(q, k, v).backend == "reference"
