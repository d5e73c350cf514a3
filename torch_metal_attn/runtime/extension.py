"""The compiled extension: torch's operators and the simulator's engine in one shared library.

It is not a Python module and does not use Python's C API, so one file works with every version of
Python, and building it needs no Python headers.
"""

import ctypes
import json
import re
import shlex
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NoReturn

PATH = Path(__file__).parents[1] / "_C.abi3.so"
OLDEST_TORCH = (2, 10)
CANNOT_RUN = 2  # the exit status of our commands

_INSTALL_TORCH = f"pip install -U 'torch>={'.'.join(map(str, OLDEST_TORCH))}'"


def _refuse(message: str) -> NoReturn:
    """Raise ImportError, or end one of the package's commands with a line on stderr."""
    # `python -m` imports the package while argv[0] is still "-m".
    if sys.argv[:1] == ["-m"] and any(
        word.removeprefix("-m").partition(".")[0] == "torch_metal_attn" for word in sys.orig_argv
    ):
        print(f"error: {message}", file=sys.stderr)
        raise SystemExit(CANNOT_RUN)
    raise ImportError(message)


def _build(root: Path) -> str:
    return f"pip install --no-build-isolation -e {shlex.quote(str(root))}"


def _require_built() -> None:
    if PATH.is_file():
        return
    package, root = PATH.parent, PATH.parent.parent
    if not (root / "setup.py").is_file():
        _refuse(f"{package} has no {PATH.name}, so it is not complete: install the package again")
    build = _build(root)
    elsewhere = [folder for folder in sys.path if Path(folder).resolve() != root.resolve()]
    spec = PathFinder.find_spec("torch_metal_attn", elsewhere)
    if spec is None or spec.origin is None:
        _refuse(
            f"{package} is source code that is not built: run "
            f"`pip install 'torch>=2.10' 'setuptools>=77' ninja` and `{build}`"
        )
    _refuse(
        f"Python found {package}, source code that is not built, before the installed package in "
        f"{Path(spec.origin).parent}: start Python in another folder than {root}, or run `{build}`"
    )


def _require_torch() -> None:
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
        needed = ".".join(map(str, OLDEST_TORCH))
        _refuse(
            f"torch_metal_attn needs torch {needed} or later, and this is {torch.__version__}: "
            f"{_INSTALL_TORCH}"
        )


# The package imports this module first, as its other modules need a recent torch.
_require_built()
try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    _refuse(f"torch_metal_attn needs torch, which {sys.executable} does not have: {_INSTALL_TORCH}")
_require_torch()


@lru_cache(maxsize=1)
def load() -> ctypes.CDLL:
    """Register the operators, once, and return the library's C functions, or raise ImportError."""
    try:
        torch.ops.load_library(PATH)
    except OSError as error:
        _refuse(
            f"{PATH} cannot be loaded with torch {torch.__version__} on this machine; "
            "`pip install --force-reinstall --no-deps torch_metal_attn`, or `pip install .` in its "
            f"source tree, brings one that can: {error}"
        )
    library = ctypes.CDLL(str(PATH))
    _require_same_params(library)
    return library


def _require_same_params(library: ctypes.CDLL) -> None:
    """Raise ImportError if the headers in shaders/params have changed since the build."""
    root = PATH.parent.parent
    params = root / "shaders" / "params"
    if not params.is_dir():
        return
    now = b"".join(header.read_bytes() for header in sorted(params.glob("*.h")))
    try:
        text = ctypes.c_char.in_dll(library, "metal_attn_params_text")
    except ValueError:  # the build is older than this check
        built = b""
    else:
        built = ctypes.string_at(ctypes.addressof(text))
    if _without_comments(built) != _without_comments(now):
        _refuse(
            f"{PATH.name} was built with another version of {params}: build it again with "
            f"`{_build(root)}`"
        )


def refuse_older_build(error: AttributeError | RuntimeError) -> NoReturn:
    """Raise ImportError if `error` is about a missing op, as after `git pull`, else `error`."""
    root = PATH.parent.parent
    if "metal_attn" not in str(error) or not (root / "setup.py").is_file():
        raise error
    _refuse(
        f"{PATH} was built from other source code than that in {root}: build it again with "
        f"`{_build(root)}` ({error})"
    )


def _without_comments(text: bytes) -> list[bytes]:
    return re.sub(rb"//.*", b"", text).split()


def tell_gpu(library: ctypes.CDLL) -> None:
    """Pass the GPU's core count and name to the extension. The name shows if the GPU is virtual."""
    if hasattr(torch.backends.mps, "get_name"):
        library.metal_attn_set_gpu_name(torch.backends.mps.get_name().encode())
    if hasattr(torch.backends.mps, "get_core_count"):
        library.metal_attn_set_gpu_cores(torch.backends.mps.get_core_count())


@contextmanager
def meta_passes() -> Iterator[None]:
    """A context in which the ops of `metal_attn_explain` accept meta tensors for any device."""
    load().metal_attn_let_meta_pass(1)
    try:
        yield
    finally:
        load().metal_attn_let_meta_pass(0)


def launches(packed: list[int]) -> list[dict[str, Any]]:
    """The launches that an op of `metal_attn_explain` returned: JSON in ints (recorder.h)."""
    return json.loads(array("q", packed).tobytes())
