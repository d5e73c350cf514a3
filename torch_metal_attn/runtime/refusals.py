"""An op's refusal of a call is a ValueError, with every version of torch.

C++ throws std::invalid_argument. Up to version 2.14, torch raises it as ValueError; from 2.15 on as
RuntimeError, like any error of a C++ op. Python kernels, and Python functions that call ops,
convert that to ValueError. Only if user code calls an op on mps in inference mode, nobody converts.

Messages mark the names, shapes and layouts of arguments with backquotes, which users do not see.
Functions whose arguments are named differently replace the marked parts (ops/names.py).
"""

import ctypes
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch

from torch_metal_attn.runtime import extension

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Last(threading.local):
    """This thread's last message from Python, without and with backquotes."""

    text = marked = ""


_last = _Last()


def unmarked(marked: str) -> str:
    """A message without its backquotes, for an error that the caller raises immediately."""
    _last.text, _last.marked = marked.replace("`", ""), marked
    return _last.text


def invalid(marked: str) -> ValueError:
    return ValueError(unmarked(marked))


def not_implemented(marked: str) -> NotImplementedError:
    return NotImplementedError(unmarked(marked))


def marked(text: str) -> str:
    """`text` with its backquotes if it is this thread's last refusal; else `text`."""
    if text == _last.text:
        return _last.marked
    result = _refusal()(text.encode())
    return text if result is None else result.decode()


@functools.cache
def _refusal() -> Callable[[bytes], bytes | None]:
    function: Callable[[bytes], bytes | None] = extension.load().metal_attn_refusal
    function.restype = ctypes.c_char_p  # type: ignore[attr-defined]
    return function


def as_value_error(error: RuntimeError) -> Exception:
    """The ValueError for a refusal of an op; `error` itself for another error."""
    text = str(error)
    if type(error) is RuntimeError and _refusal()(text.encode()) is not None:
        return ValueError(text)
    return error


@contextmanager
def as_value_errors() -> Iterator[None]:
    """A context for calls of ops, in which refusals are ValueErrors."""
    try:
        yield
    except RuntimeError as error:
        raise as_value_error(error) from None


def python_kernel(name: str, key: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make a Python function the kernel of op `name`, "namespace::op", for a dispatch key."""

    def register(function: Callable[_P, _R]) -> Callable[_P, _R]:
        body = as_value_errors()(function) if _torch_hides_value_errors() else function
        torch.library.impl(name, key)(untraced(body) if key == "CPU" else body)
        return function

    return register


def untraced(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A function that breaks torch.compile's graph, without an import of torch._dynamo."""
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


@functools.cache
def _torch_hides_value_errors() -> bool:
    """True if this torch raises C++'s refusals as RuntimeErrors; found by a refused call."""
    extension.load()
    try:
        torch.ops.metal_attn_explain.softmax(torch.empty(0), 1)
    except ValueError:
        return False
    except RuntimeError:
        return True
    raise AssertionError("dim 1 of a vector was not refused")
