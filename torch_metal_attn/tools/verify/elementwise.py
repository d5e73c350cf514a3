"""Checks of rope, softmax, masks and merging against float64."""

import math
from typing import Any

import torch

from torch_metal_attn.reference import rotate
from torch_metal_attn.testing.judge import (
    Measure,
    near,
    near_statistic,
    normal,
    on,
    same_bits,
    worst_of,
)
from torch_metal_attn.testing.merges import union
from torch_metal_attn.tools.verify.problems import laid_out


def check_rope(
    device: torch.device,
    *,
    dtype: torch.dtype,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    length: int = 9,
    head_dim: int = 64,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    conjugate: bool = False,
    offset: int = 0,
    positions: bool = False,
    layout: str = "contiguous",
    in_place: bool = False,
) -> list[Measure]:
    """`rope`, or `rope_`, of q and k. positions: give each token's row of the tables, shuffled."""
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    rows = length + 7 + offset
    angles = 3 * normal(rows, rotary_dim // 2, seed=3)
    cos, sin = angles.cos(), angles.sin()
    options: dict[str, Any] = {"interleaved": interleaved, "conjugate": conjugate}
    chosen = (torch.arange(length) + offset).expand(batch, length)
    if positions:
        generator = torch.Generator().manual_seed(0)
        chosen = torch.randint(0, rows, (batch, length), generator=generator)
        options["positions"] = chosen
    elif offset:
        options["seqlen_offset"] = offset
    sides = {
        name: normal(batch, count, length, head_dim, seed=seed, dtype=dtype)
        for seed, (name, count) in enumerate((("q", heads), ("k", kv_heads)))
    }
    given = [laid_out(x.to(device), layout) for x in sides.values()]
    tables = [cos.to(device), sin.to(device)]
    if in_place:
        given = [x.clone() for x in given]
        torch.ops.metal_attn.rope_(*given, *tables, **on(device, options))
        found = given
    else:
        found = list(torch.ops.metal_attn.rope(*given, *tables, **on(device, options)))
    sin = -sin if conjugate else sin
    measures = []
    for (name, x), rotated in zip(sides.items(), found, strict=True):
        exact = rotate(x.double(), cos.double()[chosen], sin.double()[chosen], interleaved)
        # What models do in torch, in x's own dtype.
        own = rotate(x, cos[chosen].to(dtype), sin[chosen].to(dtype), interleaved)
        measures.append(near(name, rotated, exact, worst_of([(own, exact)])))
    return measures


def check_rope_tables(
    device: torch.device, *, length: int = 300, head_dim: int = 64, dtype: torch.dtype
) -> list[Measure]:
    """cos and sin of every position below a length, base 10000."""
    pairs = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    inv_freq = (10000.0**-pairs).float()
    positions = torch.arange(length)
    found = torch.ops.metal_attn.rope_tables(inv_freq.to(device), positions.to(device), dtype=dtype)
    exact = positions.double()[:, None] * 10000.0**-pairs
    own = positions[:, None] * inv_freq
    return [
        near(name, table, function(exact), worst_of([(function(own), function(exact))]))
        for name, table, function in zip(("cos", "sin"), found, (torch.cos, torch.sin), strict=True)
    ]


def check_softmax(
    device: torch.device,
    *,
    dtype: torch.dtype,
    shape: tuple[int, ...] = (3, 5, 65),
    dim: int = -1,
    in_place: bool = False,
    hidden: bool = False,
) -> list[Measure]:
    """`softmax`, or `softmax_`. hidden: some scores, and whole rows, are -inf; such rows give 0."""
    x = normal(*shape, seed=1, dtype=dtype)
    if hidden:
        x = x.masked_fill(normal(*shape, seed=2) > 0.5, -math.inf)
        x.transpose(dim, -1)[0] = -math.inf
    exact = torch._safe_softmax(x.double(), dim)
    own = torch._safe_softmax(x, dim)
    there = x.to(device, copy=True)
    op = torch.ops.metal_attn.softmax_ if in_place else torch.ops.metal_attn.softmax
    return [near("weights", op(there, dim), exact, worst_of([(own, exact)]))]


def check_causal_mask(
    device: torch.device,
    *,
    dtype: torch.dtype,
    shape: tuple[int, ...] = (2, 3, 33, 65),
    q_offset: int = 0,
) -> list[Measure]:
    """`apply_causal_mask_` writes -inf where key > query + q_offset, and nothing else."""
    x = normal(*shape, dtype=dtype)
    visible = torch.ones(shape[-2:], dtype=torch.bool).tril(q_offset)
    found = torch.ops.metal_attn.apply_causal_mask_(x.to(device, copy=True), q_offset)
    return [same_bits("scores", found, x.masked_fill(~visible, -math.inf))]


def check_merge(
    device: torch.device,
    *,
    dtype: torch.dtype,
    splits: int = 2,
    head_dim: int = 64,
    sink: bool = False,
) -> list[Measure]:
    """`merge_state` of two states, or `merge_splits` of more; parts without keys hold NaN."""
    outs = normal(2, 3, 9, splits, head_dim, seed=1)
    lses = 3 * normal(2, 3, 9, splits, seed=2)
    lses[0, 0, :, 0] = lses[1, 1] = -math.inf
    outs = outs.masked_fill((lses == -math.inf)[..., None], math.nan)
    logit = torch.linspace(-1, 1, 3) if sink else None
    if splits == 2 and not sink:
        outs = outs.to(dtype)
        states = [x for part in range(2) for x in (outs[..., part, :], lses[..., part])]
        found = torch.ops.metal_attn.merge_state(*(x.contiguous().to(device) for x in states))
    else:
        options = on(device, {"out_dtype": dtype, "learnable_sink": logit})
        merge_splits = torch.ops.metal_attn.merge_splits
        found = merge_splits(outs.to(device), lses.to(device), **options)
    by_head = None if logit is None else logit[:, None, None]
    exact, exact_lse = union(
        outs.double(), lses.double(), None if by_head is None else by_head.double()
    )
    own, _ = union(outs.float(), lses, by_head)
    return [
        near("out", found[0], exact, worst_of([(own.to(dtype), exact)])),
        near_statistic("lse", found[1], exact_lse, 1e-6),
    ]
