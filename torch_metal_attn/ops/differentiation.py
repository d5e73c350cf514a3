"""Helpers for autograd Functions that run as the Autograd kernel of an op, below the dispatcher."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch._guards import TracingContext
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from torch_metal_attn.call.arguments import is_dtensor, refuse_dtensor, refuse_layout
from torch_metal_attn.ops import fast_path
from torch_metal_attn.runtime.refusals import (
    as_value_error,
    invalid,
    not_implemented,
    python_kernel,
    unmarked,
)

# From the arguments of a call: for the name of each argument that the call writes in place, the
# names of the arguments whose values it writes there.
Written = Callable[[dict[str, Any]], Mapping[str, Iterable[str]]]

_Function = TypeVar("_Function", bound=Callable[..., Any])

_libraries: list[torch.library.Library] = []  # a registration ends when its library is freed
_refused: dict[str, tuple[str, Written]] = {}  # the arguments of `refuse`, by op


def transforming() -> bool:
    return bool(torch._C._are_functorch_transforms_active())


def compiling() -> bool:
    """True if torch.compile is tracing. Inside an op torch 2.10's is_compiling() is False."""
    return torch.compiler.is_compiling() or TracingContext.try_get() is not None


def batched(tensor: Tensor) -> bool:
    """True if vmap may be active, of torch.func or of autograd's is_grads_batched."""
    return transforming() or bool(torch._C._functorch.is_legacy_batchedtensor(tensor))


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """`function.apply` in an op's kernel, where torch.func differentiates only one level."""
    if not transforming():
        return function.apply(*arguments)
    with enable_single_level_autograd_function():
        return _single_level(function).apply(*arguments)


@functools.cache
def _single_level(function: type[torch.autograd.Function]) -> Any:
    """`function` as torch.func's single-level Function, whose `apply` ignores transforms."""
    parts = ("forward", "setup_context", "backward")
    body = {name: staticmethod(getattr(function, name)) for name in parts}
    return type(function.__name__, (_SingleLevelFunction,), body)


def save(ctx: Any, *tensors: Tensor | None) -> None:
    """Save tensors for a Function's backward, which reads them with `saved`."""
    ctx.save_for_backward(*tensors)
    ctx.strides = [x if x is None else x.stride() for x in tensors]


def saved(ctx: Any) -> list[Any]:
    """The tensors of `save`. Copied if a hook changed strides, which ops may refuse."""
    return [
        x if x is None or x.stride() == strides else x.contiguous()
        for x, strides in zip(ctx.saved_tensors, ctx.strides, strict=True)
    ]


@contextmanager
def below_autograd() -> Iterator[None]:
    """A context for the op in a Function's forward."""
    # A forward runs with gradients off. The gradients of torch.func's next level would then be 0.
    grad_mode = torch.enable_grad() if transforming() else nullcontext()
    with grad_mode, torch._C._AutoDispatchBelowAutograd():
        yield


def run_below_autograd(op: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return op(*arguments, **options)


def nothing_to_differentiate(arguments: Iterable[Any], options: Mapping[str, Any]) -> bool:
    """True if no derivative of an op's call is requested, in any of autograd's modes."""
    if forward_ad._current_level >= 0 or transforming():
        return False
    if not torch.is_grad_enabled():
        return True
    return not any(
        isinstance(value, Tensor) and value.requires_grad
        for values in (arguments, options.values(), options.get("captures", ()))
        for value in values
    )


def may_pass_autograd(arguments: Iterable[Any], options: Mapping[str, Any]) -> bool:
    """True if a call may skip the op's Autograd kernel, which is Python and would do nothing."""
    # Graphs must record the op itself, and inference mode already skips autograd.
    return (
        not torch.compiler.is_compiling()
        and not torch.is_inference_mode_enabled()
        and nothing_to_differentiate(arguments, options)
    )


def call(op: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call `op`, without its Autograd kernel if possible; refusals are ValueErrors."""
    try:
        if may_pass_autograd(arguments, options):
            return run_below_autograd(op, *arguments, **options)
        return op(*arguments, **options)
    except Exception as error:
        refuse_dtensors(op, arguments, options)
        if isinstance(error, NotImplementedError):
            for argument, value in by_schema(op, arguments, options):
                if isinstance(value, Tensor):
                    refuse_layout(argument.name, value)
        if isinstance(error, RuntimeError):
            raise as_value_error(error) from None
        raise


def autograd_kernel(name: str, fast_op: str = "") -> Callable[[_Function], _Function]:
    """Make a function an op's Autograd kernel. fast_op: the name in `fast_path` for plain calls."""
    op = getattr(torch.ops.metal_attn, name).default

    def register(function: _Function) -> _Function:
        @functools.wraps(function)
        def kernel(*arguments: Any, **options: Any) -> Any:
            if fast_op:
                result = fast_path.try_call(getattr(fast_path, fast_op), arguments, options)
                if result is not None:
                    return result
            try:
                return function(*arguments, **options)
            except Exception:
                refuse_dtensors(op, arguments, options)
                raise

        python_kernel(f"metal_attn::{name}", "Autograd")(kernel)
        return function

    return register


def refuse_dtensors(op: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Raise NotImplementedError if a failed call has a DTensor, as torch's error is unclear."""
    if any(map(is_dtensor, (*arguments, *options.values(), *options.get("captures", ())))):
        for argument, value in by_schema(op, arguments, options):
            for item in value if isinstance(value, list | tuple) else (value,):
                refuse_dtensor(argument.name, item)


@functools.cache
def _names(op: torch._ops.OpOverload) -> list[str]:
    return [argument.name for argument in op._schema.arguments]


def by_name(op: Any, values: Iterable[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a call of an op passes, by name."""
    return dict(zip(_names(op), values, strict=False)) | dict(options)


def by_schema(op: Any, values: Sequence[Any], options: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """The schema and value of each passed argument. A function's op is its first value."""
    if not isinstance(op, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        op, *values = values
    op = getattr(op, "default", op)
    named = by_name(op, values, options)
    return [(one, named[one.name]) for one in op._schema.arguments if one.name in named]


def refuse_tangents(op: object, arguments: Mapping[str, Any]) -> None:
    """Raise NotImplementedError for a forward-mode derivative; `arguments` by name."""
    for name, value in arguments.items():
        if isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None:
            raise not_implemented(
                f"{op} has no forward-mode derivative (jvp), which `{name}` asks for: detach it"
            )


def needs_gradient(op: object, arguments: Mapping[str, Any], constants: Iterable[str] = ()) -> bool:
    """True if a call needs gradients; NotImplementedError if `constants` or tangents need them."""
    refuse_tangents(op, arguments)
    # The op's checks refuse None.
    tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
    if not torch.is_grad_enabled():
        return False
    for n in constants:
        if n in tensors and tensors[n].requires_grad:
            raise not_implemented(f"{op} has no gradient for `{n}`, which requires grad: detach it")
    return any(tensor.requires_grad for tensor in tensors.values())


class _Undifferentiable(torch.autograd.Function):
    """The results of a call. Computing their derivative raises NotImplementedError."""

    @staticmethod
    def forward(message: str, run: Callable[[], Any], *inputs: Tensor) -> Any:
        with below_autograd():
            return run()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.message = inputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError(ctx.message)


class _Overwritten(torch.autograd.Function):
    """A tensor that an op without a gradient wrote. It does not keep the step's graph alive."""

    @staticmethod
    def forward(message: str, origin: Tensor, tensor: Tensor) -> Tensor:
        return tensor

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.message = inputs[0]
        ctx.mark_dirty(inputs[2])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError(ctx.message)


def without_gradient(message: str, tensors: Iterable[Tensor], run: Callable[[], Any]) -> Any:
    """The result of `run` below autograd. Its derivative raises with `message`."""
    return apply(_Undifferentiable, message, run, *(x for x in tensors if x.requires_grad))


def forward_refusal(function: str, advice: str, arguments: Mapping[str, Any]) -> str:
    """The message that a derivative raises, or "". In graphs and transforms, raises it here."""
    in_graph = torch.compiler.is_compiling()
    if not in_graph:
        if nothing_to_differentiate((), arguments):
            return ""
        refuse_tangents(function, arguments)
    tensors = {n: x for n, x in arguments.items() if isinstance(x, Tensor)}
    needing = [n for n, x in tensors.items() if torch.is_grad_enabled() and x.requires_grad]
    if not needing:
        return ""
    message = f"{function} has no gradient, and {needing[0]} requires grad: {advice}"
    if in_graph or transforming():
        raise NotImplementedError(message)
    return message


def forward_only(
    function: str, advice: str, arguments: Mapping[str, Any], run: Callable[[], Any]
) -> Any:
    """The result of `run()`, whose derivatives raise. Like `refuse`, but for Python functions."""
    message = forward_refusal(function, advice, arguments)
    if not message:
        return run()
    return without_gradient(message, (x for x in arguments.values() if isinstance(x, Tensor)), run)


def _base(tensor: Tensor) -> Tensor:
    """The base of a view, which has autograd's history of writes; `tensor` if it is not a view."""
    return tensor._base if tensor._is_view() and tensor._base is not None else tensor


def check_not_a_leaf(op: str, name: str, tensor: Tensor, instead: str) -> None:
    """Raise before the write, as torch's ops do. Autograd would raise after the write."""
    if any(each.is_leaf and each.requires_grad for each in (tensor, _base(tensor))):
        raise not_implemented(
            f"`{name}` is a leaf that requires grad, or a view of one, so {op} cannot write it in "
            f"place: {instead}"
        )


def _check_may_be_overwritten(op: str, name: str, tensor: Tensor, source: str) -> None:
    """Raise NotImplementedError, before the write, if autograd cannot track the write."""
    check_not_a_leaf(op, name, tensor, "detach it, or call the op under torch.no_grad()")
    if (
        tensor._is_view()
        and torch._C._autograd._get_creation_meta(tensor) != torch._C._autograd.CreationMeta.DEFAULT
    ):
        raise not_implemented(
            f"{op} has no gradient: `{source}` requires grad and `{name}` is a view that autograd "
            "cannot follow, as it was created under torch.no_grad() or by an op with several "
            "results. Call the op under torch.no_grad()"
        )


def _mark_overwritten(tensor: Tensor, message: str) -> None:
    base = _base(tensor)
    if type(base.grad_fn).__name__ != f"{_Overwritten.__name__}Backward":
        _Overwritten.apply(message, torch.empty(0, requires_grad=True), base)


def refuse(name: str, advice: str, written: Written | None = None) -> None:
    """Let derivatives of an op's results, and of tensors that it writes, raise an error."""
    if written is not None:
        _refused[name] = advice, written
        count_writes(name, written)
    autograd_kernel(name)(undifferentiated(name, advice, written or (lambda _: {})))


def undifferentiated(name: str, advice: str, written: Written) -> Callable[..., Any]:
    """The kernel that `refuse` registers."""
    op = getattr(torch.ops.metal_attn, name).default

    def undifferentiated(*values: Any, **options: Any) -> Any:
        if nothing_to_differentiate(values, options):
            return run_below_autograd(op, *values, **options)
        arguments = by_name(op, values, options)
        tensors = {n: x for n, x in arguments.items() if isinstance(x, Tensor)}
        refusals = _refusals(f"metal_attn::{name}", advice, tensors, written(arguments))
        if not refusals:
            with below_autograd():
                return op(*values, **options)
        if op._schema.returns:
            run = functools.partial(op, *values, **options)
            result = without_gradient(refusals[""], tensors.values(), run)
        else:
            with below_autograd():
                result = op(*values, **options)
        for target, refusal in refusals.items():
            if target:
                _mark_overwritten(tensors[target], refusal)
        return result

    return undifferentiated


def _refusals(
    op: str, advice: str, tensors: dict[str, Tensor], written: Mapping[str, Iterable[str]]
) -> dict[str, str]:
    """The messages that backward raises, by written tensor; under "" that of the results."""
    refuse_tangents(op, tensors)
    needing = [n for n, x in tensors.items() if torch.is_grad_enabled() and x.requires_grad]
    if not needing:
        return {}

    def message(name: str) -> str:
        return unmarked(f"{op} has no gradient, and `{name}` requires grad: {advice}")

    refusals = {"": message(needing[0])}
    for target, sources in written.items():
        source = next((n for n in (target, *sources) if n in needing), None)
        if source is not None and tensors[target].is_floating_point():
            # Graphs, and some transforms, drop nodes without an edge to their inputs: raise now.
            if compiling() or transforming():
                raise NotImplementedError(message(source))
            _check_may_be_overwritten(op, target, tensors[target], source)
            refusals[target] = message(source)
    return refusals


def check_writes(name: str, values: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Raise the errors of op `name`'s Python kernels, before a caller changes anything."""
    op = getattr(torch.ops.metal_attn, name).default
    arguments = by_name(op, values, options)
    _refuse_negated(op, arguments)
    if not nothing_to_differentiate(values, options):
        tensors = {n: x for n, x in arguments.items() if isinstance(x, Tensor)}
        advice, written = _refused[name]
        _refusals(f"metal_attn::{name}", advice, tensors, written(arguments))


def count_writes(name: str, written: Callable[[dict[str, Any]], Iterable[str]]) -> None:
    """Let the op increment the version counters of the arguments that `written` names."""
    op = getattr(torch.ops.metal_attn, name).default
    library = torch.library.Library("metal_attn", "IMPL")
    library.impl(name, _counted(op, written), "ADInplaceOrView", with_keyset=True)
    # If an op returns the tensors that it writes, torch handles negated views itself.
    if not any(result.alias_info for result in op._schema.returns):
        library.impl(name, _without_negated(op), "Negative")
    _libraries.append(library)


def _without_negated(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """A kernel that refuses to write lazily negated views, and resolves views that are read."""

    def without_negated(*values: Any, **options: Any) -> Any:
        arguments = by_name(op, values, options)
        _refuse_negated(op, arguments)
        resolved = {n: x.resolve_neg() for n, x in arguments.items() if isinstance(x, Tensor)}
        return op(**(arguments | resolved))

    return without_negated


def _refuse_negated(op: torch._ops.OpOverload, arguments: dict[str, Any]) -> None:
    for argument in op._schema.arguments:
        name, alias = argument.name, argument.alias_info
        writes = alias is not None and alias.is_write
        if writes and isinstance(arguments.get(name), Tensor) and arguments[name].is_neg():
            raise invalid(
                f"`{name}` is a view with its negative bit set, which {op._schema.name} cannot "
                f"write in place; pass a copy: `{name}`.resolve_neg()"
            )


def _counted(op: Any, written: Callable[[dict[str, Any]], Iterable[str]]) -> Callable[..., Any]:
    def with_new_versions(keyset: Any, *values: Any, **options: Any) -> Any:
        arguments = by_name(op, values, options)
        tensors = (arguments[name] for name in written(arguments))
        # The op's checks refuse None.
        torch.autograd.graph.increment_version([x for x in tensors if x is not None])
        keyset = keyset & torch._C._after_ADInplaceOrView_keyset
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return op.redispatch(keyset, *values, **options)

    return with_new_versions
