"""First-order bounds of the rounding errors of attention, derived in docs/design/numerics.md."""

from collections.abc import Callable

import torch
from torch import Tensor

from torch_metal_attn.testing.judge import ROUNDING, largest, one_rounding

_U = ROUNDING[torch.float32]
# Roundings of one score or weight besides those of sums: the scale, tanh, exp2, a division.
STEPS = 8


def summing(terms: int) -> float:
    """The relative error of a float32 sum of blocks of 8 terms (Higham 2002, 4.2)."""
    return (terms / 8 + 8) * _U


def score_errors(q: Tensor, k: Tensor, scale: float, operands: float, added: float) -> Tensor:
    """Bounds for the errors of each row's scores, of q's shape without columns.

    operands: how much the roundings of q's and k's elements change a product, relative to it.
    added: the magnitude of what is added to a score, or that it is capped at. By Cauchy-Schwarz,
    the terms of a score add up to at most |q| |k|.
    """
    norms = q.double().nan_to_num(0, 0, 0).norm(dim=-1)
    longest = largest(k.double().nan_to_num(0, 0, 0).norm(dim=-1))
    terms = summing(q.shape[-1]) + STEPS * _U + operands
    return abs(scale) * longest * norms * terms + STEPS * _U * added


def out_errors(
    attend: Callable[[Tensor], Tensor], v: Tensor, errors: Tensor, keys: int, dropout_p: float
) -> Tensor:
    """Bounds for the errors of out due to those of the scores, element by element.

    attend: the exact output for other values. With weights w and output o, an error e of the scores
    changes o by at most e * sum(w |v - o|), which is at most e * sqrt(sum(w v^2) - o^2). Under
    dropout it is at most 2 e * sum(w |v|).
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
    """Bounds for the errors of out, (B, Hq, Lq, Dv), that comes of merging parts of the keys.

    attend: the exact output for other values. parts: bool (B, keys) each; the others are merged
    into the first, one after the other. lse: the exact log-sum-exp. dtype: of each part's output,
    and of what is merged already: both are rounded to it. The last merge's rounding is that of out.
    A part's weight is exp(lse_part - lse), with a relative error of u (abs(lse_part) + STEPS).
    """
    wide = torch.cat([v.double().nan_to_num(0, 0, 0), v.new_ones(v.shape[:-1])[..., None]], -1)
    # Each part's share of out is its weight times its output; the last column is the weight.
    shares = [attend(wide * part[:, None, :, None]) for part in parts]
    merged, weight = shares[0][..., :-1], torch.ones_like(shares[0][..., -1:])
    for share in shares[1:]:  # the first part has a sink's share too
        weight = weight - share[..., -1:]
    errors = torch.zeros_like(merged)
    for part, share in zip(parts[1:], shares[1:], strict=True):
        out, part_weight = share[..., :-1], share[..., -1:]
        total = (merged + out).abs() / (weight + part_weight)
        more = one_rounding(merged, dtype) + one_rounding(out, dtype)
        for x, w in ((merged, weight), (out, part_weight)):
            of_weight = _U * ((lse[..., None] + w.log()).abs() + STEPS)
            more = more + (of_weight * (x.abs() + w * total)).nan_to_num(0, 0, 0)
        errors = torch.where(part.any(1)[:, None, None, None], errors + more, errors)
        merged, weight = merged + out, weight + part_weight
    return errors
