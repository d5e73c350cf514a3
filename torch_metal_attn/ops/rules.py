"""Single rules for tensors without data, in the words of csrc/ops/common/check.cpp."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MAX_LENGTH = 2**31 - 1024
ELEMENTS = (torch.float32, torch.float16, torch.bfloat16)
ELEMENT_NAMES = "float32, float16 or bfloat16"


def rule(condition: Any, message: Callable[..., str]) -> None:
    """Raise ValueError with the message unless the condition, which may be symbolic, holds."""
    torch._check_value(condition, message)


def equal(name: str, size: int, other_name: str, other_size: int, what: str) -> None:
    rule(
        size == other_size,
        lambda: f"{name} has {what} of {size} and {other_name} of {other_size}; they must be equal",
    )


def alike(name: str, tensor: Tensor, other_name: str, other: Tensor, dim: int, what: str) -> None:
    equal(name, tensor.shape[dim], other_name, other.shape[dim], what)


def same_device(name: str, tensor: Tensor, other: Tensor, other_name: str = "q") -> None:
    rule(
        tensor.device == other.device,
        lambda: (
            f"{name} is on {tensor.device} and {other_name} on {other.device}; they must be on one "
            "device"
        ),
    )


def same_dtype(name: str, tensor: Tensor, other: Tensor, other_name: str = "q") -> None:
    rule(
        tensor.dtype == other.dtype,
        lambda: (
            f"{name} has dtype {tensor.dtype} and {other_name} {other.dtype}; they must be alike"
        ),
    )


def element(name: str, tensor: Tensor) -> None:
    rule(
        tensor.dtype in ELEMENTS,
        lambda: f"{name} has dtype {tensor.dtype}; it must be {ELEMENT_NAMES}",
    )


def int32(name: str, tensor: Tensor, other: Tensor, other_name: str = "q") -> None:
    same_device(name, tensor, other, other_name)
    rule(
        tensor.dtype == torch.int32,
        lambda: f"{name} has dtype {tensor.dtype}; it must be int32",
    )


def index(name: str, tensor: Tensor, other: Tensor, other_name: str = "q") -> None:
    int32(name, tensor, other, other_name)
    rule(
        tensor.dim() == 1 and (tensor.numel() < 2 or tensor.stride(0) == 1),
        lambda: (
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; it must be "
            f"contiguous with 1 dimension"
        ),
    )


def last_stride(name: str, tensor: Tensor) -> None:
    rule(
        tensor.shape[-1] == 1 or tensor.stride(-1) == 1 or tensor.numel() == 0,
        lambda: (
            f"{name} has strides {tensor.stride()}; the last must be 1: call {name}.contiguous() "
            "first"
        ),
    )


def shape(name: str, tensor: Tensor, allowed: list[tuple[int, ...]]) -> None:
    rule(
        any(tensor.shape == shape for shape in allowed),
        lambda: (
            f"{name} has shape {tuple(tensor.shape)}; it must be {' or '.join(map(str, allowed))}"
        ),
    )


def dense_heads(name: str, tensor: Tensor, heads: int) -> None:
    rule(
        heads < 2 or tensor.stride(-1) == 1,
        lambda: (
            f"{name} has strides {tensor.stride()}; the last must be 1: call {name}.contiguous() "
            "first"
        ),
    )


def broadcasts(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    fits = 1 <= tensor.dim() <= 4 and all(
        size in (1, whole)
        for size, whole in zip(reversed(tensor.shape), reversed(shape), strict=False)
    )
    rule(fits, lambda: f"{name} has shape {tuple(tensor.shape)}; it must broadcast to {shape}")
