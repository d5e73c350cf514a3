"""The compiled extension: torch's operators and the simulator's engine in one shared library.

It is not a Python module and uses nothing of Python's C API. So building it needs no Python
headers, and one file works with every version of Python.
"""

import ctypes
import json
from array import array
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

PATH = Path(__file__).parent / "_C.abi3.so"
OLDEST_TORCH = (2, 10)


def _require_torch() -> None:
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
        needed = ".".join(map(str, OLDEST_TORCH))
        raise ImportError(
            f"torch_metal_attn needs torch {needed} or later, and this is {torch.__version__}: "
            f"pip install -U 'torch>={needed}'"
        )


# The package imports this module first: the others may use what an older torch has not.
_require_torch()


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL:
    """Register the operators, once per process, and return the library's C functions.

    Raises ImportError if the extension has not been built or cannot be loaded.
    """
    if not PATH.is_file():
        raise ImportError(
            f"torch_metal_attn is not built: no {PATH.name} in {PATH.parent}; "
            "`pip install .` in its source tree makes it"
        )
    try:
        torch.ops.load_library(PATH)
    except OSError as error:
        raise ImportError(
            f"{PATH} cannot be loaded with torch {torch.__version__} on this machine; "
            "`pip install --force-reinstall --no-deps torch_metal_attn`, or `pip install .` in its "
            f"source tree, brings one that can: {error}"
        ) from error
    return ctypes.CDLL(str(PATH))


def tell_gpu(library: ctypes.CDLL) -> None:
    """Tell `library`, the extension, which GPU there is, as far as torch knows.

    flash_decode splits its keys by the number of cores. A virtual GPU is recognised by its name.
    """
    if hasattr(torch.backends.mps, "get_name"):
        library.metal_attn_set_gpu_name(torch.backends.mps.get_name().encode())
    if hasattr(torch.backends.mps, "get_core_count"):
        library.metal_attn_set_gpu_cores(torch.backends.mps.get_core_count())


def told(packed: list[int]) -> dict[str, Any]:
    """What an `_explain` or `_plan` op returned, JSON in ints: csrc/ops/common/json.h packs it."""
    found: dict[str, Any] = json.loads(array("q", packed).tobytes())
    return found
