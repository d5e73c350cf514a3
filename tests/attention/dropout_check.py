"""What the tests of dropout share: its options, and the masks that the kernels use."""

import torch

from tests.attention.flash_bwd_check import run
from torch_metal_attn import dropout_mask

STATE = (2**40 + 12345, -7)  # all four words differ, and matter


def dropout(p=0.3, state=STATE):
    return {"dropout_p": p, "rng_state": torch.tensor(state)}


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
    masks = {"forward": out, "dq": dq, "dk": dk[..., :q_length].mT, "dv": dv[..., :q_length].mT}
    return {name: (x[..., :kv_length] != 0).cpu() for name, x in masks.items()}


def check_masks(device, **how):
    """Every kernel drops what `dropout_mask` says."""
    masks = kernel_masks(device, **how)
    p, state = how.get("p", 0.3), torch.tensor(how.get("state", STATE))
    expected = dropout_mask(state, p, 2, 3, 37, 43)
    for name, mask in masks.items():
        assert torch.equal(mask, expected), f"{name} drops other weights"
