"""Where the kernels can run on this machine."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torch_metal_attn.simulator import simulate


@contextmanager
def best_device(*, check: bool = False) -> Iterator[torch.device]:
    """The device on which the kernels run: mps if there is one, else the CPU with the simulator on.

    check turns on the simulator's checkers; mps has none.
    """
    if torch.backends.mps.is_available():
        yield torch.device("mps")
        return
    with simulate(check=check):
        yield torch.device("cpu")


def memory_of(device: torch.device) -> float:
    """Bytes of memory that the device can have, 0 where nobody tells."""
    if device.type == "mps":
        return float(torch.mps.recommended_max_memory())
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, OSError, ValueError):
        return 0.0
