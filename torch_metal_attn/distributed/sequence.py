"""Splits a sequence over the processes of a group, and joins it again."""

from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.call.arguments import as_int, check_tensor, check_values
from torch_metal_attn.distributed import group as groups
from torch_metal_attn.distributed.layout import (
    bounds_of,
    check_layout,
    checksum,
    in_packed,
    shares,
    shares_of_all,
)
from torch_metal_attn.runtime.refusals import untraced
from torch_metal_attn.wording import count_text


def shard_sequence(
    x: Tensor,
    group: Any = None,
    *,
    dim: int | None = None,
    layout: str = "contiguous",
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """This process' share of a tensor that every process has: tokens, positions, labels, ...

    There is no communication. The lengths of chunks differ by at most one. For rotary embeddings,
    positions are the share of `torch.arange(length)`.

    Args:
        x: a tensor with all rows of the sequence, or of all sequences between cu_seqlens.
        group, layout, cu_seqlens: as for `ring_attention`.
        dim: the dimension of the sequence. None is 1, as in (B, L, ...), or with cu_seqlens 0, as
            in (T, ...).

    Returns: a copy of the process' rows. Differentiable.

    Raises: TypeError, ValueError: an argument that is not supported.
    """
    ring = groups.ring(group)
    check_tensor("x", x)
    check_layout(layout)
    dim = _dim(x, dim, cu_seqlens)
    bounds = [0, x.shape[dim]] if cu_seqlens is None else bounds_of(cu_seqlens)
    if bounds[-1] != x.shape[dim]:
        raise ValueError(
            f"x has {count_text(x.shape[dim], 'row')} in dim {dim} and the last element of "
            f"cu_seqlens is {bounds[-1]}; they must be equal"
        )
    spans = shares(bounds, ring.processes, ring.rank, layout)
    parts = [x.narrow(dim, span.start, len(span)) for span in in_packed(spans, bounds)]
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0).clone()


@untraced
def unshard_sequence(
    x: Tensor,
    group: Any = None,
    *,
    dim: int | None = None,
    layout: str = "contiguous",
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The whole tensor from the shares of all processes, on every process.

    Every process of the group calls it. There are no gradients: compute losses on shares.

    Args: x: this process' share. The other arguments are those of `shard_sequence`.

    Raises:
        NotImplementedError: x requires grad, so detach it first.
        TypeError, ValueError: as `ring_attention`.
    """
    ring = groups.ring(group)
    with groups.Agreement(ring, "unshard_sequence") as agreement:
        check_values("x", x)
        check_layout(layout)
        if torch.is_grad_enabled() and x.requires_grad:
            raise NotImplementedError("x requires grad; unshard_sequence has no gradient: detach x")
        dim = _dim(x, dim, cu_seqlens)
        bounds = None if cu_seqlens is None else bounds_of(cu_seqlens)
        agreement.number = x.shape[dim]
        agreement.same = {
            "x's dtype": x.dtype,
            "dim": dim,
            "x's other sizes": (*x.shape[:dim], *x.shape[dim + 1 :]),
            "layout": layout,
            "cu_seqlens (here its checksum)": checksum(bounds),
        }
    lengths = agreement.numbers
    spans = shares_of_all("x", lengths, layout, bounds)
    if bounds is None:
        bounds = [0, sum(lengths)]
    x = x.detach().movedim(dim, 0)
    padded = x.new_zeros(max(lengths), *x.shape[1:], device="cpu")
    padded[: x.shape[0]] = x
    whole = padded.new_empty(bounds[-1], *x.shape[1:])
    for part, of_rank in zip(ring.gather(padded), spans, strict=True):
        start = 0
        for span in in_packed(of_rank, bounds):
            whole[span.start : span.stop] = part[start : start + len(span)]
            start += len(span)
    return whole.to(x.device).movedim(0, dim)


def _dim(x: Tensor, dim: int | None, cu_seqlens: Tensor | None) -> int:
    if dim is None:
        dim = 1 if cu_seqlens is None else 0
    dim = as_int("dim", dim)
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim is {dim}; x has shape {tuple(x.shape)}")
    return dim % x.dim()
