"""What an op refuses is a ValueError, with every version of torch.

C++ throws std::invalid_argument. Up to 2.14 torch raises this as ValueError, and from 2.15 as
RuntimeError, like any error of a C++ op. So it is converted back wherever Python is involved: in
kernels that are Python, and in functions that call ops. An op that is called directly on mps in
inference mode passes no code of ours, and is not converted.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch

from torch_metal_attn.runtime import extension

_P = ParamSpec("_P")
_R = TypeVar("_R")


def told(error: RuntimeError) -> Exception:
    """`error` itself, or the ValueError that it stands for."""
    text = str(error)
    if type(error) is RuntimeError and extension.load().metal_attn_refused(text.encode()):
        return ValueError(text)
    return error


@contextmanager
def as_value_errors() -> Iterator[None]:
    """A context for calls of ops whose errors the caller handles."""
    try:
        yield
    except RuntimeError as error:
        raise told(error) from None


def python_kernel(name: str, key: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make a Python function the kernel of op `name`, "namespace::op", for a dispatch key."""

    def register(function: Callable[_P, _R]) -> Callable[_P, _R]:
        body = _telling(function) if _renames() else function
        torch.library.impl(name, key)(untraced(body) if key == "CPU" else body)
        return function

    return register


def untraced(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function that torch.compile does not trace into; in compiled code it breaks the graph.

    torch.library.register_kernel has this too, and imports torch._dynamo for it, which takes
    seconds. Nothing traces while nothing has imported that.
    """
    disabled: Callable[_P, _R] | None = None

    @functools.wraps(function)
    def body(*arguments: _P.args, **options: _P.kwargs) -> _R:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:
            return function(*arguments, **options)
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*arguments, **options)

    return body


def _telling(function: Callable[_P, _R]) -> Callable[_P, _R]:
    @functools.wraps(function)
    def body(*arguments: _P.args, **options: _P.kwargs) -> _R:
        try:
            return function(*arguments, **options)
        except RuntimeError as error:
            raise told(error) from None

    return body


@functools.cache
def _renames() -> bool:
    """Whether this torch raises C++ errors as another type, found out by trying."""
    extension.load()
    try:
        torch.ops.metal_attn_explain.softmax(torch.empty(0), 1)
    except ValueError:
        return False
    except RuntimeError:
        return True
    raise AssertionError("dim 1 of a vector was not refused")
