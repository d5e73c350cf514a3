"""Whether attention uses tensor tiles: Metal 4's tensor operations, on the matrix units of M5.

csrc/ops/attention/tensor_tiles.cpp decides, by a probe and by a small problem that is computed with
both kinds of tile. This module tells it what only Python knows.
"""

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torch_metal_attn import extension, mps, shaders
from torch_metal_attn.simulator import cache

SETTING = "TORCH_METAL_ATTN_TENSOR_TILES"
FAMILIES = ("flash_fwd_tensor", "flash_bwd_dq_tensor", "flash_bwd_dkv_tensor")
OLDEST_MACOS = (26, 2)
# What macOS 26 tells programs that were built for older versions.
_COMPATIBLE_MAJOR = 16


def tell(library: ctypes.CDLL, version: str) -> None:
    """Tell `library`, the extension, whether macOS suffices and where a passed trial is noted.

    version: of this package.
    """
    path = _record(version).encode() if _macos_suffices() else b""
    library.metal_attn_set_tensor_record(_macos_suffices(), path)


def problem(backward: bool = False) -> str:
    """Why attention uses 8x8 tiles in half precision here, in one line; "" if it uses tensor tiles.

    On mps where it is usable, and else in the simulator. The first call on an M5 tries them.
    backward: of flash_bwd, and else of flash_fwd.
    """
    library = extension.load()
    library.metal_attn_tensor_tiles_problem.restype = ctypes.c_char_p
    reason: bytes = library.metal_attn_tensor_tiles_problem(mps.usable(), backward)
    return reason.decode()


def description() -> str:
    """One line for reports."""
    forward, backward = problem(), problem(backward=True)
    if forward:
        return f"not used: {forward}"
    used = "used in float16 and bfloat16"
    return f"{used}, but not in the backward: {backward}" if backward else used


@contextmanager
def off() -> Iterator[None]:
    """A block in which 8x8 tiles are used everywhere."""
    before = os.environ.get(SETTING)
    os.environ[SETTING] = "off"
    try:
        yield
    finally:
        del os.environ[SETTING]
        if before is not None:
            os.environ[SETTING] = before


def _macos_suffices() -> bool:
    numbers = [int(number) for number in platform.mac_ver()[0].split(".")[:2] if number.isdigit()]
    if numbers and numbers[0] == _COMPATIBLE_MAJOR:
        numbers[0] = OLDEST_MACOS[0]
    return tuple(numbers) >= OLDEST_MACOS and torch.backends.mps.is_macos_or_newer(*OLDEST_MACOS)


def _record(version: str) -> str:
    """The file that says that both kinds of tile agreed on this machine; "" if there is no place.

    The text of the kernels counts too: in a source checkout it changes without the version.
    """
    gpu = torch.backends.mps.get_name() if hasattr(torch.backends.mps, "get_name") else ""
    parts = [gpu, platform.mac_ver()[0], torch.__version__, version]
    parts += map(shaders.source, FAMILIES)
    try:
        return os.fspath(cache.cache_dir() / "tensor_tiles" / cache.digest(parts))
    except cache.CacheError:
        return ""
