"""Ops that the table lacks, computed by PyTorch's decompositions into other ops."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_unflatten

from torch_metal_attn.flex.graph import Node


class _Slot:
    """A placeholder for an argument that is a node."""

    def __repr__(self) -> str:
        return "slot"


SLOT = _Slot()


@dataclass(frozen=True)
class Composed:
    """A composed node's op and arguments (SLOT for a node). body: the node that kernels compute."""

    function: Callable[..., Any]
    constants: tuple[Any, ...]
    spec: TreeSpec
    item: int | None
    body: Node

    def evaluate(self, *arguments: Tensor) -> Tensor:
        tensors = iter(arguments)
        flat = [next(tensors) if x is SLOT else x for x in self.constants]
        args, kwargs = tree_unflatten(flat, self.spec)
        result = self.function(*args, **kwargs)
        return result if self.item is None else result[self.item]


def _hypot(a: Tensor, b: Tensor) -> Tensor:
    """hypot without squares, which could overflow."""
    high, low = torch.maximum(a.abs(), b.abs()), torch.minimum(a.abs(), b.abs())
    ratio = low / high
    result = high * torch.sqrt(1 + ratio * ratio)
    return torch.where((high == 0) | (high == float("inf")), high, result)


def _shrunk(gradient: Tensor, x: Tensor, width: float) -> Tensor:
    """The gradient of a function that is 0 within `width` of 0."""
    return torch.where((x >= -width) & (x <= width), 0.0, gradient)


# Decompositions that PyTorch lacks, by aten's names.
_OURS: dict[str, Callable[..., Any]] = {
    "hypot": _hypot,
    "softshrink_backward": _shrunk,
    "hardshrink_backward": _shrunk,
}


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def decomposition(function: Any, name: str) -> Callable[..., Any] | None:
    """A function that computes the op from simpler ones, or None."""
    if name in _OURS:
        return _OURS[name]
    from torch._decomp import decomposition_table

    found: Callable[..., Any] | None = decomposition_table.get(function)
    if found is None and function.has_kernel_for_dispatch_key(_COMPOSITE):
        found = function.decompose
    return found
