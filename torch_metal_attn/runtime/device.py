"""The devices that can run the kernels on this machine."""

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torch_metal_attn.runtime import macos, mps
from torch_metal_attn.simulator import simulate


@contextmanager
def best_device(*, check: bool = False) -> Iterator[torch.device]:
    """The device for the kernels: mps if it is usable, else the CPU with the simulator on.

    check=True turns on the simulator's checks; on mps there are none. If torch has mps but mps
    cannot be used, one line on stderr says why, once per process.
    """
    problem = mps.problem()
    if not problem:
        yield torch.device("mps")
        return
    if mps.available():
        _say(f"torch_metal_attn: the kernels run in the simulator; mps cannot be used: {problem}")
    with simulate(check=check):
        yield torch.device("cpu")


def metal_version() -> str:
    """The version of Metal in which torch compiles the kernels on mps: 3.1, 3.2 or 4.0."""
    chosen = os.environ.get("PYTORCH_MPS_METAL_VERSION")
    if _torch_version() >= (2, 15) and chosen in ("3.1", "3.2", "4.0"):
        return chosen
    if _torch_version() < (2, 11) or not macos.at_least(15, 0):
        return "3.1"
    return "4.0" if macos.at_least(26, 0) else "3.2"


def warn_of_torch() -> None:
    """Print one line if this torch cannot compile kernels here, or lets them ignore NaN."""
    if _torch_version() >= (2, 15) and not macos.at_least(15, 0):
        _say(
            f"torch_metal_attn: torch {torch.__version__} compiles no kernels before macOS 15, so "
            "they cannot run on mps: pip install 'torch>=2.10,<2.15'"
        )
    # The kernels request safe arithmetic by a pragma, which Metal 3.1 does not have.
    elif os.environ.get("PYTORCH_MPS_FAST_MATH", "0") != "0" and metal_version() == "3.1":
        _say(
            "torch_metal_attn: with PYTORCH_MPS_FAST_MATH Metal 3.1 ignores NaN and infinity, so "
            "results may be wrong: unset it, or use torch 2.11 or later on macOS 15 or later"
        )


def _torch_version() -> tuple[int, ...]:
    return tuple(map(int, torch.__version__.split(".")[:2]))


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
