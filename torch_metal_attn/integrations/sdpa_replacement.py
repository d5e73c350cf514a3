"""`sdpa_replaced()`: runs torch's own `scaled_dot_product_attention` on our kernels in a block.

It needs four parts, because each one misses some calls:

- A TorchFunctionMode sees the C function, under every name it was imported as. But a mode is off
  while it handles a Python function of torch, so it misses the calls inside
  `multi_head_attention_forward`. And a mode applies to one thread.
- Therefore the attribute of `torch.nn.functional` is also replaced while any thread is inside a
  block. In other threads the replacement calls the original.
- With `process_wide`, the C function is replaced under the names that other modules have for it,
  and there is no mode.
- `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` have a fused inference path that calls no
  attention function. It is off in the threads of a block, except for nested tensors, which these
  layers support in that path only.
"""

import functools
import inspect
import os
import re
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.jit import _builtins
from torch.nn import functional
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _pop_mode_temporarily,
    get_overridable_functions,
)

from torch_metal_attn.call.arguments import as_bool, is_dtensor
from torch_metal_attn.integrations.imports import when_imported
from torch_metal_attn.runtime import session
from torch_metal_attn.sdpa import Arguments, Problem, is_causal_bias, plan
from torch_metal_attn.simulator.renaming import Renaming
from torch_metal_attn.tuned import loading
from torch_metal_attn.tuned.advice import faster_in_torch
from torch_metal_attn.wording import value_text

_Function = TypeVar("_Function", bound=Callable[..., Any])

_TORCH_SDPA = torch._C._nn.scaled_dot_product_attention
# torch may treat other subclasses specially, and the kernels do not.
_PLAIN_TYPES = (Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor)
_NESTED = "an argument is a nested tensor"
_PREFERENCES = ("metal_attn", "fastest")
_NO_TABLE = (
    "sdpa_replaced(prefer='fastest') has no times of this machine, so every call runs on the "
    "kernels: run `python -m torch_metal_attn tune` first"
)
_LIBRARIES = tuple(
    os.path.dirname(file) + os.sep for file in (torch.__file__, os.path.dirname(__file__))
)
_NUMBER = re.compile(r"\b\d+(\.\d+)?(e[-+]?\d+)?")


class _Thread(threading.local):
    """The state of this thread: its open contexts, and whether a call is being decided."""

    def __init__(self) -> None:
        # Not class attributes: torch.compile guards on the attributes of the object itself.
        self.entered: tuple[SdpaReplaced, ...] = ()
        self.deciding = False


class _Blocks:
    """The blocks that are open in all threads, and what they have changed in torch."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # for all attributes but this_thread, and for all counts
        self.this_thread = _Thread()
        self.open = 0  # the number of open blocks
        self.process_wide: tuple[SdpaReplaced, ...] = ()
        self.in_every_thread = False  # True if a block is process_wide; torch.compile guards on it
        self.attributes: list[tuple[Any, str, Any]] = []  # replaced: owner, name, replacement
        self.renaming: Renaming | None = None  # of torch's C function
        self.compiled = False  # True if torch.compile has ever replaced a call
        self.warned: set[str] = set()  # texts of past warnings, with "n" for each number

    def begin(self, everywhere: "SdpaReplaced | None") -> None:
        with self.lock:
            await_causal_bias()
            # torch.compile caches this list of functions that a mode or subclass may override. If
            # it were made while the attribute is replaced, it would lack the C function forever.
            get_overridable_functions()
            self.open += 1
            if self.open == 1:
                self.attributes = [
                    (owner, name, make(getattr(owner, name))) for owner, name, make in _REPLACED
                ]
                for attribute in self.attributes:
                    setattr(*attribute)
            if everywhere is not None:
                if not self.process_wide:
                    self.renaming = Renaming(_TORCH_SDPA, _replacement_of(_TORCH_SDPA))
                self.process_wide = (*self.process_wide, everywhere)
                self.in_every_thread = True

    def end(self, everywhere: "SdpaReplaced | None") -> None:
        with self.lock:
            if everywhere is not None:
                remaining = list(self.process_wide)
                remaining.remove(everywhere)
                self.process_wide = tuple(remaining)
                self.in_every_thread = bool(remaining)
                if not remaining and self.renaming is not None:
                    self.renaming.undo()
                    self.renaming = None
            self.open -= 1
            if self.open > 0:
                return
            for owner, name, replacement in self.attributes:
                # If other code has wrapped our function meanwhile, leave that wrapper in place.
                if getattr(owner, name) is replacement:
                    setattr(owner, name, replacement.__wrapped__)

    def of_this_thread(self) -> tuple["SdpaReplaced", ...]:
        """The contexts of this thread and of the process, each once."""
        return tuple(dict.fromkeys((*self.this_thread.entered, *self.process_wide)))


_blocks = _Blocks()


class SdpaReplaced(TorchFunctionMode):
    """The context of `sdpa_replaced()`, with the counts of the calls inside it.

    Attributes: replaced: number of calls that ran on the kernels. left_alone: number of calls that
        torch ran, by reason; reasons that differ only in their numbers count as one. Calls in a
        function under torch.compile are counted when the function is compiled, sometimes twice, and
        not when it runs. fastest: True if calls that torch runs faster are left to torch.
    """

    def __init__(self, process_wide: bool = False, fastest: bool = False) -> None:
        super().__init__()
        self.fastest = fastest
        self.replaced = 0
        self.left_alone: dict[str, int] = {}
        self._process_wide = process_wide

    def __enter__(self) -> "SdpaReplaced":
        if self.fastest and not loading.loaded().rows:
            _warn(_NO_TABLE)
        _blocks.begin(self if self._process_wide else None)
        if not self._process_wide:
            _blocks.this_thread.entered += (self,)
            super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if not self._process_wide:
                super().__exit__(*error)
        finally:
            if not self._process_wide:
                _blocks.this_thread.entered = _blocks.this_thread.entered[:-1]
            _blocks.end(self if self._process_wide else None)
        # If torch.compile has replaced calls, uncounted compiled functions may have run.
        if error[:1] == (None,) and not (self.replaced or self.left_alone or _blocks.compiled):
            why = "no call was made. The model may have an attention of its own"
            if not self._process_wide:
                why = (
                    "no call was made in this thread. If the model runs in other threads, use "
                    "sdpa_replaced(process_wide=True)"
                )
            _warn(f"sdpa_replaced() replaced no call of scaled_dot_product_attention: {why}")

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is _TORCH_SDPA and not _blocks.this_thread.deciding:
            return _decide(func, args, kwargs)
        return func(*args, **kwargs)

    def __repr__(self) -> str:
        return f"SdpaReplaced(replaced={self.replaced}, left_alone={self.left_alone})"

    def _count(self, reason: str | None) -> None:
        if reason is None:
            self.replaced += 1
        else:
            count_reason(self.left_alone, reason)


def sdpa_replaced(process_wide: bool = False, prefer: str = "metal_attn") -> SdpaReplaced:
    """Run calls of torch's `scaled_dot_product_attention` on our kernels inside a `with` block.

        with torch_metal_attn.sdpa_replaced() as calls:
            model(x)
        print(calls.replaced, calls.left_alone)

    It applies to this thread, under every name the function was imported as, and in torch's own
    modules. Blocks nest, and every open block counts the call.

    Args: process_wide: apply to every thread, including those that start later. Servers that run
        models in worker threads need this. It replaces the function under every name that a module
        has for it, but not references elsewhere, such as in an object or a local variable. The
        block may end in a different thread. Its end does not affect calls that are still running.
        prefer: "metal_attn", or "fastest" to leave calls to torch that it runs faster on this
        machine, according to the times that `python -m torch_metal_attn tune` measured. left_alone
        counts these calls, and there is no warning. Calls of other sizes run on the kernels, as do
        all calls under torch.compile. If blocks are nested, the innermost decides.

    If the kernels cannot run a call, torch runs it with its arguments unchanged, and a UserWarning
    gives the reason, once per process and reason. Reasons are: CPU tensors outside `simulate()`,
    other devices and dtypes, nested tensors, tensor subclasses other than CausalBias, torch.func,
    strides that would need a copy, and calls that torch itself refuses. Calls inside TorchScript
    run in torch too, but are not counted. A block without any call warns when it ends, once per
    process. For the same seed, dropout drops different weights than torch would.

    The kernels also compute the gradients, including that of attn_mask. For CPU tensors they do so
    if `backward` runs inside `simulate()`; otherwise the reference does.

    With torch.compile, enter the block around the call of the compiled function, which is compiled
    once for calls inside a block and once for calls outside. The compiled code keeps the decision
    about CPU tensors, which depends on `simulate()`. Entering the block inside a compiled function
    breaks the graph (an error with fullgraph=True).

    Returns: the context, see `SdpaReplaced`. It may be entered again, and by several threads.
    """
    process_wide = as_bool("process_wide", process_wide)
    if not isinstance(prefer, str) or prefer not in _PREFERENCES:
        allowed = " or ".join(map(repr, _PREFERENCES))
        raise ValueError(f"prefer is {value_text(prefer)}; it must be {allowed}")
    return SdpaReplaced(process_wide, prefer == "fastest")


@functools.cache
def await_causal_bias() -> None:
    """Let CausalBias work although torch.nn.functional has another function."""
    when_imported("torch.nn.attention.bias", _pass_original_to_causal_bias)


def _pass_original_to_causal_bias() -> None:
    """Let CausalBias recognise torch's function; otherwise it returns uninitialised elements."""
    bias: Any = sys.modules["torch.nn.attention.bias"].CausalBias
    original = bias.__torch_function__.__func__

    def __torch_function__(
        cls: type,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is _TORCH_SDPA:
            return bias._dispatch(*args, **(kwargs or {}))
        return original(cls, func, types, args, kwargs)

    bias.__torch_function__ = classmethod(__torch_function__)


def _replacement_of(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Tensor:
        if _blocks.this_thread.deciding or not open_here():
            return original(*args, **kwargs)
        return _decide(original, args, kwargs)

    if original is _TORCH_SDPA:
        _let_torchscript_compile(scaled_dot_product_attention)
    return scaled_dot_product_attention


def _let_torchscript_compile(replacement: Callable[..., Tensor]) -> None:
    """Let torch.jit.script compile torch's own function, as `replacement` has no source for it."""
    table = _builtins._get_builtin_table()
    table[id(replacement)] = "aten::scaled_dot_product_attention"
    weakref.finalize(replacement, table.pop, id(replacement)).atexit = False


def _fast_path_of(original: Callable[[], bool]) -> Callable[[], bool]:
    """torch's switch for the fused layers. It is off in the threads of a block."""

    @functools.wraps(original)  # TorchScript compiles the source of `original`
    def get_fastpath_enabled() -> bool:
        return original() and (_blocks.this_thread.deciding or not open_here())

    return get_fastpath_enabled


def _forward_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a fused layer. It leaves nested tensors to torch."""
    run = _run_layer

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(original, self, *args, **kwargs)

    # TorchScript compiles the source of `original` with the globals of this function.
    names = getattr(original, "__globals__", globals())
    replacement = types.FunctionType(forward.__code__, names, closure=forward.__closure__)
    return functools.update_wrapper(replacement, original)


def _run_layer(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
    is_idle = torch.compiler.is_compiling() or _blocks.this_thread.deciding or not open_here()
    if is_idle or not any(x.is_nested for x in tensors):
        return original(*args, **kwargs)
    _note(_NESTED, _blocks.of_this_thread())
    with ExitStack() as without_modes:
        # torch refuses nested tensors in any mode, so leave our modes until one of other code.
        while isinstance(_get_current_function_mode(), SdpaReplaced):
            without_modes.enter_context(_pop_mode_temporarily())
        _blocks.this_thread.deciding = True
        try:
            return original(*args, **kwargs)
        finally:
            _blocks.this_thread.deciding = False


# The attributes that are replaced while a block is open, and the functions that make replacements.
_REPLACED: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (functional, "scaled_dot_product_attention", _replacement_of),
    (torch.backends.mha, "get_fastpath_enabled", _fast_path_of),
    (torch.nn.MultiheadAttention, "forward", _forward_of),
    (torch.nn.TransformerEncoderLayer, "forward", _forward_of),
)


def _run_by_compiler(function: _Function) -> _Function:
    """Like torch.compiler.assume_constant_result, without the slow import of the compiler."""
    function.__dict__["_dynamo_marked_constant"] = True
    return function


def _decide(
    original: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    # Read now: a block that ends during the call counts it too. While compiling, `_note` reads.
    contexts = None if torch.compiler.is_compiling() else _blocks.of_this_thread()
    _blocks.this_thread.deciding = True  # nested calls of torch's function are ignored
    try:
        problem, reason = problem_or_reason(args, kwargs)
        if (slower := _why_slower(problem, contexts)) is not None:
            _note(slower, contexts, warns=False)
            return original(*args, **kwargs)
        out = None
        if problem is not None:
            out, reason = problem.run_or_refusal()
        _note(reason, contexts)
        return original(*args, **kwargs) if out is None else out
    finally:
        _blocks.this_thread.deciding = False


def arguments_by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(Arguments._fields, args, strict=False)) | kwargs


def open_here() -> bool:
    """True if a block is open that applies to this thread."""
    # Not bool() of the tuple, which the compiler of torch 2.11 cannot trace.
    return len(_blocks.this_thread.entered) > 0 or _blocks.in_every_thread


def open_elsewhere() -> bool:
    """True if blocks are open, and none of them applies to this thread."""
    return _blocks.open > 0 and not open_here()


def _why_slower(problem: Problem | None, contexts: tuple[SdpaReplaced, ...] | None) -> str | None:
    """Why torch should run a call because it is faster, or None."""
    if problem is None or contexts is None:
        return None
    innermost = (_blocks.this_thread.entered or _blocks.process_wide)[-1:]
    return faster_in_torch(problem) if innermost and innermost[0].fastest else None


def problem_or_reason(
    args: tuple[Any, ...], kwargs: dict[str, Any], *, on_mps: bool = False
) -> tuple[Problem | None, str | None]:
    """The call for the kernels, or why they cannot run it. on_mps: judge CPU tensors as on mps."""
    arguments = arguments_by_name(args, kwargs)
    if is_causal_bias(arguments.get("attn_mask")):
        del arguments["attn_mask"]  # a CausalBias has no elements to check
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    reason = _reason_of_tensors(tensors, on_mps)
    if reason is not None:
        return None, reason
    try:
        return plan(Arguments(*args, **kwargs)), None
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        if torch.compiler.is_compiling():  # sizes in the message may be symbolic
            return None, "the arguments are refused: call without torch.compile to see why"
        return None, str(error)


def _reason_of_tensors(tensors: list[Tensor], on_mps: bool) -> str | None:
    if any(tensor.is_nested for tensor in tensors):
        return _NESTED
    if not all(type(tensor) in _PLAIN_TYPES for tensor in tensors):
        if any(is_dtensor(tensor) for tensor in tensors):
            return (
                "an argument is a DTensor: pass its to_local(), or call the function through "
                "torch.distributed.tensor.experimental.local_map"
            )
        return "an argument is a tensor subclass"
    if _transform_level() is not None:
        return "transforms of torch.func are not implemented"
    if forward_ad._current_level >= 0:
        return "forward-mode derivatives are not implemented"
    for tensor in tensors:
        device = tensor.device.type
        if device == "cpu" and not on_mps and not simulating():
            return "CPU tensors run the kernels only inside torch_metal_attn.simulate()"
        if device not in ("cpu", "mps"):
            return f"there are no kernels for tensors on {device}"
    return None


@_run_by_compiler
def simulating() -> bool:
    return session.active()


@_run_by_compiler
def _transform_level() -> int | None:
    level: int | None = torch._C._functorch.maybe_current_level()
    return level


@_run_by_compiler
def _note(
    reason: str | None, contexts: tuple[SdpaReplaced, ...] | None, warns: bool = True
) -> None:
    """Count a call, and warn once why torch runs it. contexts: None while compiling."""
    with _blocks.lock:
        if contexts is None:
            contexts = _blocks.of_this_thread()
            _blocks.compiled = _blocks.compiled or reason is None
        for context in contexts:
            context._count(reason)
    if reason is not None and warns:
        _warn(f"sdpa_replaced() leaves calls of scaled_dot_product_attention to torch: {reason}")


def count_reason(left_alone: dict[str, int], reason: str) -> bool:
    """Count a reason. Reasons that differ only in numbers count as one. True if it is new."""
    kind = without_numbers(reason)
    reason = next((known for known in left_alone if without_numbers(known) == kind), reason)
    left_alone[reason] = left_alone.get(reason, 0) + 1
    return left_alone[reason] == 1


def without_numbers(text: str) -> str:
    return _NUMBER.sub("n", text)


def _warn(message: str) -> None:
    """Warn once per process and message, ignoring numbers in the message."""
    with _blocks.lock:
        kind = without_numbers(message)
        if kind in _blocks.warned:
            return
        _blocks.warned.add(kind)
    warnings.warn(message, stacklevel=users_level())


def users_level() -> int:
    """The stacklevel of the first frame outside of torch and this package's integrations."""
    level, frame = 1, inspect.currentframe()
    frame = frame and frame.f_back
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        level, frame = level + 1, frame.f_back
    return level
