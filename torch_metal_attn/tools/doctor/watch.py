"""Sees every attention of a process, without changing it.

It replaces torch's `scaled_dot_product_attention`, our ops, the fused layers of torch.nn, and
softmaxes by functions that call them and note the call, in all threads. `torch.compile` compiles
nothing meanwhile, because compiled code calls none of these functions.
"""

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import get_overridable_functions
from torch.utils._python_dispatch import _disable_current_modes

from torch_metal_attn.integrations import sdpa_replacement as replacement
from torch_metal_attn.integrations.imports import when_imported
from torch_metal_attn.tools.doctor import caller
from torch_metal_attn.tools.doctor.attention import Attention, by_hand, fused_layer, ours, torchs
from torch_metal_attn.tools.explain.ops import bound

_OPS = ("flash_fwd", "flash_varlen_fwd", "flash_decode", "decode_step", "flex_fwd")
_FUSED_LAYERS = ("_native_multi_head_attention", "_transformer_encoder_layer_fwd")
_PLAIN = (Tensor, torch.nn.Parameter)


class _Thread(threading.local):
    """noted: number of attentions that this thread noted. within: depth of calls of our ops."""

    noted = 0
    within = 0


class Watch:
    """The attentions since `__enter__`. undescribed: errors of ours, by their text."""

    def __init__(self) -> None:
        self.seen: Counter[Attention] = Counter()
        self.compiled = False
        self.undescribed: Counter[str] = Counter()
        self._known: dict[Any, Attention] = {}  # by `_signature` of a call
        self._lock = threading.Lock()
        self._thread = _Thread()
        self._open = False
        self._closing = ExitStack()

    def __enter__(self) -> "Watch":
        replacement.await_causal_bias()
        # If torch made this list while names are replaced, it would lack the functions themselves.
        get_overridable_functions()
        self._open = True
        self._replace(functional, "scaled_dot_product_attention", self._sdpa)
        for owner in (torch, Tensor):
            self._replace(owner, "softmax", self._softmax)
        for name in _FUSED_LAYERS:
            self._replace(torch, name, functools.partial(self._fused_layer, name))
        for kind in (torch._ops.OpOverload, torch._ops.OpOverloadPacket):
            self._replace(kind, "__call__", self._op)
        self._replace(torch, "compile", self._compile)
        when_imported("torch._dynamo", self._compile_nothing)
        return self

    def __exit__(self, *error: object) -> None:
        self._open = False
        self._closing.close()

    def _compile_nothing(self) -> None:
        if self._open:
            self._closing.enter_context(torch.compiler.set_stance("force_eager"))

    def _compile(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            self.compiled = self.compiled or self._open
            return original(*args, **kwargs)

        return noting

    def _replace(self, owner: Any, name: str, noting: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        defined_here = name in vars(owner)
        replaced = functools.wraps(original)(noting(original))
        # So torch.jit.script takes the replacement for the function that it replaces.
        if id(original) in _scripted():
            _scripted()[id(replaced)] = _scripted()[id(original)]
        setattr(owner, name, replaced)

        def undo() -> None:
            _scripted().pop(id(replaced), None)
            # Other code may have wrapped our function meanwhile: then it stays, and notes nothing.
            if vars(owner).get(name) is not replaced:
                return
            if defined_here:
                setattr(owner, name, original)
            else:
                delattr(owner, name)

        self._closing.callback(undo)

    def _note(
        self, what: str, values: tuple[Any, ...], attention: Callable[[str], Attention]
    ) -> None:
        """Count a call; `attention` describes the first of a signature. It must not raise."""
        self._thread.noted += 1
        try:
            place = caller.place()
            key = (what, place, *map(_signature, values))
            described = self._known.get(key)
            if described is None:
                with _disable_current_modes():  # a mode may count the ops of the description
                    described = attention(place)
        except Exception as error:
            with self._lock:
                self.undescribed[f"{type(error).__name__}: {error}"] += 1
            return
        with self._lock:
            self._known[key] = described
            self.seen[described] += 1

    def _sdpa(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def noting(*args: Any, **kwargs: Any) -> Tensor:
            noted = self._thread.noted
            out = original(*args, **kwargs)
            if self._open and noted == self._thread.noted and _real(out):
                arguments = replacement.given_by_name(args, kwargs)
                state = (
                    torch.is_grad_enabled(),
                    out.dtype,  # autocast's
                    replacement.open_here(),
                    replacement.open_elsewhere(),
                )
                values = (*arguments, *arguments.values(), *state)
                self._note("sdpa", values, lambda place: torchs(args, kwargs, place))
            return out

        return noting

    def _softmax(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def noting(*args: Any, **kwargs: Any) -> Tensor:
            weights = original(*args, **kwargs)
            if not self._open or not _real(weights) or weights.dim() < 3:
                return weights
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            if dim in (-1, weights.dim() - 1):
                function = caller.multiplying()
                if function is not None:
                    values = (weights, function)
                    self._note("softmax", values, lambda place: by_hand(weights, function, place))
            return weights

        return noting

    def _fused_layer(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            if self._open and _real(args[0]):
                self._note(name, args, lambda place: fused_layer(name, args, place))
            return out

        return noting

    def _op(self, original: Callable[..., Any]) -> Callable[..., Any]:
        packets = {name: getattr(torch.ops.metal_attn, name) for name in _OPS}
        names = {id(op): name for name, op in packets.items()}
        names |= {id(op.default): name for name, op in packets.items()}

        def noting(op: Any, /, *args: Any, **kwargs: Any) -> Any:
            name = names.get(id(op))
            if name is None or not self._open:
                return original(op, *args, **kwargs)
            with self._inside() as outermost:
                out = original(op, *args, **kwargs)
            arguments = bound(name, args, kwargs)
            if outermost and _real(arguments["q"]):
                values = (*arguments, *arguments.values())
                self._note(name, values, lambda place: ours(name, arguments, place))
            return out

        return noting

    @contextmanager
    def _inside(self) -> Iterator[bool]:
        self._thread.within += 1
        try:
            yield self._thread.within == 1
        finally:
            self._thread.within -= 1


def _real(tensor: object) -> bool:
    """True if an attention computes something, and is not traced."""
    return type(tensor) in _PLAIN and not torch.compiler.is_compiling()


def _signature(value: Any) -> Any:
    if isinstance(value, Tensor):
        strided = value.layout == torch.strided and not value.is_nested
        size = (tuple(value.shape), value.stride()) if strided else ()
        return (type(value), size, value.dtype, value.device.type, value.requires_grad)
    plain = isinstance(value, (int, float, str, torch.dtype, type(None)))
    return value if plain else type(value)


def _scripted() -> dict[int, str]:
    """torch.jit.script's names of operators, by the id of the function in Python."""
    table: dict[int, str] = sys.modules["torch.jit._builtins"]._get_builtin_table()
    return table
