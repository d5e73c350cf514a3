"""What autograd Functions need to run as an op's Autograd kernel, below the dispatcher."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from torch_metal_attn.ops.refusals import python_kernel, told


def transforming() -> bool:
    """Whether a transform of torch.func is around."""
    return bool(torch._C._are_functorch_transforms_active())


def batched(tensor: Tensor) -> bool:
    """Whether vmap may be around: torch.func's, or that of autograd's is_grads_batched."""
    return transforming() or bool(torch._C._functorch.is_legacy_batchedtensor(tensor))


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """`function.apply`, within torch.func's transforms too.

    There torch's own `apply` is for code above the dispatcher: it would look for a kernel of every
    transform. Here, below it, one level is left to differentiate.
    """
    if not transforming():
        return function.apply(*arguments)
    with enable_single_level_autograd_function():
        return _single_level(function).apply(*arguments)


@functools.cache
def _single_level(function: type[torch.autograd.Function]) -> Any:
    """`function` as torch.func's own levels have theirs, whose `apply` looks for no transform."""
    parts = ("forward", "setup_context", "backward")
    body = {name: staticmethod(getattr(function, name)) for name in parts}
    return type(function.__name__, (_SingleLevelFunction,), body)


@contextmanager
def below_autograd() -> Iterator[None]:
    """Around the op in a Function's forward.

    Gradients are off there, and torch.func's next level would see that: it would record nothing and
    give zero as its derivative. So in transforms they are on.
    """
    grad_mode = torch.enable_grad() if transforming() else nullcontext()
    with grad_mode, torch._C._AutoDispatchBelowAutograd():
        yield


def nothing_to_differentiate(arguments: Iterable[Any], options: Mapping[str, Any]) -> bool:
    """Whether no derivative of an op's call is asked for, by any of autograd's ways."""
    if forward_ad._current_level >= 0 or transforming():
        return False
    if not torch.is_grad_enabled():
        return True
    return not any(
        isinstance(value, Tensor) and value.requires_grad
        for values in (arguments, options.values())
        for value in values
    )


def may_pass_autograd(arguments: Iterable[Any], options: Mapping[str, Any]) -> bool:
    """Whether an op's Autograd kernel, which is Python, is in the way of a call and has no work.

    `arguments` and `options` are all that the call is made of.
    """
    # A graph shows the op as it is, and is not to ask for inference mode, which is below autograd.
    return (
        not torch.compiler.is_compiling()
        and not torch.is_inference_mode_enabled()
        and nothing_to_differentiate(arguments, options)
    )


def call(op: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """`op` of these, past its Autograd kernel if that has no work; or a function that calls an op.

    Raises ValueError for what the op refuses.
    """
    try:
        if may_pass_autograd(arguments, options):
            with torch._C._AutoDispatchBelowAutograd():
                return op(*arguments, **options)
        return op(*arguments, **options)
    except RuntimeError as error:
        raise told(error) from None


def refuse_tangents(op: object, arguments: Mapping[str, Any]) -> None:
    """NotImplementedError for a forward-mode derivative; `arguments` by name, tensors or not."""
    for name, value in arguments.items():
        if isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None:
            raise NotImplementedError(
                f"{op} has no forward-mode derivative (jvp), which {name} asks for: detach it"
            )


def refuse(namespace: str, name: str, advice: str) -> None:
    """Gives an op an Autograd kernel that raises NotImplementedError for derivatives."""
    op = getattr(getattr(torch.ops, namespace), name).default
    names = [argument.name for argument in op._schema.arguments]

    def without_gradient(*values: Any, **options: Any) -> Any:
        if nothing_to_differentiate(values, options):
            with torch._C._AutoDispatchBelowAutograd():
                return op(*values, **options)
        given = dict(zip(names, values, strict=False)) | options
        refuse_tangents(f"{namespace}::{name}", given)
        if torch.is_grad_enabled():
            for argument, value in given.items():
                if isinstance(value, Tensor) and value.requires_grad:
                    raise NotImplementedError(
                        f"{namespace}::{name} has no gradient, and {argument} requires grad: "
                        f"{advice}"
                    )
        with below_autograd():
            return op(*values, **options)

    python_kernel(f"{namespace}::{name}", "Autograd")(without_gradient)


def tell_of_writes(
    namespace: str, name: str, written: Callable[[dict[str, Any]], Iterable[Tensor | None]]
) -> torch.library.Library:
    """Gives an op that writes in place a kernel that tells autograd so; the library is to be kept.

    torch's own in-place operators do that by themselves. `written`: which of the arguments, by
    name, the call writes.
    """
    op = getattr(getattr(torch.ops, namespace), name).default
    names = [argument.name for argument in op._schema.arguments]

    def with_new_versions(keyset: Any, *values: Any, **options: Any) -> Any:
        given = dict(zip(names, values, strict=False), **options)
        torch.autograd.graph.increment_version([x for x in written(given) if x is not None])
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return op.redispatch(
                keyset & torch._C._after_ADInplaceOrView_keyset, *values, **options
            )

    library = torch.library.Library(namespace, "IMPL")
    library.impl(name, with_new_versions, "ADInplaceOrView", with_keyset=True)
    return library
