"""Counts the attention calls by their form of mask, for tests, demos and debugging."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Routes:
    """Counts of calls by their description; see `record_routes`.

    plain: full or top-left causal. compact: a window, chunks, padding or another diagonal, passed
    to the kernel as numbers and lengths. dense: with a mask or bias that has a value for each query
    and key. packed: with the bounds of sequences.
    """

    plain: Counter[str] = field(default_factory=Counter)
    compact: Counter[str] = field(default_factory=Counter)
    dense: Counter[str] = field(default_factory=Counter)
    packed: Counter[str] = field(default_factory=Counter)

    @property
    def kernel(self) -> Counter[str]:
        """All calls. Each one is a call of one op of `metal_attn`."""
        return self.plain + self.compact + self.dense + self.packed


_recorders: list[Routes] = []


@contextmanager
def record_routes() -> Iterator[Routes]:
    """Count the attention calls inside the block by route, except those in compiled graphs."""
    routes = Routes()
    _recorders.append(routes)
    try:
        yield routes
    finally:
        # By identity, because records with the same counts are equal.
        _recorders[:] = [other for other in _recorders if other is not routes]


def record(route: str, module: nn.Module, query: Tensor, key: Any, detail: str) -> None:
    if torch.compiler.is_compiling() or not _recorders:
        return
    call = f"{type(module).__name__} q {tuple(query.shape)} k {tuple(key.shape)} {detail}"
    for routes in _recorders:
        getattr(routes, route)[call] += 1
