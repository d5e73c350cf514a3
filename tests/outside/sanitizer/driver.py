"""CUDA's driver interface, by ctypes: memory, programs and launches."""

import ctypes
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from .packed import Dispatch, Packed


@lru_cache(maxsize=1)
def cuda() -> Any:
    """The driver's library, with the first GPU's primary context current."""
    library = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    statuses = (
        library.cuInit(0),
        library.cuDeviceGet(ctypes.byref(device), 0),
        library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        library.cuCtxSetCurrent(context),
    )
    if any(statuses):
        raise RuntimeError(f"CUDA cannot start: errors {statuses}")
    return library


def _call(name: str, *arguments: Any) -> None:
    status = getattr(cuda(), name)(*arguments)
    if status:
        raise RuntimeError(f"{name}: CUDA error {status}")


def allocate(size: int) -> int:
    """Allocate exactly `size` bytes, so that compute-sanitizer knows where they end."""
    pointer = ctypes.c_uint64()
    _call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(size, 1)))
    return pointer.value


def free(pointer: int) -> None:
    _call("cuMemFree_v2", ctypes.c_uint64(pointer))


def upload(data: bytes) -> int:
    pointer = allocate(len(data))
    _call("cuMemcpyHtoD_v2", ctypes.c_uint64(pointer), data, ctypes.c_size_t(len(data)))
    return pointer


def download(pointer: int, size: int) -> bytes:
    data = ctypes.create_string_buffer(size)
    _call("cuMemcpyDtoH_v2", data, ctypes.c_uint64(pointer), ctypes.c_size_t(size))
    return data.raw


class Programs:
    """Assembled kernels, loaded from a folder at their first use."""

    def __init__(self, folder: Path, packed: Packed) -> None:
        self.folder, self.packed = folder, packed
        self.absent = upload(bytes(4096))  # more than a kernel reads of an absent argument
        self._kernels: dict[str, ctypes.c_void_p] = {}

    def launch(self, dispatch: Dispatch, pointers: Mapping[str, int]) -> None:
        program = self.packed.programs[dispatch.program]
        addresses = {slot: pointers[name] + at for slot, (name, at) in dispatch.buffers.items()}
        constants = {slot: upload(data) for slot, data in dispatch.constants.items()}
        addresses |= constants
        # Kernels never read a buffer that the op leaves out.
        values = [ctypes.c_uint64(addresses.get(slot, self.absent)) for slot in program.slots]
        arguments = (ctypes.c_void_p * max(len(values), 1))(
            *(ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values)
        )
        size = (*dispatch.threadgroups, *dispatch.group_size)
        _call("cuLaunchKernel", self._kernel(dispatch.program), *size, 0, None, arguments, None)
        _call("cuCtxSynchronize")
        for pointer in constants.values():
            free(pointer)

    def _kernel(self, name: str) -> ctypes.c_void_p:
        if name not in self._kernels:
            image = (self.folder / name).read_bytes()
            library, kernel = ctypes.c_void_p(), ctypes.c_void_p()
            nothing = (None, None, 0, None, None, 0)
            _call("cuLibraryLoadData", ctypes.byref(library), image, *nothing)
            entry = self.packed.programs[name].entry.encode()
            _call("cuLibraryGetKernel", ctypes.byref(kernel), library, entry)
            self._kernels[name] = kernel
        return self._kernels[name]
