"""CUDA's driver interface, by ctypes: memory, programs and launches."""

import ctypes
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from .packed import Dispatch, Packed

# More than any argument that no test gives is read of.
_ABSENT_BYTES = 4096


class CudaError(RuntimeError):
    """A call of the driver failed."""


@lru_cache(maxsize=1)
def cuda() -> Any:
    """The driver's library, with the first GPU's primary context current."""
    library = ctypes.CDLL("libcuda.so.1")
    _check(library.cuInit(0), "cuInit")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _check(library.cuDeviceGet(ctypes.byref(device), 0), "cuDeviceGet")
    _check(library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "retain")
    _check(library.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    return library


def _check(status: int, what: str) -> None:
    if status:
        raise CudaError(f"{what}: CUDA error {status}")


def allocate(size: int) -> int:
    """Exactly `size` bytes, so that compute-sanitizer knows where they end."""
    pointer = ctypes.c_uint64()
    _check(cuda().cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(max(size, 1))), "allocate")
    return pointer.value


def free(pointer: int) -> None:
    """Memory of `allocate`."""
    _check(cuda().cuMemFree_v2(ctypes.c_uint64(pointer)), "free")


def upload(data: bytes) -> int:
    """Allocated memory with this content."""
    pointer = allocate(len(data))
    size = ctypes.c_size_t(len(data))
    _check(cuda().cuMemcpyHtoD_v2(ctypes.c_uint64(pointer), data, size), "upload")
    return pointer


def download(pointer: int, size: int) -> bytes:
    """The content of memory."""
    data = ctypes.create_string_buffer(size)
    source = ctypes.c_uint64(pointer)
    _check(cuda().cuMemcpyDtoH_v2(data, source, ctypes.c_size_t(size)), "download")
    return data.raw


class Programs:
    """The programs, whose assembled kernels are loaded from a folder when they are first used."""

    def __init__(self, folder: Path, packed: Packed) -> None:
        self.folder, self.packed = folder, packed
        self.absent = upload(bytes(_ABSENT_BYTES))
        self._kernels: dict[str, ctypes.c_void_p] = {}

    def launch(self, dispatch: Dispatch, pointers: Mapping[str, int]) -> None:
        """Run a dispatch, and wait for it."""
        program = self.packed.programs[dispatch.program]
        addresses = {slot: pointers[name] + at for slot, (name, at) in dispatch.buffers.items()}
        constants = {slot: upload(data) for slot, data in dispatch.constants.items()}
        addresses |= constants
        # A buffer that the kernel declares and the op leaves out is never read.
        values = [ctypes.c_uint64(addresses.get(slot, self.absent)) for slot in program.slots]
        arguments = (ctypes.c_void_p * max(len(values), 1))(
            *(ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values)
        )
        kernel, grid = self._kernel(dispatch.program), dispatch.threadgroups
        size = (*grid, *dispatch.group_size)
        _check(cuda().cuLaunchKernel(kernel, *size, 0, None, arguments, None), "launch")
        _check(cuda().cuCtxSynchronize(), "a kernel failed")
        for pointer in constants.values():
            free(pointer)

    def _kernel(self, name: str) -> ctypes.c_void_p:
        if name not in self._kernels:
            image = (self.folder / name).read_bytes()
            library, kernel = ctypes.c_void_p(), ctypes.c_void_p()
            nothing = (None, None, 0, None, None, 0)
            status = cuda().cuLibraryLoadData(ctypes.byref(library), image, *nothing)
            _check(status, f"loading {name}")
            entry = self.packed.programs[name].entry.encode()
            _check(cuda().cuLibraryGetKernel(ctypes.byref(kernel), library, entry), name)
            self._kernels[name] = kernel
        return self._kernels[name]
