"""Tensor tiles in attention: Metal 4's tensor operations, on the matrix units of M5.

csrc/ops/attention/tensor_tiles.cpp decides whether they are used, by a probe and by a small problem
that is computed with both kinds of tile. This module passes the C++ code data that only Python has.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torch_metal_attn.runtime import extension, macos, mps, shaders
from torch_metal_attn.simulator import cache
from torch_metal_attn.wording import value_text

SETTING = "TORCH_METAL_ATTN_TENSOR_TILES"
FAMILIES = ("flash_fwd_tensor", "flash_bwd_dq_tensor", "flash_bwd_dkv_tensor")
OLDEST_MACOS = (26, 2)


def configure(library: ctypes.CDLL, version: str) -> None:
    """Tell the extension if macOS is recent enough, and which file records a passed trial."""
    recent = macos.at_least(*OLDEST_MACOS)
    library.metal_attn_set_tensor_record(recent, _record(version).encode() if recent else b"")


def problem(backward: bool = False, float32: bool = False) -> str:
    """Why attention uses 8x8 tiles here, or "". The first call on an M5 runs the trial."""
    library = extension.load()
    library.metal_attn_tensor_tiles_problem.restype = ctypes.c_char_p
    reason: bytes = library.metal_attn_tensor_tiles_problem(mps.usable(), backward, float32)
    return reason.decode()


def description() -> str:
    if forward := problem():
        # float32 calls refuse an invalid TF32 setting, whichever tiles are used.
        refused = f"; float32: {_tf32_reason()}" if _tf32_setting() < 0 else ""
        return f"not used: {forward}{refused}"
    return f"{_used()}; {_used(float32=True)}"


def _used(float32: bool = False) -> str:
    dtypes = "float32" if float32 else "float16 and bfloat16"
    if forward := problem(float32=float32):
        return f"not in {dtypes}: {forward}"
    backward = problem(backward=True, float32=float32)
    why = f" ({_tf32_reason()})" if float32 else ""
    return f"used in {dtypes}{why}" + (f", but not in the backward: {backward}" * bool(backward))


def tf32_allowed() -> bool:
    """True if float32 products may round their operands to 11 bits where that is faster.

    Raises ValueError for a TORCH_METAL_ATTN_TF32 that is neither off nor on.
    """
    if _tf32_setting() < 0:
        raise ValueError(_tf32_reason())
    return _tf32_setting() > 0


class allow_tf32:
    """Allow or forbid TF32 in float32 attention, from now on and in all threads.

    With TF32, attention and its gradients in float32 use tensor tiles on M5 and later, which round
    q, k, v and the weights to 11 significant bits. Results then have about float16's errors, with
    float32's range. Other GPUs ignore TF32. This overrides TORCH_METAL_ATTN_TF32 (off by default).

    As a context manager it restores the previous setting when the block ends, so a later backward
    does not use TF32. The setting applies to all threads, as autograd has threads of its own.

    Args: allowed: True if TF32 may be used.

    Example:
        with torch_metal_attn.allow_tf32():
            out = torch_metal_attn.flash_attn_func(q, k, v)
    """

    def __init__(self, allowed: bool = True) -> None:
        if not isinstance(allowed, bool):
            raise TypeError(f"allowed is {value_text(allowed)}; it must be a bool")
        self._before: int = extension.load().metal_attn_allow_tf32(int(allowed))

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        extension.load().metal_attn_allow_tf32(self._before)


def _tf32_setting() -> int:
    """1 if TF32 is allowed, 0 if not, -1 if TORCH_METAL_ATTN_TF32 is neither "off" nor "on"."""
    return extension.load().metal_attn_tf32_allowed()


def _tf32_reason() -> str:
    library = extension.load()
    library.metal_attn_tf32_reason.restype = ctypes.c_char_p
    reason: bytes = library.metal_attn_tf32_reason()
    return reason.decode()


@contextmanager
def off() -> Iterator[None]:
    """A context in which all calls use 8x8 tiles."""
    before = os.environ.get(SETTING)
    os.environ[SETTING] = "off"
    try:
        yield
    finally:
        del os.environ[SETTING]
        if before is not None:
            os.environ[SETTING] = before


@contextmanager
def on_m5() -> Iterator[None]:
    """A context for CPU tensors in which the extension assumes an M5 and allows TF32."""
    library = extension.load()
    library.metal_attn_set_gpu_name(b"Apple M5")
    try:
        with allow_tf32():
            yield
    finally:
        library.metal_attn_set_gpu_name(b"")


def _record(version: str) -> str:
    """The file that records a passed trial of these kernels here; "" without a cache folder."""
    gpu = torch.backends.mps.get_name() if hasattr(torch.backends.mps, "get_name") else ""
    parts = [gpu, macos.version(), torch.__version__, version]
    parts += map(shaders.source, FAMILIES)
    try:
        return os.fspath(cache.cache_dir() / "tensor_tiles" / cache.digest(parts))
    except cache.CacheError:
        return ""
