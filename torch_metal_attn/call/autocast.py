"""Casts tensors as torch's autocast does for its own attention function."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

# Computed once, as torch.compile of torch 2.10 cannot trace is_autocast_available.
_DEVICES = frozenset(filter(torch.amp.is_autocast_available, ("cpu", "cuda", "mps")))


def autocasts(device: str) -> bool:
    """True if autocast is on for this device type. False without autocast, as for meta."""
    return device in _DEVICES and torch.is_autocast_enabled(device)


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """A context in which autocast does not change the dtypes of products."""
    return torch.autocast(device, enabled=False) if autocasts(device) else nullcontext()


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast to autocast's dtype if autocast is on for the device; float64 stays, as in torch."""
    if not torch._C._is_any_autocast_enabled():
        return tensors
    return tuple(_cast(tensor) for tensor in tensors)


def _cast(tensor: Tensor) -> Tensor:
    device = tensor.device.type
    if autocasts(device) and tensor.is_floating_point() and tensor.dtype != torch.float64:
        return tensor.to(torch.get_autocast_dtype(device))
    return tensor
