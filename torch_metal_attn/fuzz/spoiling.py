"""How an argument of a call is made wrong, whatever the function: it must be refused."""

import random
from typing import Any

import torch
from torch import Tensor

_WAYS = ("dtype", "dimensions", "device")


def ways(tensors: tuple[str, ...], rows: tuple[str, ...]) -> tuple[str, ...]:
    """What `spoil` can do. rows: the tensors whose last dimension must be dense."""
    general = tuple(f"{way} of {name}" for name in tensors for way in _WAYS)
    return general + tuple(f"strides of {name}" for name in rows)


def pick(r: random.Random, tensors: tuple[str, ...], rows: tuple[str, ...]) -> str:
    """One of them."""
    return r.choice(ways(tensors, rows))


def spoil(arguments: dict[str, Any], how: str) -> dict[str, Any]:
    """The arguments, one of them of a dtype, a rank, strides or a device that no function takes."""
    if not how:
        return arguments
    way, name = how.split(" of ")
    return arguments | {name: _spoilt(arguments[name], way)}


def _spoilt(x: Tensor, way: str) -> Tensor:
    if way == "dtype":
        return x.to(torch.complex64)
    if way == "dimensions":
        return x[None, None, None]
    if way == "device":
        return x.to("meta")
    return x.repeat_interleave(2, -1)[..., ::2]
