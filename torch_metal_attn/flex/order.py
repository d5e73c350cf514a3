"""The order in which a BlockMask's threadgroups start: those with the longest lists first."""

from collections.abc import Sequence

import torch
from torch import Tensor


def longest_first(counts: Sequence[Tensor], group: int = 1) -> Tensor:
    """Row indices, longest list first, and their inverse: (2, B or 1, H / group or 1, rows)."""
    total = sum(counts[1:], counts[0])
    if total.shape[1] > 1:
        total = total.unflatten(1, (-1, group)).sum(2)
    order = total.flatten().argsort(descending=True, stable=True).int()
    return torch.stack((order, order.argsort().int())).view(2, *total.shape)


def order_shape(counts: Sequence[Tensor], group: int) -> tuple[int, int, int] | None:
    """The order's last dimensions; None for counts that the op refuses."""
    try:
        batch, heads, rows = torch.broadcast_shapes(*(x.shape for x in counts))
    except RuntimeError:
        return None
    if heads > 1 and heads % group != 0:
        return None
    return batch, heads if heads == 1 else heads // group, rows
