"""The caller of an attention, and the functions that multiply matrices."""

import dis
import functools
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

import torch

_LIBRARIES = (os.path.dirname(torch.__file__) + os.sep, str(Path(__file__).parents[2]) + os.sep)
_PRODUCTS = {"bmm", "baddbmm", "matmul", "einsum"}
_PACKAGE = re.compile(r".*[\\/](site|dist)-packages[\\/]")


def frames() -> Iterator[FrameType]:
    """Yields the running frames of torch, innermost first, then the first frame of user code."""
    frame = inspect.currentframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_LIBRARIES):
            yield frame
            return
        if file.startswith(_LIBRARIES[0]):
            yield frame
        frame = frame.f_back


def place() -> str:
    """File and line of the first frame that is neither torch's nor this package's."""
    *_, frame = frames()
    return f"{shortened(frame.f_code.co_filename)}:{frame.f_lineno}"


def shortened(file: str) -> str:
    """The path inside site-packages, or relative to the current folder, or unchanged."""
    inside = _PACKAGE.sub("", file)
    return file.removeprefix(os.getcwd() + os.sep) if inside == file else inside


def multiplying() -> str | None:
    """The name of the innermost running function that multiplies matrices, or None."""
    codes = (frame.f_code for frame in frames())
    return next((code.co_name for code in codes if _multiplies(code)), None)


@functools.cache
def _multiplies(code: CodeType) -> bool:
    return not _PRODUCTS.isdisjoint(code.co_names) or any(
        instruction.opname == "BINARY_MATRIX_MULTIPLY" or instruction.argrepr == "@"
        for instruction in dis.get_instructions(code)
    )
