"""`sdpa_replaced()`: torch's own `scaled_dot_product_attention` on our kernels, for a while.

Three parts, because none reaches every call:

- A TorchFunctionMode sees the C function itself, so also calls of it under names that were imported
  before. But while a mode handles a Python function of torch, it is off: what
  `multi_head_attention_forward` calls inside is hidden from it.
- So the attribute of `torch.nn.functional` is replaced as well, as long as any thread is inside. In
  threads that are not it goes straight on.
- `nn.MultiheadAttention` and `nn.TransformerEncoderLayer` have a fused path for inference that
  calls no attention function at all. It is off meanwhile, in every thread.
"""

import functools
import inspect
import os
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from torch_metal_attn import sdpa
from torch_metal_attn.simulator import session

_Function = TypeVar("_Function", bound=Callable[..., Any])

_TORCH_SDPA = torch._C._nn.scaled_dot_product_attention
# Others mean something to torch that the kernels do not know.
_PLAIN_TYPES = (Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor)
_ATTRIBUTE = "scaled_dot_product_attention"  # of torch.nn.functional
_ARGUMENTS = (
    "query",
    "key",
    "value",
    "attn_mask",
    "dropout_p",
    "is_causal",
    "scale",
    "enable_gqa",
)
_LIBRARIES = tuple(os.path.dirname(file) + os.sep for file in (torch.__file__, __file__))
_MAX_FLOAT_HEAD_DIM = 256  # of gradients
_NUMBER = re.compile(r"\b\d+(\.\d+)?(e[-+]?\d+)?")

_lock = threading.Lock()  # of all that follows but _thread, and of every mode's counts
_said: set[str] = set()
_inside = 0  # contexts that are open, in all threads
_attribute: Any = None  # what we put in place of torch.nn.functional's
_fused_layers = True  # torch's setting before


class _Thread(threading.local):
    """Of this thread: its open contexts, and whether a call is being decided."""

    def __init__(self) -> None:
        # Not defaults of the class: torch.compile guards on what the object itself has.
        self.entered: tuple[SdpaReplaced, ...] = ()
        self.deciding = False


_thread = _Thread()


class SdpaReplaced(TorchFunctionMode):
    """What `sdpa_replaced()` gives: a context, and the counts of the calls inside it.

    Attributes: replaced: calls that ran here. left_alone: number of calls that torch ran, by
        reason; numbers in a reason are n. A function under torch.compile counts while it is
        compiled, sometimes twice, and not when it runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.replaced = 0
        self.left_alone: dict[str, int] = {}

    def __enter__(self) -> "SdpaReplaced":
        _install()
        _thread.entered = (*_thread.entered, self)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        try:
            super().__exit__(*error)
        finally:
            _thread.entered = _thread.entered[:-1]
            _uninstall()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is _TORCH_SDPA and not _thread.deciding:
            return _decide(func, args, kwargs)
        return func(*args, **kwargs)

    def __repr__(self) -> str:
        return f"SdpaReplaced(replaced={self.replaced}, left_alone={self.left_alone})"


def sdpa_replaced() -> SdpaReplaced:
    """Run torch's `scaled_dot_product_attention` as `torch_metal_attn`'s inside a `with` block.

        with torch_metal_attn.sdpa_replaced() as calls:
            model(x)
        print(calls.replaced, calls.left_alone)

    It holds for this thread, under whatever name the function is called, in torch's own modules
    too. Blocks nest, and every open one counts.

    A call that the kernels cannot run goes to torch with its arguments untouched; a UserWarning
    says so, once a process for each reason: CPU tensors outside `simulate()`, other devices and
    dtypes, masks that require grad, gradients of float32 head dims above 256, tensor subclasses,
    nested tensors, torch.func, strides that would need a copy, and whatever torch itself refuses.
    Dropout of the calls that run here drops other weights than torch would for the same seed.

    Gradients are the kernels' too; on CPU tensors, where `backward` runs inside `simulate()`, and
    else the reference's.

    With torch.compile, enter the block around the call of the compiled function: it is compiled
    again for calls inside, and keeps its graph for those outside. Whether CPU tensors are inside
    `simulate()` is then looked at while compiling. Entering it inside a compiled
    function breaks the graph (an error with fullgraph=True).

    Returns: the context, see `SdpaReplaced`. It may be entered again, and by several threads.
    """
    return SdpaReplaced()


def _install() -> None:
    global _inside, _attribute, _fused_layers
    with _lock:
        _inside += 1
        if _inside == 1:
            _attribute = _replacement_of(getattr(functional, _ATTRIBUTE))
            setattr(functional, _ATTRIBUTE, _attribute)
            _fused_layers = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)


def _uninstall() -> None:
    global _inside
    with _lock:
        _inside -= 1
        if _inside > 0:
            return
        torch.backends.mha.set_fastpath_enabled(_fused_layers)
        # Someone may have put a function of theirs in front meanwhile: then ours stays behind it.
        if getattr(functional, _ATTRIBUTE) is _attribute:
            setattr(functional, _ATTRIBUTE, _attribute.__wrapped__)


def _replacement_of(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(original)
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Tensor:
        if not _thread.entered or _thread.deciding:
            return original(*args, **kwargs)
        return _decide(original, args, kwargs)

    return scaled_dot_product_attention


def _run_by_compiler(function: _Function) -> _Function:
    """Have torch.compile call `function` once, while compiling, and take its result as constant.

    What torch.compiler.assume_constant_result does, but that imports the compiler: seconds.
    """
    function.__dict__["_dynamo_marked_constant"] = True
    return function


def _decide(
    original: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor:
    """Run a call here, or leave it to `original`."""
    _thread.deciding = True  # no other context looks at this call
    try:
        problem, reason = _problem_or_reason(args, kwargs)
        if problem is not None:
            try:
                out = problem.run()
            except ValueError:
                reason = problem.refusal()
                if reason is None:
                    raise
            else:
                _note(None)
                return out
        _note(reason)
        return original(*args, **kwargs)
    finally:
        _thread.deciding = False


def _problem_or_reason(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[sdpa.Problem | None, str | None]:
    """The call as the kernels can run it, or why they cannot."""
    given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
    tensors = [value for value in given.values() if isinstance(value, Tensor)]
    reason = _reason_of_tensors(tensors) or _reason_of_gradients(given)
    if reason is not None:
        return None, reason
    try:
        return sdpa.plan(*args, **kwargs), None
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        if torch.compiler.is_compiling():  # the sizes in the message may have no values
            return None, "the arguments are refused: call without torch.compile to see why"
        return None, str(error)


def _reason_of_tensors(tensors: list[Tensor]) -> str | None:
    if not all(type(tensor) in _PLAIN_TYPES for tensor in tensors):
        return "an argument is a tensor subclass"
    if _transform_level() is not None:
        return "transforms of torch.func are not implemented"
    if forward_ad._current_level >= 0:
        return "forward-mode derivatives are not implemented"
    for tensor in tensors:
        device = tensor.device.type
        if device == "cpu" and not _simulating():
            return "CPU tensors run the kernels only inside torch_metal_attn.simulate()"
        if device not in ("cpu", "mps"):
            return f"there are no kernels for tensors on {device}"
    return None


def _reason_of_gradients(given: dict[str, Any]) -> str | None:
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors.values()):
        return None
    if "attn_mask" in tensors and tensors["attn_mask"].requires_grad:
        return "the gradient of attn_mask is not implemented"
    # What the backward has room for in every case; forward runs alone have more.
    for name in ("query", "value"):
        tensor = tensors.get(name)
        if tensor is not None and tensor.dtype == torch.float32 and tensor.dim() > 0:
            if tensor.shape[-1] > _MAX_FLOAT_HEAD_DIM:
                return f"gradients of float32 head dims above {_MAX_FLOAT_HEAD_DIM}"
    return None


@_run_by_compiler
def _simulating() -> bool:
    return session.active()


@_run_by_compiler
def _transform_level() -> int | None:
    level: int | None = torch._C._functorch.maybe_current_level()
    return level


@_run_by_compiler
def _note(reason: str | None) -> None:
    """Count a call in every open context, and say why it is left alone, once."""
    kind = None if reason is None else _NUMBER.sub("n", reason)
    with _lock:
        for context in dict.fromkeys(_thread.entered):
            if kind is None:
                context.replaced += 1
            else:
                context.left_alone[kind] = context.left_alone.get(kind, 0) + 1
        if kind is None or kind in _said:
            return
        _said.add(kind)
    warnings.warn(
        f"sdpa_replaced() leaves calls of scaled_dot_product_attention to torch: {reason}",
        stacklevel=_users_level(),
    )


def _users_level() -> int:
    """The caller's stacklevel for its first line that is neither torch's nor ours."""
    level, frame = 1, inspect.currentframe()
    frame = frame and frame.f_back
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        level, frame = level + 1, frame.f_back
    return level
