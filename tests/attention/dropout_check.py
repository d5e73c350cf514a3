"""What the tests of dropout share: the masks that the kernels use, and the judge of gradients."""

import torch

from tests.attention.held_cases import case, hold
from tests.attention.test_values import EVERY_OPTION
from torch_metal_attn import dropout_mask
from torch_metal_attn.runtime import session
from torch_metal_attn.testing.judge import on

STATE = (2**40 + 12345, -7)  # all four words differ, and matter


def dropout(p=0.3, state=STATE):
    return {"dropout_p": p, "rng_state": torch.tensor(state)}


def every_option():
    """What test_values.py calls so, as the ops take it: for 4 heads."""
    return EVERY_OPTION | {
        **dropout(),
        "alibi_slopes": torch.tensor([0.3, 0.1, 0.02, 0.5]),
        "learnable_sink": torch.tensor([3.0, 1.0, -1.0, 5.0]),
    }


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


def check_dropout(device, *, p=0.3, shape=None):
    """Forward and gradients are within twice torch's error of float64, with the same mask."""
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 48, "dtype": "float32"} | (shape or {})
    hold([case(**shape, dropout_p=p)], device)
