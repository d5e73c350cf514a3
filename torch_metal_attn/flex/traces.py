"""A dictionary key of everything that a function's result can depend on, to reuse a trace.

A function that depends on anything else, such as attributes of an object, has no key and is traced
on each call.
"""

import builtins
import dis
import functools
import math
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.flex.captured import same_memory
from torch_metal_attn.masks import Mask

_CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device)
_SEQUENCES = (tuple, list, torch.Size)
# Modules whose functions depend only on their arguments, except those for which `_changes` is true.
_MODULES = (torch, math, torch.nn.functional)
# Builtins whose result depends only on their arguments.
_PURE = frozenset(
    "abs all any bool divmod enumerate float int isinstance len list map max min pow range "
    "reversed round sorted sum tuple zip".split()
)
_MAX_PARTS = 200  # of a key; a function with more has no key


class Unknown(Exception):
    """A function's result may depend on something that is not in the key."""


class Parts:
    """tensors: all that the functions can reach. key: everything else that they depend on."""

    def __init__(self, *functions: Callable[..., Any] | None) -> None:
        self.tensors: list[Tensor] = []
        self._seen: dict[int, int] = {}
        self._parts_left = _MAX_PARTS
        modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
        if modes > 0:
            raise Unknown
        state = torch.get_default_dtype(), torch.is_grad_enabled()
        self.key = (*state, *(self._part(x) for x in functions))

    def _part(self, value: Any) -> Hashable:
        self._parts_left -= 1
        if self._parts_left < 0:
            raise Unknown
        if isinstance(value, Tensor):
            return self._tensor(value)
        # Exact types, as objects of derived types may have attributes.
        if type(value) in _CONSTANTS:
            # repr distinguishes 1 from True and 0.0 from -0.0, and is equal for NaNs.
            return type(value), repr(value)
        if id(value) in self._seen:
            return "again", self._seen[id(value)]
        self._seen[id(value)] = len(self._seen)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if type(value) in _SEQUENCES:
            return type(value), tuple(map(self._part, value))
        if isinstance(value, types.MethodType):
            return "method", self._part(value.__func__), self._part(value.__self__)
        if type(value) is functools.partial and not value.__dict__:
            keywords = (tuple(value.keywords), *map(self._part, value.keywords.values()))
            return "partial", self._part(value.func), self._part(value.args), keywords
        if type(value) is Mask and len(value.__dict__) == 1:
            return "mask", self._part(value.mask_mod)
        name = getattr(value, "__name__", "")
        known = any(value is x or getattr(x, name, None) is value for x in _MODULES)
        if known and not _changes(name):
            return "constant", value
        raise Unknown

    def _function(self, function: types.FunctionType) -> Hashable:
        try:
            cells = [cell.cell_contents for cell in function.__closure__ or ()]
        except ValueError:  # an empty cell
            raise Unknown from None
        by_name = sorted((function.__kwdefaults__ or {}).items())
        if function.__dict__:
            raise Unknown
        return (
            "function",
            function.__code__,
            tuple(map(self._part, cells)),
            tuple(map(self._part, function.__defaults__ or ())),
            tuple((name, self._part(value)) for name, value in by_name),
            *self._globals(function),
        )

    def _globals(self, function: types.FunctionType) -> Iterator[Hashable]:
        for name in sorted(_names(function.__code__)):
            if _changes(name):
                raise Unknown
            if name in function.__globals__:
                yield name, self._part(function.__globals__[name])
            elif hasattr(builtins, name) and name not in _PURE:
                raise Unknown

    def _tensor(self, tensor: Tensor) -> Hashable:
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.__dict__:
            raise Unknown
        for i, known in enumerate(self.tensors):
            if known is tensor:
                return "tensor", i
        aliases = [i for i, known in enumerate(self.tensors) if same_memory(known, tensor)]
        self.tensors.append(tensor)
        return (
            *("tensor", tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device),
            *(tensor.requires_grad, tuple(aliases)),
        )


@functools.cache
def _changes(name: str) -> bool:
    """True if this name is a function or module of torch that may depend on torch's settings."""
    value = getattr(torch, name, None)
    if isinstance(value, types.ModuleType):
        return value not in (*_MODULES, torch.nn, torch.functional)
    is_function = callable(value) and not isinstance(value, type)
    overridable = torch.overrides.get_overridable_functions()[torch]
    return name not in _PURE and is_function and value not in overridable


@functools.cache
def _names(code: types.CodeType) -> frozenset[str]:
    """Every name that `code`, or a function inside it, may look up."""
    if any(instruction.opname == "IMPORT_NAME" for instruction in dis.get_instructions(code)):
        raise Unknown
    inner = [x for x in code.co_consts if isinstance(x, types.CodeType)]
    return frozenset(code.co_names).union(*map(_names, inner))
