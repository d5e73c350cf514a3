"""Makes one argument of a call wrong, so that the call must be refused."""

from typing import Any

import torch
from torch import Tensor

_WAYS = ("dtype", "dimensions", "device")


def ways(tensors: tuple[str, ...], rows: tuple[str, ...]) -> tuple[str, ...]:
    """The changes that `invalidate` can make. rows: tensors whose last dimension must be dense."""
    general = tuple(f"{way} of {name}" for name in tensors for way in _WAYS)
    return general + tuple(f"strides of {name}" for name in rows)


def invalidate(arguments: dict[str, Any], how: str) -> dict[str, Any]:
    """Give one argument a dtype, rank, strides, storage or device that every function refuses."""
    if not how:
        return arguments
    way, name = how.split(" of ")
    return arguments | {name: _invalidated(arguments[name], way)}


def _invalidated(x: Tensor, way: str) -> Tensor:
    if way == "dtype":
        return x.to(torch.complex64)
    if way == "dimensions":
        return x[None, None, None]
    if way == "device":
        return x.to("meta")
    if way == "storage":
        short = x.clone()
        short.untyped_storage().resize_(max(min(7, x.nbytes - 1), 0))
        return short
    if way in ("bits8", "float8_e8m0fnu"):  # dtypes without a scalar_type in the stable ABI
        return torch.zeros(x.shape, dtype=torch.uint8).view(getattr(torch, way))
    return x.repeat_interleave(2, -1)[..., ::2]
