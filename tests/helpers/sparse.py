"""Tensors of more than 2**31 elements, of which only written pages take memory."""

import mmap
import sys

import torch

NO_RESERVE = 0x4000 if sys.platform == "linux" else 0x40  # MAP_NORESERVE, for older Pythons


def sparse(elements, dtype=torch.float16):
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANON | NO_RESERVE
    return torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize, flags=flags), dtype=dtype)
