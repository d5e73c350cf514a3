"""Helpers for tests of the gradient kernels: they call the ops and check the results."""

import torch

from tests.attention.flash_fwd_check import hold, judged
from torch_metal_attn.reference import attention, varlen_attention
from torch_metal_attn.testing.judge import on
from torch_metal_attn.testing.oracle import rotated


def run(name, device, *arguments, **options):
    moved = (value.to(device) if torch.is_tensor(value) else value for value in arguments)
    return getattr(torch.ops.metal_attn, name)(*moved, **on(device, options))


def make_gradients(q, v, lse_shape, *, dlse=True, seed=7):
    """Random dout of out's shape in q's dtype, and a random dlse, or None if `dlse` is False."""
    generator = torch.Generator().manual_seed(seed)
    dout = torch.randn(*q.shape[:-1], v.shape[-1], generator=generator).to(q.dtype)
    return dout, torch.randn(lse_shape, generator=generator) if dlse else None


def rotate_first(q, k, options):
    """Rotates q and k as the options say, and removes the rotary tables from the options."""
    plain = {name: value for name, value in options.items() if "rotary" not in name}
    return *rotated(q, k, options), plain


def exact_forward(q, k, v, options, packing=()):
    """out and lse of the reference in float64, rounded to the op's dtypes. No kernel is compiled.

    If scores are so large that their rounding matters, pass `run_forward` to `backward` instead.
    """
    if not packing:
        q, k, options = rotate_first(q, k, options)
    attend = varlen_attention if packing else attention
    out, lse = attend(q, k, v, *packing, **options, compute_dtype=torch.float64)
    return out.to(q.dtype), lse.float().contiguous()


def backward(q, k, v, dout, dlse, device, options, run_forward=False, packing=()):
    """out, lse, dq, dk, dv and delta, on the CPU."""
    name = "flash_varlen" if packing else "flash"
    if run_forward:
        out, lse = run(f"{name}_fwd", device, q, k, v, *packing, **options)
    else:
        out, lse = exact_forward(q, k, v, options, packing)
    arguments = (dout, dlse, q, k, v, out, lse, *packing)
    *results, _ = run(f"{name}_bwd", device, *arguments, exact_delta=True, **options)
    return [tensor.cpu() for tensor in (out, lse, *results)]


def hold_gradients(q, k, v, dout, dlse, results, options, packing=()):
    """Checks out, lse and the gradients of v and of the rotated q and k."""
    out, lse, *actual = results[:5]
    if not packing:
        q, k, options = rotate_first(q, k, options)
    named = dict(zip("qkv", actual, strict=True))
    hold(judged(q, k, v, (out, lse, named), options, packing, dout, dlse))


def check_flash_bwd(q, k, v, *packing, device, dlse=True, run_forward=False, **options):
    """Runs the backward on `device`, checks its gradients, and returns dq, dk, dv and delta."""
    lse_shape = (q.shape[1], q.shape[0]) if packing else q.shape[:3]
    arguments = make_gradients(q, v, lse_shape, dlse=dlse)
    results = backward(q, k, v, *arguments, device, options, run_forward, packing)
    hold_gradients(q, k, v, *arguments, results, options, packing)
    return results[2:]
