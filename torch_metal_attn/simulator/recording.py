"""Launches as data, which `simulate(record=True)` records for each kernel that an op would run."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RecordedBuffer:
    """One buffer argument.

    storage: all bytes of the tensor's storage, as uint8. It shares the tensor's memory and keeps it
        alive. So two buffers share a storage exactly if these tensors have the same address.
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
    """One dispatch of an op. The kernel's text is the source of `family`, after the defines.

    params: the bytes of the kernel's params structure, for buffer(params_slot). A kernel without
        such a structure has b"" and None.
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
        """Threads of the grid."""
        return tuple(n * m for n, m in zip(self.threadgroups, self.group_size, strict=True))
