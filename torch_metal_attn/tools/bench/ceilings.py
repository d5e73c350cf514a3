"""The most that the machine can do, measured in the same run with torch's own operations."""

from dataclasses import dataclass

import torch

from torch_metal_attn.tools.bench.timing import Timer, interleaved


@dataclass(frozen=True)
class Ceilings:
    """For a dtype: FLOPs per second of a large matrix product, bytes per second of a large copy."""

    flops: float
    bytes: float


def measure(
    dtype: torch.dtype,
    device: torch.device,
    timer: Timer,
    rounds: int,
    *,
    size: int = 4096,
    copied: int = 2**28,
) -> Ceilings:
    """Measure both ceilings.

    size: rows and columns of both matrices. copied: bytes that are read, and as many are written.
    Raises RuntimeError if torch cannot do one of the two.
    """
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    source = torch.zeros(copied // dtype.itemsize, device=device, dtype=dtype)
    target = torch.empty_like(source)
    calls = {"product": lambda: torch.matmul(a, b), "copy": lambda: target.copy_(source)}
    times = interleaved(calls, timer, rounds)
    for name, found in times.items():
        if found.error:
            raise RuntimeError(f"the {name} that measures the machine fails: {found.error}")
    return Ceilings(2 * size**3 / times["product"].median, 2 * copied / times["copy"].median)
