"""Errors of torch's own attention on a problem in its dtype. The bounds are computed from them."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as torch_attention

from torch_metal_attn.reference import attention, rotate
from torch_metal_attn.testing.judge import largest, worst_of
from torch_metal_attn.testing.tf32 import as_multiplied

_VISIBILITY = (
    *("causal", "window_size_left", "window_size_right", "attention_chunk", "q_offset"),
    *("seqused_k", "leftpad_k", "attn_mask", "indices", "kv_block_size", "q_block_size"),
    *("parents", "tree_mask"),
)


def torch_error(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> float:
    """The largest error of torch's own attention in q's dtype, with the same mask and rotation."""
    visible = visible_keys(q, k, options)
    sees = visible.any(-1)
    scale = options.get("softmax_scale")
    if q.numel() == 0 or not sees.any():
        return 0.0  # some versions of torch crash if there is nothing to attend to
    k, v = k.nan_to_num(0, 0, 0), v.nan_to_num(0, 0, 0)
    exact_q, exact_k = rotated(q.double(), k.double(), options)
    exact, _ = attention(exact_q, exact_k, v.double(), softmax_scale=scale, attn_mask=visible)
    rounded_q, rounded_k = rotated(q, k.to(q.dtype), options)
    with as_multiplied():
        out = torch_attention(
            rounded_q, rounded_k, v.to(q.dtype), attn_mask=visible, scale=scale, enable_gqa=True
        )
    return worst_of([(out[sees], exact[sees])])


def torch_gradient_errors(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, options: dict[str, Any]
) -> list[float]:
    """The errors of dq, dk and dv. Queries without keys get all keys here, and a dout of 0."""
    if q.numel() == 0:
        return [0.0] * 3
    visible = visible_keys(q, k, options)
    hidden = ~visible.any(-1, keepdim=True)
    mask, dout = visible | hidden, dout.masked_fill(hidden, 0.0)
    scale = options.get("softmax_scale")
    results = []
    for dtype in (q.dtype, torch.float64):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        operands = (*rotated(leaves[0], leaves[1], options), leaves[2])
        with as_multiplied():
            if dtype == torch.float64:
                out, _ = attention(*operands, softmax_scale=scale, attn_mask=mask)
            else:
                out = torch_attention(*operands, attn_mask=mask, scale=scale, enable_gqa=True)
            results.append(torch.autograd.grad(out, leaves, dout.to(dtype)))
    return [worst_of([pair]) for pair in zip(*results, strict=True)]


def rounding_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """The reference with q and k rounded after the rotation, as in the kernels."""
    plain = {n: x for n, x in options.items() if "rotary" not in n}
    q, k = rotated(q, k, options)
    return attention(q, k, v, **plain)


def rotated(q: Tensor, k: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """q and k (B, H, L, D) as the kernels rotate and round them."""
    sides = []
    for side, x in (("q", q), ("k", k)):
        cos = options.get(f"{side}_rotary_cos")
        if cos is not None:
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            sin = options[f"{side}_rotary_sin"]
            x = rotate(wide, cos, sin, options.get("rotary_interleaved", False)).to(x.dtype)
        sides.append(x)
    return sides[0], sides[1]


def visible_keys(q: Tensor, k: Tensor, options: dict[str, Any]) -> Tensor:
    """Bool (B, Hq, Lq, Lk): True if the reference gives the key a weight for equal scores."""
    seen = {name: options[name] for name in _VISIBILITY if name in options}
    zeros = torch.zeros(*q.shape[:3], 1)
    keys = torch.zeros(*k.shape[:3], 1)
    values = torch.eye(k.shape[2]).expand(*k.shape[:2], -1, -1)
    return attention(zeros, keys, values, **seen)[0] > 0


def largest_terms(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, scale: float
) -> tuple[float, float, float]:
    """Bounds of a single term of dq, dk and dv, because the sums of dq and dk may cancel to 0."""
    norms = [largest(x.double().norm(dim=-1)) for x in (q, k, v, dout)]
    return (
        abs(scale) * norms[3] * norms[2] * norms[1],
        abs(scale) * norms[3] * norms[2] * norms[0],
        norms[3],
    )
