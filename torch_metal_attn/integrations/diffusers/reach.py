"""Finds out whether a model has any attention that the backend "metal_attn" can run.

It inspects the code of the modules' and processors' classes, and does not run the model.
"""

import functools
import inspect
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from torch_metal_attn.integrations import diffusers_functional

_DISPATCHER = "dispatch_attention_fn"


def has_attention(model: nn.Module) -> bool:
    """True if a module calls diffusers' dispatcher, or our replacement of torch's function."""
    kinds: set[type] = set()
    for module in model.modules():
        kinds |= {type(module), type(getattr(module, "processor", None))}
    return any(map(_class_calls_attention, kinds))


@functools.cache
def _class_calls_attention(kind: type) -> bool:
    seen: set[FunctionType] = set()
    return any(
        _calls_attention(value, seen) for base in kind.__mro__ for value in vars(base).values()
    )


def _calls_attention(value: Any, seen: set[FunctionType]) -> bool:
    """True for a function that calls attention, directly or through functions that it names."""
    function = inspect.unwrap(value) if isinstance(value, FunctionType) else None
    if not isinstance(function, FunctionType) or function in seen:
        return False
    seen.add(function)
    names = set(_names(function.__code__))
    known = function.__globals__
    if _DISPATCHER in names or diffusers_functional.calls_replacement(names, known):
        return True
    return any(_calls_attention(known[name], seen) for name in names & known.keys())


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
