"""Problems whose softmaxes are sharp, and their judge: torch's own error, in every gradient.

There the gradients of scores nearly cancel, so the rounding of out and of the log-sum-exp shows.
"""

import math

import torch

from tests.attention.flash_fwd_check import hold, make_qkv
from tests.attention.head_dims import HOME
from torch_metal_attn.reference import attention
from torch_metal_attn.testing.judge import largest, near, on
from torch_metal_attn.testing.tf32 import as_multiplied

ADDED = ("attn_bias", "attn_mask", "alibi_slopes", "learnable_sink")
# GQA, and more than one block of keys.
SHAPE = {"heads": 4, "kv_heads": 2, "q_length": 21, "kv_length": 70, "head_dim": HOME}


def uniform(*shape, size=9.0, seed=0):
    """As torch's OpInfo samples, whose values reach 9."""
    return size * (2 * torch.rand(shape, generator=torch.Generator().manual_seed(seed)) - 1)


def sharp_qkv(size=9.0, batch=1, heads=4, kv_heads=2, q_length=21, kv_length=70, head_dim=HOME):
    sizes = [(heads, q_length), (kv_heads, kv_length), (kv_heads, kv_length)]
    return [uniform(batch, *rows, head_dim, size=size, seed=i) for i, rows in enumerate(sizes)]


def opinfo():
    """Like torch's sample with a mask, whose gradient takes torch's exact path."""
    qkv = sharp_qkv(batch=4, heads=4, kv_heads=4, q_length=3, kv_length=7)
    return qkv, {"attn_mask": uniform(3, 7, seed=4)}


def offset_values():
    """Values with a mean: dout v^T is nearly alike for all keys, however flat the softmax is."""
    q, k, v = make_qkv(**SHAPE)
    return (q, k, v + 30), {}


def everything():
    """Every other term of a row's sum, with dropped and capped weights."""
    added = {
        "attn_bias": uniform(21, 1, size=1.0),  # one for all keys
        "alibi_slopes": torch.tensor([0.3, 0.1, 0.02, 0.5]),
        "learnable_sink": torch.tensor([5.0, 1.0, -math.inf, 8.0]),
    }
    dropout = {"dropout_p": 0.3, "rng_state": torch.tensor([5, 7])}
    return sharp_qkv(3.0), {"dlse": True, "softcap": 20.0} | added | dropout


def large_sinks():
    """Of nearly all weight, whose rounding every row shares."""
    qkv, options = everything()
    return qkv, options | {"learnable_sink": torch.tensor([20.4, 31.2, 25.56, 30.56])}


# q, k and v, and options.
SHARP = {
    "values to 9": lambda: (sharp_qkv(), {}),
    "torch's sample": opinfo,
    "offset values": offset_values,
    "first rows": lambda: (make_qkv(**SHAPE), {"causal": True, "q_offset": 0, "dlse": True}),
    "everything": everything,
    "large sinks": large_sinks,
}


def differentiate(attend, leaves, dout, dlse, dtype=None):
    """The gradients of <attend(**leaves), (dout, dlse)>, by name; leaves in `dtype`."""
    leaves = {n: x.detach().to(dtype, copy=True).requires_grad_() for n, x in leaves.items()}
    out, lse = attend(**leaves)
    loss = (out * dout.to(out)).sum()
    if dlse is not None:
        loss = loss + (lse * dlse.to(lse)).sum()
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def check_sharp(name, dtype, device, without=()):
    """Every gradient of autograd's within twice the error of torch's operations on float32.

    without: options that the problem has and the call has not.
    """
    qkv, options = SHARP[name]()
    options = {n: x for n, x in options.items() if n not in without}
    leaves = {n: x.to(dtype) for n, x in zip("qkv", qkv, strict=True)}
    leaves |= {n: options.pop(n) for n in ADDED if n in options}
    generator = torch.Generator().manual_seed(3)
    q = leaves["q"]
    dout = torch.randn(q.shape, generator=generator).to(dtype)
    dlse = torch.randn(q.shape[:-1], generator=generator) if options.pop("dlse", False) else None

    def reference(compute_dtype=None):
        return lambda **given: attention(**given, **options, compute_dtype=compute_dtype)

    exact = differentiate(reference(torch.float64), leaves, dout, dlse, torch.float64)
    with as_multiplied():
        composed = differentiate(reference(), leaves, dout, dlse)
    found = differentiate(
        lambda **given: torch.ops.metal_attn.flash_fwd(**on(device, given), **on(device, options)),
        leaves,
        dout,
        dlse,
    )
    torchs = {leaf: largest(composed[leaf].double() - exact[leaf]) for leaf in exact}
    if name == "everything":
        # One number a head: torch's error can be small by chance. That of unrounded q, k, v too.
        unrounded = leaves | dict(zip("qkv", qkv, strict=True))
        of_unrounded = [
            differentiate(reference(dtype), unrounded, dout, dlse, dtype)["alibi_slopes"].double()
            for dtype in (torch.float32, torch.float64)
        ]
        torchs["alibi_slopes"] = max(
            torchs["alibi_slopes"], largest(of_unrounded[0] - of_unrounded[1])
        )
    hold([near(leaf, x, exact[leaf], torchs[leaf]) for leaf, x in found.items()])
