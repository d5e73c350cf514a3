"""What the tests of dropout share: the masks that the kernels use, and the judge of gradients."""

import torch

from tests.attention.flash_fwd_check import ACCUMULATION, ROUNDING, check_flash_fwd, make_qkv, on
from torch_metal_attn import dropout_mask
from torch_metal_attn.reference import attention
from torch_metal_attn.runtime import session

STATE = (2**40 + 12345, -7)  # all four words differ, and matter


def dropout(p=0.3, state=STATE):
    return {"dropout_p": p, "rng_state": torch.tensor(state)}


def run(name, device, *arguments, **options):
    """The kernels of the op on `device`."""
    namespace = torch.ops.metal_attn if device.type == "mps" else torch.ops.metal_attn_simulator
    moved = (value.to(device) if torch.is_tensor(value) else value for value in arguments)
    with session.raising():
        result = getattr(namespace, name)(*moved, **on(device, options))
    return [tensor.cpu() for tensor in result]


def kernel_masks(device, *, head_dim=48, v_head_dim=48, dtype=torch.float32, p=0.3, state=STATE):
    """What each product with dropped weights keeps, by name: bool (2, 3, 37, 43).

    With scores of 0 weights are alike, and with rows of the unit matrix every result is one weight.
    """
    batch, heads, q_length, kv_length = 2, 3, 37, 43

    def unit(length, columns):
        return torch.eye(length, columns).to(dtype).expand(batch, heads, length, columns)

    def filled(length, columns, value):
        return torch.full((batch, heads, length, columns), value, dtype=dtype)

    zero_q, zero_k = filled(q_length, head_dim, 0.0), filled(kv_length, head_dim, 0.0)
    options = dropout(p, state)
    unit_v = unit(kv_length, v_head_dim)
    out, lse = run("flash_fwd", device, zero_q, zero_k, unit_v, **options)

    def gradients(dout, q, k, v):
        # An out of 0 makes delta 0: a score's gradient is then its weight times what is kept.
        zero_out = torch.zeros_like(dout)
        return run("flash_bwd", device, dout, None, q, k, v, zero_out, lse, **options)

    ones = filled(q_length, v_head_dim, 1.0), filled(kv_length, v_head_dim, 1.0)
    dq, *_ = gradients(ones[0], zero_q, unit(kv_length, head_dim), ones[1])
    _, dk, *_ = gradients(ones[0], unit(q_length, head_dim), zero_k, ones[1])
    _, _, dv, *_ = gradients(unit(q_length, v_head_dim), zero_q, zero_k, unit_v)
    return {
        "forward": out[..., :kv_length] != 0,
        "dq": dq[..., :kv_length] != 0,
        "dk": dk[..., :q_length].mT != 0,
        "dv": dv[..., :q_length].mT != 0,
    }


def check_masks(device, **how):
    """Every kernel drops what `dropout_mask` says."""
    masks = kernel_masks(device, **how)
    p, state = how.get("p", 0.3), torch.tensor(how.get("state", STATE))
    expected = dropout_mask(state, p, 2, 3, 37, 43)
    for name, mask in masks.items():
        assert torch.equal(mask, expected), f"{name} drops other weights"


def in_torchs_operations(q, k, v, *, dropout_p, rng_state):
    """Plain attention as torch's math backend composes it, every step in the inputs' dtype."""
    kept = dropout_mask(rng_state, dropout_p, *q.shape[:3], k.shape[2])
    k, v = (side.repeat_interleave(q.shape[1] // k.shape[1], 1) for side in (k, v))
    weights = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1)
    return (weights * kept.to(q.dtype) / (1 - dropout_p)) @ v


def gradients_of(attend, q, k, v, dout):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (q, k, v)]
    out = attend(*leaves)
    return torch.autograd.grad(out, leaves, dout.to(out.dtype))


def assert_near(name, gradient, oracle, error):
    """Within twice torch's error and the rounding of the result."""
    slack = ROUNDING[gradient.dtype] * oracle.abs() + ACCUMULATION * oracle.abs().max()
    excess = (gradient.double() - oracle).abs() - slack
    assert (excess <= 2 * error).all(), f"{name}: {excess.max():.2e} beyond {error:.2e}"


def check_dropout(device, *, dtype=torch.float32, p=0.3, shape=None, **options):
    """Forward and gradients within twice torch's error of float64, with the same mask."""
    options |= dropout(p)
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 48} | (shape or {})
    q, k, v = make_qkv(**shape, dtype=dtype)
    out, lse = check_flash_fwd(q, k, v, device=device, **options)
    generator = torch.Generator().manual_seed(5)
    dout = torch.randn(out.shape, generator=generator).to(dtype)
    statistics = (q, k, v, out, lse)
    found = run("flash_bwd", device, dout, None, *statistics, exact_delta=True, **options)[:3]
    exact = gradients_of(
        lambda *qkv: attention(*qkv, **options, compute_dtype=torch.float64)[0],
        *(q.double(), k.double(), v.double(), dout),
    )
    plain = gradients_of(
        lambda *qkv: attention(*qkv, **dropout(p), compute_dtype=torch.float64)[0],
        *(q.double(), k.double(), v.double(), dout),
    )
    torchs = gradients_of(lambda *qkv: in_torchs_operations(*qkv, **dropout(p)), q, k, v, dout)
    composed = gradients_of(lambda *qkv: attention(*qkv, **options)[0], q, k, v, dout)
    for name, gradient, oracle, plain_oracle, low, other in zip(
        ("dq", "dk", "dv"), found, exact, plain, torchs, composed, strict=True
    ):
        error = max(
            (low.double() - plain_oracle).abs().max().item(),
            (other.double() - oracle).abs().max().item(),
        )
        assert_near(name, gradient, oracle, error)
