"""Tensors that a score_mod or mask_mod captures."""

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.flex.graph import Node


@dataclass
class Captured:
    """The tensors that functions index, in the order of first use, with their names."""

    tensors: list[Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    # Those made of numbers of a graph of torch.compile that may change from call to call.
    numbers: dict[str, Tensor] = field(default_factory=dict)
    # Whether what functions compute may depend on more than their code and indexed tensors.
    depends_on_values: bool = False

    def number(self, tensor: Tensor, name: str) -> int:
        for i, known in enumerate(self.tensors):
            if known is tensor or same_memory(known, tensor):
                return i
        self.tensors.append(tensor)
        self.names.append(name)
        return len(self.tensors) - 1


@dataclass(frozen=True)
class Part:
    """A captured tensor that has fewer indices yet than dimensions."""

    capture: int
    indices: tuple[Node, ...]


@dataclass(frozen=True)
class Row:
    """What pointwise ops made of all elements of parts."""

    elements: tuple[Node, ...]


def loaded_dtype(tensor: Tensor) -> torch.dtype:
    """Of what is loaded from it: Metal has no float64, and float32 is made of it first."""
    return torch.float32 if tensor.dtype == torch.float64 else tensor.dtype


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two views are of the same elements, and of the same graph.

    Tensors of other types, such as those of a graph that is being made, may have no address.
    """
    plain = (Tensor, torch.nn.Parameter)
    return (
        type(a) in plain
        and type(b) in plain
        and not a.requires_grad
        and not b.requires_grad
        and a.dtype == b.dtype
        and a.device == b.device
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.data_ptr() == b.data_ptr()
    )


def name_in(function: Any, tensor: Tensor) -> str:
    """What the user calls a captured tensor, as far as the function tells."""
    owner: Any = function
    while hasattr(owner, "func"):  # functools.partial
        owner = owner.func
    places: list[dict[str, Any]] = []
    if inspect.ismethod(owner):
        places.append(vars(owner.__self__))
        owner = owner.__func__
    if inspect.isfunction(owner):
        closure = inspect.getclosurevars(owner)
        places += [dict(closure.nonlocals), dict(closure.globals)]
    elif not inspect.ismethod(function):
        places.append(getattr(owner, "__dict__", {}))
    for names in places:
        for name, value in names.items():
            if value is tensor:
                return name
    return f"a tensor of shape {tuple(tensor.shape)} and dtype {tensor.dtype}"
