"""Casts tensors as torch's autocast does for its own attention function."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

# Asked once: torch.compile of torch 2.10 cannot trace the question.
_DEVICES = frozenset(
    device for device in ("cpu", "cuda", "mps") if torch.amp.is_autocast_available(device)
)


def autocasts(device: str) -> bool:
    """True if autocast is on for this device type; False for one without autocast, such as meta."""
    return device in _DEVICES and torch.is_autocast_enabled(device)


def without_autocast(device: str) -> AbstractContextManager[Any]:
    """A context in which products are in the dtypes of their operands."""
    return torch.autocast(device, enabled=False) if autocasts(device) else nullcontext()


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast to autocast's dtype where it is on for the device; float64 stays, as in torch."""
    if not torch._C._is_any_autocast_enabled():
        return tensors
    return tuple(_cast(tensor) for tensor in tensors)


def _cast(tensor: Tensor) -> Tensor:
    device = tensor.device.type
    if not autocasts(device):
        return tensor
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))
