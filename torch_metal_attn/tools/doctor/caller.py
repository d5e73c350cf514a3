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

_LIBRARIES = (
    os.path.dirname(torch.__file__) + os.sep,
    str(Path(__file__).parents[2]) + os.sep,
)
_PRODUCTS = {"bmm", "baddbmm", "matmul", "einsum"}
_PACKAGE = re.compile(r".*[\\/](site|dist)-packages[\\/]")


def frames() -> Iterator[FrameType]:
    """The frames of torch's library that are running now, and the first one outside of it."""
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
    """A file's path within its package, or from the current folder if it is inside that."""
    inside = _PACKAGE.sub("", file)
    if inside != file:
        return inside
    here = os.getcwd() + os.sep
    return file.removeprefix(here)


def multiplying() -> str | None:
    """The function that multiplies matrices and asked for a softmax; None if it does not."""
    for frame in frames():
        if _multiplies(frame.f_code):
            return frame.f_code.co_name
    return None


@functools.cache
def _multiplies(code: CodeType) -> bool:
    return not _PRODUCTS.isdisjoint(code.co_names) or any(
        instruction.opname == "BINARY_MATRIX_MULTIPLY" or instruction.argrepr == "@"
        for instruction in dis.get_instructions(code)
    )
