"""Launches as data: what `simulate(record=True)` notes of each kernel that an op would run."""

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import engine


@dataclass(frozen=True)
class RecordedBuffer:
    """One buffer argument.

    storage: all bytes of the tensor's storage, as uint8. It shares the tensor's memory and keeps
        it, so two buffers are of one storage exactly if the addresses of these are equal.
    offset: the byte of the storage at which the argument begins.
    writable: whether the op lets the kernel write to it.
    """

    slot: int
    storage: torch.Tensor
    offset: int
    writable: bool

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is in this storage."""
        return bool(tensor.untyped_storage().data_ptr() == self.storage.data_ptr())


@dataclass(frozen=True)
class RecordedLaunch:
    """One dispatch that an op asked for. Its text is `shaders.source(family)` after the defines.

    params: the bytes of the kernel's params structure, for buffer(params_slot); b"" and None if
        it has none.
    """

    family: str
    kernel: str
    defines: dict[str, str]
    buffers: tuple[RecordedBuffer, ...]
    params_slot: int | None
    params: bytes
    threadgroups: tuple[int, int, int]
    group_size: tuple[int, int, int]

    @property
    def grid(self) -> tuple[int, ...]:
        """Threads of the whole grid."""
        return tuple(n * m for n, m in zip(self.threadgroups, self.group_size, strict=True))


def recorded(
    family: str,
    kernel: str,
    defines: dict[str, str],
    buffers: Sequence[engine.Buffer],
    threadgroups: Sequence[int],
    threads: Sequence[int],
) -> RecordedLaunch:
    """A launch, from what csrc/runtime/simulator.cpp passes. It holds the buffers' tensors."""
    # The params are no tensor: they are gone when the op goes on.
    params = [b for b in buffers if b.space == engine.SPACES.index("constant")]
    return RecordedLaunch(
        family,
        kernel,
        defines,
        tuple(_buffer(b) for b in buffers if b not in params),
        params[0].index if params else None,
        ctypes.string_at(params[0].storage, params[0].bytes) if params else b"",
        (threadgroups[0], threadgroups[1], threadgroups[2]),
        (threads[0], threads[1], threads[2]),
    )


def _buffer(buffer: engine.Buffer) -> RecordedBuffer:
    return RecordedBuffer(buffer.index, _storage(buffer), buffer.offset, bool(buffer.writable))


def _storage(buffer: engine.Buffer) -> torch.Tensor:
    """The bytes of the buffer's storage, which the result keeps."""
    if not buffer.storage:
        return torch.empty(0, dtype=torch.uint8)
    library = engine.library()
    library.metal_attn_hold_tensor.restype = ctypes.c_void_p
    library.metal_attn_hold_tensor.argtypes = (ctypes.c_void_p,)
    library.metal_attn_release_tensor.argtypes = (ctypes.c_void_p,)
    held = library.metal_attn_hold_tensor(buffer.tensor)
    # Only a class of Python's can be watched. torch keeps the array as long as the tensor's memory.
    array_type: Any = type("Storage", (ctypes.c_uint8 * buffer.bytes,), {})
    array = array_type.from_address(buffer.storage)
    weakref.finalize(array, library.metal_attn_release_tensor, held)
    return torch.frombuffer(array, dtype=torch.uint8)
