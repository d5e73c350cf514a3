"""Errors of results, measured against the bounds of docs/numerics.md."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Unit roundoff of the result's dtype.
ROUNDING = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}
# Rounding of float32 accumulation, relative to the largest result. It is allowed in addition,
# because torch's own error can be exactly zero on small inputs.
ACCUMULATION = 2**-21


class Skipped(Exception):
    """This machine cannot run the case; the message says why."""


@dataclass(frozen=True)
class Measure:
    """The error of the element of a result that is nearest to its bound or furthest beyond it."""

    what: str
    error: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.error <= self.bound  # False for NaN

    @property
    def share(self) -> float:
        """The error divided by the bound; 0 without an error."""
        if self.error == 0:
            return 0.0
        return self.error / self.bound if self.bound > 0 else math.inf


def apart(actual: Tensor, exact: Tensor) -> Tensor:
    """|actual - exact| in float64. Equal NaN or infinities give 0, and other ones infinity."""
    actual, exact = actual.cpu().double(), exact.cpu().double()
    same = (actual == exact) | (actual.isnan() & exact.isnan())
    return (actual - exact).abs().nan_to_num(nan=math.inf).masked_fill(same, 0.0)


def largest(x: Tensor) -> float:
    """The largest finite magnitude; 0 for an empty tensor."""
    return x.double().nan_to_num(0.0, 0.0, 0.0).abs().max().item() if x.numel() else 0.0


def worst_of(tensors: Iterable[tuple[Tensor, Tensor]]) -> float:
    return max((largest(apart(a, b)) for a, b in tensors), default=0.0)


def one_rounding(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest error of each number's rounding to `dtype`."""
    info, size = torch.finfo(dtype), exact.abs().nan_to_num(0.0, 0.0, 0.0)
    return (ROUNDING[dtype] * size).clamp_min(info.smallest_normal * info.eps / 2)


def near(
    what: str, actual: Tensor, exact: Tensor, torchs: float, slack: float | Tensor = 0.0
) -> Measure:
    """Allows twice torch's error, one rounding to the dtype of actual and float32's accumulation.

    The rounding of subnormal numbers is half of the smallest one. An actual infinity counts as the
    nearest number that rounds to it. exact: float64. slack: a further allowed error, one number or
    one per element.
    """
    if actual.shape != exact.shape:
        raise AssertionError(f"{what} has shape {tuple(actual.shape)} and not {tuple(exact.shape)}")
    exact = exact.cpu()
    info = torch.finfo(actual.dtype)
    rounding = one_rounding(exact, actual.dtype)
    bound = 2 * torchs + rounding + ACCUMULATION * largest(exact) + slack
    actual = actual.cpu().double()
    rounded = exact.abs().clamp_min(info.max * (1 + info.eps / 4)).copysign(actual)
    actual = torch.where(actual.isinf() & exact.isfinite(), rounded, actual)
    return worst(what, apart(actual, exact), bound)


def near_statistic(
    what: str, actual: Tensor, exact: Tensor, rounding: float, slack: float | Tensor = 0.0
) -> Measure:
    """Allows a float32 number an error relative to 1 plus its magnitude."""
    exact = exact.cpu().double()
    bound = rounding * (1 + exact.abs().nan_to_num(0, 0, 0)) + slack
    return worst(what, apart(actual, exact), bound)


def same_bits(what: str, actual: Tensor, expected: Tensor) -> Measure:
    """Counts the bytes that differ. The bound is 0."""
    # Not contiguous(): it keeps the strides of dimensions of size 1, which `view` may refuse.
    actual, expected = (
        x.cpu().clone(memory_format=torch.contiguous_format).flatten() for x in (actual, expected)
    )
    if actual.dtype != expected.dtype or actual.numel() != expected.numel():
        raise AssertionError(
            f"{what} is {actual.numel()} x {actual.dtype} and not "
            f"{expected.numel()} x {expected.dtype}"
        )
    differ = (actual.view(torch.uint8) != expected.view(torch.uint8)).sum().item()
    return Measure(f"{what}, bytes that differ", differ, 0.0)


def worst(what: str, error: Tensor, bound: Tensor) -> Measure:
    """The element that is nearest to its bound, or furthest beyond it."""
    if error.numel() == 0:
        return Measure(what, 0.0, 0.0)
    place = (error / bound.clamp_min(torch.finfo(torch.float64).tiny)).argmax()
    return Measure(what, error.flatten()[place].item(), bound.flatten()[place].item())


def on(device: torch.device, options: dict[str, Any]) -> dict[str, Any]:
    return {n: x.to(device) if isinstance(x, Tensor) else x for n, x in options.items()}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normally distributed numbers on the CPU. They are the same on every machine."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
