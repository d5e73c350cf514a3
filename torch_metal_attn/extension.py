"""The compiled extension: torch's operators and the simulator's engine in one shared library.

It is no Python module: it uses nothing of Python's C API, so building it needs no Python headers
and one file serves every Python.
"""

import ctypes
from functools import lru_cache
from pathlib import Path

import torch

PATH = Path(__file__).parent / "_C.abi3.so"


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL:
    """Register the operators, once a process, and return the library's C functions.

    Raises ImportError if it has not been built.
    """
    if not PATH.is_file():
        raise ImportError(
            f"torch_metal_attn is not built: no {PATH.name} in {PATH.parent}; "
            "`pip install .` in its source tree makes it"
        )
    torch.ops.load_library(PATH)
    return ctypes.CDLL(str(PATH))


def tell_gpu_cores() -> None:
    """Tell the extension how many cores the GPU has: flash_decode splits its keys by that.

    A torch that cannot say leaves it with the number of a small GPU.
    """
    if torch.backends.mps.is_available() and hasattr(torch.backends.mps, "get_core_count"):
        load().metal_attn_set_gpu_cores(torch.backends.mps.get_core_count())
