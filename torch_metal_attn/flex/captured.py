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
    # By the number of a tensor that is a view: its base, which gets the gradient.
    sources: dict[int, Tensor] = field(default_factory=dict)
    # By name: symbolic numbers of torch.compile as tensors. They may change from call to call.
    numbers: dict[str, Tensor] = field(default_factory=dict)
    # True if results may depend on more than the functions' code and indexed tensors.
    depends_on_values: bool = False

    def number(self, tensor: Tensor, name: str, source: Tensor | None = None) -> int:
        """The index of `tensor` in `tensors`, which is extended if necessary."""
        for i, known in enumerate(self.tensors):
            same_source = source is self.sources.get(i)
            if known is tensor or (same_source and same_memory(known, tensor)):
                return i
        if source is not None:
            self.sources[len(self.tensors)] = source
        self.tensors.append(tensor)
        self.names.append(name)
        return len(self.tensors) - 1

    def finish(self) -> None:
        """Repeat the trace's views, as autograd did not record them in the trace."""
        for i, source in self.sources.items():
            if source.requires_grad:
                x = self.tensors[i]
                self.tensors[i] = source.as_strided(x.shape, x.stride(), x.storage_offset())


@dataclass(frozen=True)
class Part:
    """A captured tensor with fewer indices than dimensions, or a view of `source`."""

    tensor: Tensor
    name: str
    indices: tuple[Node, ...] = ()
    source: Tensor | None = None

    def view(self, tensor: Tensor) -> "Part":
        source = self.tensor if self.source is None else self.source
        return Part(tensor, self.name, self.indices, source)

    def rest(self) -> Tensor:
        """A meta tensor with the dimensions that have no index."""
        size, stride = (x[len(self.indices) :] for x in (self.tensor.shape, self.tensor.stride()))
        return torch.empty_strided(size, stride, dtype=loaded_dtype(self.tensor), device="meta")

    def as_in(self, rest: Tensor) -> "Part":
        """The part whose `rest()` is `rest`, which is a view of this part's `rest()`."""
        n, x = len(self.indices), self.tensor
        size, stride = (*x.shape[:n], *rest.shape), (*x.stride()[:n], *rest.stride())
        return self.view(x.as_strided(size, stride, x.storage_offset() + rest.storage_offset()))


@dataclass(frozen=True)
class Row:
    """A row whose elements are results of pointwise ops on elements of parts."""

    elements: tuple[Node, ...]


def loaded_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of a tensor's loads. float64, which Metal lacks, is first cast to float32."""
    return torch.float32 if tensor.dtype == torch.float64 else tensor.dtype


def same_memory(a: Tensor, b: Tensor) -> bool:
    """True if two views have the same elements and no graph. Traced tensors have no address."""
    plain = (Tensor, torch.nn.Parameter)
    if any(type(x) not in plain or x.requires_grad for x in (a, b)):
        return False
    if a.dtype != b.dtype or a.device != b.device or a.shape != b.shape:
        return False
    return a.stride() == b.stride() and a.data_ptr() == b.data_ptr()


def name_in(function: Any, tensor: Tensor) -> str:
    """The user's name of a captured tensor, else its shape and dtype."""
    owner: Any = function
    while hasattr(owner, "func"):  # functools.partial
        owner = owner.func
    scopes: list[dict[str, Any]] = []
    if inspect.ismethod(owner):
        scopes.append(vars(owner.__self__))
        owner = owner.__func__
    if inspect.isfunction(owner):
        closure = inspect.getclosurevars(owner)
        scopes += [dict(closure.nonlocals), dict(closure.globals)]
    elif not inspect.ismethod(function):
        scopes.append(getattr(owner, "__dict__", {}))
    for names in scopes:
        for name, value in names.items():
            if value is tensor:
                return name
    return f"a tensor of shape {tuple(tensor.shape)} and dtype {tensor.dtype}"
