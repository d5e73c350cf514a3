"""Records every attention of a process without changing its results.

Wrappers record the calls of torch's `scaled_dot_product_attention`, our ops, torch.nn's fused
layers and softmaxes, in all threads. Meanwhile `torch.compile` compiles nothing, because compiled
code would not call the wrappers.
"""

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
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
    """noted: number of attentions that this thread recorded. depth: of nested calls of our ops."""

    noted = 0
    depth = 0


class Watch:
    """Counts the attentions inside the block. undescribed: this package's errors, by their text."""

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
        # torch caches this list of functions. Fill the cache before the wrappers could get into it.
        get_overridable_functions()
        packets = {name: getattr(torch.ops.metal_attn, name) for name in _OPS}
        names = {
            id(op): name for name, packet in packets.items() for op in (packet, packet.default)
        }
        self._open = True
        self._replace(functional, "scaled_dot_product_attention", self._sdpa)
        for owner in (torch, Tensor):
            self._replace(owner, "softmax", self._softmax)
        for name in _FUSED_LAYERS:
            self._replace(torch, name, functools.partial(self._fused_layer, name))
        for kind in (torch._ops.OpOverload, torch._ops.OpOverloadPacket):
            self._replace(kind, "__call__", functools.partial(self._op, names))
        self._replace(torch, "compile", self._compile)
        when_imported("torch._dynamo", self._compile_nothing)
        return self

    def __exit__(self, *error: object) -> None:
        self._open = False
        self._closing.close()

    def _compile_nothing(self) -> None:
        if self._open:
            self._closing.enter_context(torch.compiler.set_stance("force_eager"))

    def _replace(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Wrap an attribute: wrapper(original, *args, **kwargs) runs each call until `__exit__`."""
        original = getattr(owner, name)
        defined_here = name in vars(owner)
        # torch.jit.script's names of operators, by the id of the Python function.
        scripted: dict[int, str] = sys.modules["torch.jit._builtins"]._get_builtin_table()

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            call = functools.partial(wrapper, original) if self._open else original
            return call(*args, **kwargs)

        if id(original) in scripted:
            scripted[id(replaced)] = scripted[id(original)]
        setattr(owner, name, replaced)

        def undo() -> None:
            scripted.pop(id(replaced), None)
            # If other code has wrapped our function meanwhile, leave it: it records nothing now.
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
        """Count a call. `attention` describes the first call of a signature. Never raises."""
        self._thread.noted += 1
        try:
            place = caller.place()
            key = (what, place, *map(_signature, values))
            described = self._known.get(key)
            if described is None:
                with _disable_current_modes():  # a mode might count the ops that `attention` runs
                    described = attention(place)
        except Exception as error:
            with self._lock:
                self.undescribed[f"{type(error).__name__}: {error}"] += 1
            return
        with self._lock:
            self._known[key] = described
            self.seen[described] += 1

    def _compile(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.compiled = True
        return original(*args, **kwargs)

    def _sdpa(self, original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        noted = self._thread.noted
        out = original(*args, **kwargs)
        if noted == self._thread.noted and _computes(out):
            arguments = replacement.arguments_by_name(args, kwargs)
            blocks = (replacement.open_here(), replacement.open_elsewhere())
            # Autocast decides the dtype of out.
            values = (*arguments, *arguments.values(), torch.is_grad_enabled(), out.dtype, *blocks)
            self._note("sdpa", values, lambda place: torchs(args, kwargs, place))
        return out

    def _softmax(self, original: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        weights = original(*args, **kwargs)
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if _computes(weights) and weights.dim() >= 3 and dim in (-1, weights.dim() - 1):
            function = caller.multiplying()
            if function is not None:
                values = (weights, function)
                self._note("softmax", values, lambda place: by_hand(weights, function, place))
        return weights

    def _fused_layer(
        self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        out = original(*args, **kwargs)
        if _computes(args[0]):
            self._note(name, args, lambda place: fused_layer(name, args, place))
        return out

    def _op(
        self, names: dict[int, str], original: Any, op: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        name = names.get(id(op))
        if name is None:
            return original(op, *args, **kwargs)
        self._thread.depth += 1
        try:
            out = original(op, *args, **kwargs)
        finally:
            self._thread.depth -= 1
        arguments = bound(name, args, kwargs)
        if self._thread.depth == 0 and _computes(arguments["q"]):
            values = (*arguments, *arguments.values())
            self._note(name, values, lambda place: ours(name, arguments, place))
        return out


def _computes(tensor: object) -> bool:
    """False for fake tensors and subclasses, and while a call is traced."""
    return type(tensor) in _PLAIN and not torch.compiler.is_compiling()


def _signature(value: Any) -> Any:
    if isinstance(value, Tensor):
        strided = value.layout == torch.strided and not value.is_nested
        size = (tuple(value.shape), value.stride()) if strided else ()
        return (type(value), size, value.dtype, value.device.type, value.requires_grad)
    plain = isinstance(value, (int, float, str, torch.dtype, type(None)))
    return value if plain else type(value)
