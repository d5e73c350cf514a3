"""Tensors as torch's autocast hands them to its own attention function."""

import torch
from torch import Tensor


def autocast(tensor: Tensor) -> Tensor:
    """`tensor` in autocast's dtype, if it is on for its device; float64 stays, as in torch."""
    device = tensor.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return tensor
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))
