"""Launches as data, which `simulate(record=True)` records for each kernel that an op would run."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RecordedBuffer:
    """One buffer argument.

    storage: all bytes of the tensor's storage, as uint8. It shares the tensor's memory and keeps it
        alive. Two buffers share a storage if and only if their `storage` has the same address.
    offset: the byte of the storage at which the argument begins.
    writable: whether the op lets the kernel write to the buffer.
    """

    slot: int
    storage: torch.Tensor
    offset: int
    writable: bool

    def holds(self, tensor: torch.Tensor) -> bool:
        """True if `tensor` is in this storage."""
        return bool(tensor.untyped_storage().data_ptr() == self.storage.data_ptr())


@dataclass(frozen=True)
class RecordedLaunch:
    """One dispatch of an op. The kernel's text is the defines, then the source of `family`.

    params: the bytes of the kernel's params structure, which is buffer(params_slot). If the kernel
        has no such structure, params is b"" and params_slot is None.
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
        """Threads of the grid in each dimension."""
        return tuple(n * m for n, m in zip(self.threadgroups, self.group_size, strict=True))
