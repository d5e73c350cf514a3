"""First-order bounds of the rounding errors of attention, derived in docs/design/numerics.md."""

from collections.abc import Callable

import torch
from torch import Tensor

from torch_metal_attn.testing.judge import ROUNDING, largest, one_rounding

_U = ROUNDING[torch.float32]
# The number of roundings of a score or weight apart from sums: scale, tanh, exp2, a division, ...
STEPS = 8


def summing(terms: int) -> float:
    """The relative error of a float32 sum of blocks of 8 terms (Higham 2002, 4.2)."""
    return (terms / 8 + 8) * _U


def score_errors(q: Tensor, k: Tensor, scale: float, operands: float, added: float) -> Tensor:
    """Bounds of the errors of each row's scores, in the shape of q without its last dimension.

    operands: the relative error of a product that comes from rounding q and k. added: the largest
    magnitude that is added to a score, or the score's cap. By Cauchy-Schwarz, the terms of a score
    add up to at most |q| |k|.
    """
    norms = q.double().nan_to_num(0, 0, 0).norm(dim=-1)
    longest = largest(k.double().nan_to_num(0, 0, 0).norm(dim=-1))
    terms = summing(q.shape[-1]) + STEPS * _U + operands
    return abs(scale) * longest * norms * terms + STEPS * _U * added


def out_errors(
    attend: Callable[[Tensor], Tensor], v: Tensor, errors: Tensor, keys: int, dropout_p: float
) -> Tensor:
    """Bounds of the errors of out, by element, that come from errors of the scores.

    attend: returns the exact output for other values. With weights w and output o, an error e of
    the scores changes o by at most e * sum(w |v - o|) <= e * sqrt(sum(w v^2) - o^2), and under
    dropout by at most 2 e * sum(w |v|).
    """
    v = v.double().nan_to_num(0, 0, 0)
    magnitudes = attend(v.abs())
    spread = 2 * magnitudes
    if not dropout_p:
        spread = (attend(v.square()) - attend(v).square()).clamp_min(0).sqrt()
    return errors[..., None] * spread + (summing(keys) + STEPS * _U) * magnitudes


def merge_errors(
    attend: Callable[[Tensor], Tensor],
    v: Tensor,
    parts: list[Tensor],
    lse: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Bounds of the errors of out, (B, Hq, Lq, Dv), that come from merging parts of the keys.

    attend: returns the exact output for other values. parts: bool (B, keys) each. Parts are merged
    into the first one in order. lse: the exact log-sum-exp. dtype: each part's output and each
    intermediate result are rounded to it. The rounding of the last result is that of out. A part's
    weight is exp(lse_part - lse), with a relative error of u (abs(lse_part) + STEPS).
    """
    wide = torch.cat([v.double().nan_to_num(0, 0, 0), v.new_ones(v.shape[:-1])[..., None]], -1)
    # Each part's share of out is its weight times its output; the last column is the weight.
    shares = [attend(wide * part[:, None, :, None]) for part in parts]
    merged, weight = shares[0][..., :-1], torch.ones_like(shares[0][..., -1:])
    for share in shares[1:]:  # the first part also has the sink's share
        weight = weight - share[..., -1:]
    errors = torch.zeros_like(merged)
    for part, share in zip(parts[1:], shares[1:], strict=True):
        out, part_weight = share[..., :-1], share[..., -1:]
        total = (merged + out).abs() / (weight + part_weight)
        more = one_rounding(merged, dtype) + one_rounding(out, dtype)
        for x, w in ((merged, weight), (out, part_weight)):
            weight_error = _U * ((lse[..., None] + w.log()).abs() + STEPS)
            more = more + (weight_error * (x.abs() + w * total)).nan_to_num(0, 0, 0)
        errors = torch.where(part.any(1)[:, None, None, None], errors + more, errors)
        merged, weight = merged + out, weight + part_weight
    return errors
