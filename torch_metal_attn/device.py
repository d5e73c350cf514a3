"""Where the kernels can run on this machine."""

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
