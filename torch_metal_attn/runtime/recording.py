"""A launch of csrc/runtime/simulator.cpp as a `RecordedLaunch`."""

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from torch_metal_attn.simulator import engine
from torch_metal_attn.simulator.recording import RecordedBuffer, RecordedLaunch


def recorded(
    family: str,
    defines: dict[str, str],
    kernel: str,
    buffers: Sequence[engine.Buffer],
    threadgroups: tuple[int, int, int],
    threads: tuple[int, int, int],
) -> RecordedLaunch:
    constant = engine.SPACES.index("constant")
    tensors = [b for b in buffers if b.space != constant]
    bound = tuple(RecordedBuffer(b.index, _storage(b), b.offset, bool(b.writable)) for b in tensors)
    params = next((b for b in buffers if b.space == constant), None)
    index = None if params is None else params.index
    # The params are copied, as their memory is freed after the launch.
    copied = b"" if params is None else ctypes.string_at(params.storage, params.bytes)
    return RecordedLaunch(family, kernel, defines, bound, index, copied, threadgroups, threads)


def _storage(buffer: engine.Buffer) -> torch.Tensor:
    """The bytes of the buffer's storage. The result keeps the storage alive."""
    if not buffer.storage:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    library = engine.library()
    library.metal_attn_hold_tensor.restype = ctypes.c_void_p
    library.metal_attn_hold_tensor.argtypes = (ctypes.c_void_p,)
    library.metal_attn_release_tensor.argtypes = (ctypes.c_void_p,)
    held = library.metal_attn_hold_tensor(buffer.tensor)
    # weakref needs a Python class. torch keeps the array alive as long as the tensor's memory.
    array_type: Any = type("Storage", (ctypes.c_uint8 * buffer.bytes,), {})
    array = array_type.from_address(buffer.storage)
    weakref.finalize(array, library.metal_attn_release_tensor, held)
    return torch.frombuffer(array, dtype=torch.uint8)
