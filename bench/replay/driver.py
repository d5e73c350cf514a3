"""CUDA's driver interface, by ctypes: programs, launches, and parts of the GPU to run them on."""

import ctypes
import struct
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from .manifest import Dispatch, Manifest

# CUdevResource: its size, and where an SM resource has its count.
_RESOURCE_BYTES, _SM_COUNT_AT, _SM_RESOURCE = 144, 96, 1
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


def synchronise(stream: int | None = None) -> None:
    """Wait for a stream, or for all."""
    if stream is None:
        _check(cuda().cuCtxSynchronize(), "a kernel failed")
    else:
        _check(cuda().cuStreamSynchronize(ctypes.c_void_p(stream)), "a kernel failed")


def part_of_gpu(multiprocessors: int) -> int:
    """A stream whose kernels run on so many multiprocessors only (a green context)."""
    library, device = cuda(), ctypes.c_int()
    _check(library.cuDeviceGet(ctypes.byref(device), 0), "cuDeviceGet")
    whole, rest = ((ctypes.c_ubyte * _RESOURCE_BYTES)() for _ in range(2))
    _check(library.cuDeviceGetDevResource(device, whole, _SM_RESOURCE), "resource")
    if multiprocessors < struct.unpack_from("I", whole, _SM_COUNT_AT)[0]:
        part, count = (ctypes.c_ubyte * _RESOURCE_BYTES)(), ctypes.c_uint(1)
        _check(
            library.cuDevSmResourceSplitByCount(
                part, ctypes.byref(count), whole, rest, 0, multiprocessors
            ),
            "split",
        )
    else:
        part = whole
    got = struct.unpack_from("I", part, _SM_COUNT_AT)[0]
    if got != multiprocessors:
        raise CudaError(f"{multiprocessors} multiprocessors were asked for, and {got} are given")
    description, context, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    _check(library.cuDevResourceGenerateDesc(ctypes.byref(description), part, 1), "describe")
    _check(library.cuGreenCtxCreate(ctypes.byref(context), description, device, 1), "context")
    _check(library.cuGreenCtxStreamCreate(ctypes.byref(stream), context, 1, 0), "stream")
    assert stream.value is not None
    return stream.value


class Launch:
    """A dispatch with memory for its buffers, ready to be enqueued many times."""

    def __init__(
        self, programs: "Programs", dispatch: Dispatch, limit: int, pointers: Mapping[str, int]
    ) -> None:
        self.kernel = programs.kernel(dispatch.program, limit)
        self.group_size = dispatch.group_size
        self.size = (*dispatch.threadgroups, *dispatch.group_size)
        addresses = {slot: pointers[name] + at for slot, (name, at) in dispatch.buffers.items()}
        for slot, digits in dispatch.constants.items():
            addresses[slot] = programs.constant(digits)
        slots = programs.manifest.programs[dispatch.program].slots
        # A buffer that the kernel declares and the op leaves out is never read.
        values = [ctypes.c_uint64(addresses.get(slot, programs.absent)) for slot in slots]
        self._arguments = (ctypes.c_void_p * max(len(values), 1))(
            *(ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values)
        )
        self._values = values  # what the arguments point to

    def enqueue(self, stream: int | None = None) -> None:
        """On a stream, or on the default one."""
        of_stream = ctypes.c_void_p(stream)
        status = cuda().cuLaunchKernel(self.kernel, *self.size, 0, of_stream, self._arguments, None)
        _check(status, "launch")


class Programs:
    """The assembled programs of a folder, loaded when they are first used."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self.absent = upload(bytes(_ABSENT_BYTES))
        self._kernels: dict[tuple[str, int], ctypes.c_void_p] = {}
        self._constants: dict[str, int] = {}

    def constant(self, digits: str) -> int:
        """Memory with these bytes, which stays."""
        if digits not in self._constants:
            self._constants[digits] = upload(bytes.fromhex(digits))
        return self._constants[digits]

    def kernel(self, name: str, limit: int) -> ctypes.c_void_p:
        """The program's kernel, assembled for at most `limit` registers."""
        if (name, limit) not in self._kernels:
            image = assembled(self.folder, name, limit).read_bytes()
            library, kernel = ctypes.c_void_p(), ctypes.c_void_p()
            nothing = (None, None, 0, None, None, 0)
            status = cuda().cuLibraryLoadData(ctypes.byref(library), image, *nothing)
            _check(status, f"loading {name}")
            entry = self.manifest.programs[name].entry.encode()
            _check(cuda().cuLibraryGetKernel(ctypes.byref(kernel), library, entry), name)
            self._kernels[name, limit] = kernel
        return self._kernels[name, limit]


def assembled(folder: Path, name: str, limit: int) -> Path:
    """Where `assemble` puts a program for a number of registers."""
    return folder / f"{name}@{limit}.cubin"
