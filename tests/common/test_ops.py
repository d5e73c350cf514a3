"""How CPU tensors find their kernel, and what explain says of it; test_every_op.py has the rest."""

import torch

import torch_metal_attn
from torch_metal_attn.reference import attention

flash_fwd = torch.ops.metal_attn.flash_fwd


def make_qkv(batch=2, heads=4, kv_heads=2, q_length=9, kv_length=13, head_dim=16, v_head_dim=8):
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(batch, q_length, heads, head_dim, generator=generator).transpose(1, 2),
        torch.randn(batch, kv_heads, kv_length, head_dim, generator=generator),
        torch.randn(batch, kv_heads, kv_length, v_head_dim, generator=generator),
    )


def test_batch_length_head_result_is_contiguous():
    q, k, v = make_qkv()
    assert flash_fwd(q, k, v)[0].transpose(1, 2).is_contiguous()


def test_cpu_runs_the_reference_without_the_simulator():
    q, k, v = make_qkv()
    out, lse = flash_fwd(q, k, v, causal=True, q_offset=4)
    expected, expected_lse = attention(q, k, v, causal=True, q_offset=4)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)


def test_cpu_runs_the_kernel_in_the_simulator():
    q, k, v = make_qkv()
    with torch_metal_attn.simulate(check=True) as run:
        out, lse = flash_fwd(q, k, v, causal=True, q_offset=4)
    assert [launch.kernel for launch in run.launches] == ["flash_fwd"]
    expected, expected_lse = attention(q, k, v, causal=True, q_offset=4)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


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


class TestExplain:
    def test_what_would_run(self, device):
        q, k, v = (tensor.to(device) for tensor in make_qkv(q_length=300))
        explanation = torch_metal_attn.explain(q, k, v, causal=True, q_offset=0)
        assert explanation.refusal is None
        assert explanation.backend == ("mps" if device.type == "mps" else "simulator")
        assert explanation.kernel == "flash_fwd"
        defines = explanation.specialisation
        sizes = [defines[name] for name in ("HEAD_DIM_QK", "HEAD_DIM_V", "BAND")]
        assert sizes == ["16", "8", "1"]
        block_q = 8 * int(defines["ROW_FRAGMENTS"]) * int(defines["SIMDGROUPS"])
        assert explanation.grid == (-(-300 // block_q), 4, 2)
        assert explanation.threads == (32 * int(defines["SIMDGROUPS"]), 1, 1)
        assert 0 < explanation.threadgroup_bytes <= 32768
        for text in ("HEAD_DIM_QK=16", "threadgroups", str(explanation.threadgroup_bytes)):
            assert text in str(explanation)

    def test_refusal(self):
        q, k, v = make_qkv()
        explanation = torch_metal_attn.explain(q, k[:, :, :, :8], v)
        assert explanation.kernel == ""
        assert "head dim of 8" in explanation.refusal
        assert str(explanation) == f"refused: {explanation.refusal}"

    def test_reference(self):
        explanation = torch_metal_attn.explain(*make_qkv())
        assert explanation.backend == "reference"
        assert "simulate()" in str(explanation)
