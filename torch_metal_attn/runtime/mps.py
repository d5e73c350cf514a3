"""Checks that the kernels can run on mps here.

On a virtual Mac, such as a hosted CI runner, torch reports that mps is available, but the first
allocation fails or kernels return zeros. The first query or launch of a process tests this.
"""

import ctypes

import torch

from torch_metal_attn.runtime import extension


def available() -> bool:
    """True if torch has an mps device, usable or not."""
    return torch.backends.mps.is_available()


def problem() -> str:
    """One line on why the kernels cannot run on mps in this process; "" if they can.

    The first call waits until the GPU has finished the work that torch has queued, and then runs a
    small kernel for at most 30 seconds. Ops that are called with tensors on mps raise RuntimeError
    with the same reason. TORCH_METAL_ATTN_BACKEND=mps in the environment of the first call or
    launch skips this test.
    """
    if not available():
        return "torch.backends.mps is not available"
    library = extension.load()
    library.metal_attn_mps_problem.restype = ctypes.c_char_p
    reason: bytes = library.metal_attn_mps_problem()
    return reason.decode()


def usable() -> bool:
    """True if the kernels run on mps in this process; see `problem`."""
    return not problem()
