"""Registration: what PyTorch itself expects of an op, and how CPU tensors find their kernel."""

import pytest
import torch

import torch_metal_attn
from torch_metal_attn.reference import attention
from torch_metal_attn.runtime.device import best_device

flash_fwd = torch.ops.metal_attn.flash_fwd


def make_qkv(batch=2, heads=4, kv_heads=2, q_length=9, kv_length=13, head_dim=16, v_head_dim=8):
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(batch, q_length, heads, head_dim, generator=generator).transpose(1, 2),
        torch.randn(batch, kv_heads, kv_length, head_dim, generator=generator),
        torch.randn(batch, kv_heads, kv_length, v_head_dim, generator=generator),
    )


@pytest.mark.parametrize("options", [{}, {"softmax_scale": 0.3, "causal": True, "q_offset": 4}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_reference(dtype, options):
    torch.library.opcheck(flash_fwd, [tensor.to(dtype) for tensor in make_qkv()], options)


def test_opcheck_on_device(device):
    q, k, v = (tensor.to(device) for tensor in make_qkv())
    torch.library.opcheck(
        flash_fwd, (q.half(), k.half(), v.half()), {"causal": True, "q_offset": 4}
    )


LAYOUTS = {
    "contiguous": lambda q: q.contiguous(),
    "batch length head": lambda q: q,
    "length batch head": lambda q: q.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "expanded batch": lambda q: q[:1].expand(2, -1, -1, -1),
    "expanded head": lambda q: q[:, :1].expand(-1, 4, -1, -1),
    "one head": lambda q: q[:, :2][:, ::2],
    "slice of a wider tensor": lambda q: torch.cat([q, q], 3)[..., :16],
    "empty": lambda q: q[:, :, :0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_agree(layout):
    """The fake, the reference and the device's kernel lay their results out in the same way."""
    q, k, v = make_qkv(kv_heads=1)
    q = LAYOUTS[layout](q)
    expected, expected_lse = flash_fwd(q, k, v)
    with best_device(check=True) as device:
        out, lse = flash_fwd(q.to(device), k.to(device), v.to(device))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake, fake_lse = flash_fwd(*(mode.from_tensor(t) for t in (q, k, v)))
    assert out.stride() == expected.stride() == fake.stride()
    assert lse.stride() == expected_lse.stride() == fake_lse.stride()
    assert (fake.dtype, fake_lse.dtype) == (out.dtype, lse.dtype)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device, dynamic):
    def step(q, k, v):
        out, lse = flash_fwd(q * 2, k, v, softmax_scale=0.25, causal=True)
        return out + 1, lse

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for q_length in (9, 11):
        q, k, v = (tensor.to(device) for tensor in make_qkv(q_length=q_length))
        torch.testing.assert_close(compiled(q, k, v), step(q, k, v))


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


OPS = [flash_fwd, torch.ops.metal_attn_simulator.flash_fwd]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_no_forward_derivative_is_dropped(op, position):
    """Every way to ask for one raises; none gives zero."""
    tensors = list(make_qkv())

    def loss(tensor):
        return op(*tensors[:position], tensor, *tensors[position + 1 :])[0].sum()

    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(loss, (tensors[position],), (tensors[position],))
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="forward-mode"),
    ):
        loss(torch.autograd.forward_ad.make_dual(tensors[position], tensors[position]))


@pytest.mark.parametrize("op", OPS)
def test_autocast_changes_nothing(op):
    """float32 stays float32: the reference's products too."""
    q, k, v = make_qkv()
    expected = op(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = op(q, k, v)
    assert torch.equal(out, expected[0])
    assert lse.dtype == torch.float32
    assert torch.equal(lse, expected[1])


@pytest.mark.parametrize("op", OPS)
def test_vmap(op):
    batches = [make_qkv(), make_qkv()]
    batches[1][0].mul_(2)
    stacked = [torch.stack(tensors) for tensors in zip(*batches, strict=True)]
    out, lse = torch.vmap(op)(*stacked)
    for index, tensors in enumerate(batches):
        torch.testing.assert_close((out[index], lse[index]), op(*tensors))


def test_negated_view():
    """A view whose sign is a flag and not in memory."""
    q, k, v = make_qkv()
    with torch_metal_attn.simulate(check=True):
        out, _ = flash_fwd(torch._neg_view(q), k, v)
        assert torch.equal(out, flash_fwd(-q, k, v)[0])


def test_meta_tensors_have_shapes():
    q, k, v = (tensor.to("meta") for tensor in make_qkv())
    out, lse = flash_fwd(q, k, v)
    assert (out.shape, lse.shape, out.device.type) == ((2, 4, 9, 8), (2, 4, 9), "meta")


def test_explain_says_what_ran():
    q, k, v = make_qkv()
    with torch_metal_attn.simulate() as run:
        explanation = torch_metal_attn.explain(q, k, v)
        assert not run.launches
        flash_fwd(q, k, v)
    assert run.launches[0].defines == explanation.specialisation
    refused = torch_metal_attn.explain(q, k[:, :, :, :8], v)
    assert refused.kernel == ""
    assert "head dim of 8" in refused.refusal
    assert str(refused) == f"refused: {refused.refusal}"
