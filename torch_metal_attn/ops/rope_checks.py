"""What csrc/ops/rope/check.cpp checks, for tensors without data: meta, and while compiling.

Whether positions or seqlen_offsets ask for existing rows cannot be checked there.
"""

import math

import torch
from torch import Tensor

from torch_metal_attn.ops import rules
from torch_metal_attn.ops.rules import MAX_LENGTH


def rope(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    seqlen_offset: int = 0,
    seqlen_offsets: Tensor | None = None,
    interleaved: bool = False,
    conjugate: bool = False,
) -> None:
    """The checks of `metal_attn::rope`."""
    named = {"k": k, "cos": cos, "sin": sin}
    named |= {"positions": positions, "seqlen_offsets": seqlen_offsets}
    for name, tensor in named.items():
        if tensor is not None:
            rules.same_device(name, tensor, q)
    rules.element("q", q)
    _rank("q", q)
    batch, head_dim = q.shape[0], q.shape[3]
    rules.rule(head_dim > 0, lambda: "q has a head dim of 0; it must be at least 1")
    if k is not None:
        rules.same_dtype("k", k, q)
        _rank("k", k)
        for dim, what in ((0, "batch"), (2, "length"), (3, "head dim")):
            size, other = k.shape[dim], q.shape[dim]
            rules.rule(
                size == other,
                lambda w=what, s=size, o=other: (
                    f"k has a {w} of {s} and q of {o}; they must be equal"
                ),
            )

    rules.element("cos", cos)
    rules.same_dtype("sin", sin, cos, "cos")
    rules.rule(
        cos.dim() in (2, 3),
        lambda: (
            f"cos has {cos.dim()} dimensions, shape {tuple(cos.shape)}; it must have 2 or 3: "
            "(positions, R / 2) or (batch, positions, R / 2)"
        ),
    )
    rules.rule(
        cos.dim() == 2 or cos.shape[0] == 1 or cos.shape[0] == batch,
        lambda: f"cos has a batch of {cos.shape[0]} and q of {batch}; it must be 1 or equal",
    )
    rules.rule(
        2 * cos.shape[-1] <= head_dim,
        lambda: (
            f"cos has {cos.shape[-1]} columns and q a head dim of {head_dim}; they must be at most "
            "half of it"
        ),
    )
    rules.rule(
        sin.dim() == cos.dim() and all(s == c for s, c in zip(sin.shape, cos.shape, strict=True)),
        lambda: f"sin has shape {tuple(sin.shape)} and cos {tuple(cos.shape)}; they must be equal",
    )
    _rows(q, cos.shape[-2], positions, seqlen_offset, seqlen_offsets)


def _rows(
    q: Tensor,
    table_rows: int,
    positions: Tensor | None,
    seqlen_offset: int,
    seqlen_offsets: Tensor | None,
) -> None:
    batch, length = q.shape[0], q.shape[2]
    if positions is not None:
        rules.rule(
            positions.dtype in (torch.int32, torch.int64),
            lambda: f"positions has dtype {positions.dtype}; it must be int32 or int64",
        )
        rules.rule(
            (positions.dim() == 1 or (positions.dim() == 2 and (positions.shape[0] in (1, batch))))
            and positions.shape[-1] == length,
            lambda: (
                f"positions has shape {tuple(positions.shape)}; it must be ({length},), "
                f"(1, {length}) or ({batch}, {length})"
            ),
        )
        rules.rule(
            seqlen_offset == 0,
            lambda: (
                f"seqlen_offset is {seqlen_offset} and positions is given, which says everything: "
                "leave seqlen_offset 0"
            ),
        )
        rules.rule(
            seqlen_offsets is None,
            lambda: (
                "seqlen_offsets is given and so is positions, which says everything: give one of "
                "them"
            ),
        )
        return
    if seqlen_offsets is not None:
        rules.rule(
            seqlen_offsets.dtype == torch.int32,
            lambda: f"seqlen_offsets has dtype {seqlen_offsets.dtype}; it must be int32",
        )
        rules.rule(
            seqlen_offsets.dim() == 1 and seqlen_offsets.shape[0] == batch,
            lambda: (
                f"seqlen_offsets has shape {tuple(seqlen_offsets.shape)}; it must be ({batch},)"
            ),
        )
        rules.rule(
            -MAX_LENGTH <= seqlen_offset <= MAX_LENGTH,
            lambda: f"seqlen_offset is {seqlen_offset}; it must be in -{MAX_LENGTH}..{MAX_LENGTH}",
        )
        return
    # Without branches on sizes, which compiling may not know.
    rules.rule(
        (length == 0) | ((seqlen_offset >= 0) & (seqlen_offset + length <= table_rows)),
        lambda: (
            f"seqlen_offset is {seqlen_offset} and q has a length of {length}; they must stay "
            f"within the {table_rows} rows of cos"
        ),
    )


def in_place(q: Tensor, k: Tensor | None) -> None:
    """The additional checks of `metal_attn::rope_`, except for memory that q and k share."""
    for name, tensor in (("q", q), ("k", k)):
        if tensor is None:
            continue
        for dim in range(tensor.dim()):
            size, stride = tensor.shape[dim], tensor.stride(dim)
            rules.rule(
                size <= 1 or stride != 0,
                lambda n=name, t=tensor: (
                    f"{n} has shape {tuple(t.shape)} and strides {t.stride()}: elements may share "
                    f"memory, so it cannot be rotated in place; call {n}.clone() first, or rope"
                ),
            )


def tables(
    inv_freq: Tensor, positions: Tensor, attention_factor: float, dtype: torch.dtype | None
) -> None:
    """The checks of `metal_attn::rope_tables`."""
    rules.same_device("positions", positions, inv_freq, "inv_freq")
    rules.rule(
        inv_freq.dtype == torch.float32,
        lambda: (
            f"inv_freq has dtype {inv_freq.dtype}; it must be float32, which fewer digits than "
            "that would spoil"
        ),
    )
    rules.rule(
        inv_freq.dim() == 1,
        lambda: f"inv_freq has {inv_freq.dim()} dimensions; it must have 1: (R / 2)",
    )
    rules.rule(
        positions.dtype in (torch.int32, torch.int64, torch.float32),
        lambda: f"positions has dtype {positions.dtype}; it must be int32, int64 or float32",
    )
    rules.rule(
        1 <= positions.dim() <= 3,
        lambda: (
            f"positions has {positions.dim()} dimensions, shape {tuple(positions.shape)}; it must "
            "have 1 to 3: (section, batch, length)"
        ),
    )
    rules.rule(
        math.isfinite(attention_factor) and abs(attention_factor) < 3.5e38,
        lambda: f"attention_factor is {attention_factor}; it must be finite in float32",
    )
    rules.rule(
        dtype is None or dtype in rules.ELEMENTS,
        lambda: f"dtype is {dtype}; it must be float32, float16 or bfloat16",
    )


def _rank(name: str, tensor: Tensor) -> None:
    rules.rule(
        tensor.dim() == 4,
        lambda: (
            f"{name} has {tensor.dim()} dimensions, shape {tuple(tensor.shape)}; it must have 4: "
            "(batch, heads, length, head_dim)"
        ),
    )
