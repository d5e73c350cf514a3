"""Where the kernels can run on this machine."""

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torch_metal_attn.runtime import mps
from torch_metal_attn.simulator import simulate


@contextmanager
def best_device(*, check: bool = False) -> Iterator[torch.device]:
    """The device for the kernels: mps if it is usable, else the CPU with the simulator on.

    check=True turns on the simulator's checks; mps has none. If torch has mps but it cannot be
    used, one line on stderr says why, once per process.
    """
    problem = mps.problem()
    if not problem:
        yield torch.device("mps")
        return
    if mps.available():
        _say(f"torch_metal_attn: the kernels run in the simulator; mps cannot be used: {problem}")
    with simulate(check=check):
        yield torch.device("cpu")


@functools.cache
def _say(line: str) -> None:
    print(line, file=sys.stderr)


def memory_of(device: torch.device) -> float:
    """The device's memory in bytes, or 0 if it is unknown."""
    if device.type == "mps":
        return float(torch.mps.recommended_max_memory())
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, OSError, ValueError):
        return 0.0
