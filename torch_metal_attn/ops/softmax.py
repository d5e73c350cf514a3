"""`metal_attn::softmax`, `softmax_` and `apply_causal_mask_` in Python.

Fake kernels, CPU kernels, autograd, and what replaces the mutating ops in functional graphs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.ops.cpu import cpu_kernel
from torch_metal_attn.ops.differentiation import check_not_a_leaf, needs_gradient
from torch_metal_attn.ops.fake import NAMESPACES, register_fake
from torch_metal_attn.ops.refusals import python_kernel


@register_fake("softmax")
def _softmax_fake(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


@register_fake("softmax_", "apply_causal_mask_")
def _in_place_fake(x: Tensor, *_: Any) -> Tensor:
    return x


@cpu_kernel("softmax")
def _softmax_cpu(x: Tensor, dim: int = -1) -> Tensor:
    return torch.empty_like(x).copy_(torch._safe_softmax(x, dim))


@cpu_kernel("softmax_")
def _softmax_inplace_cpu(x: Tensor, dim: int = -1) -> Tensor:
    return x.copy_(torch._safe_softmax(x, dim))


@cpu_kernel("apply_causal_mask_")
def _apply_causal_mask_cpu(scores: Tensor, q_offset: int = 0) -> Tensor:
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(q_offset)
    return scores.masked_fill_(~visible, -torch.inf)


def _visibly(op: Callable[..., Tensor], tensor: Tensor, argument: int) -> Tensor:
    """Run the op below autograd, for a Function's forward.

    A forward runs without gradients, and torch.compile drops the gradients of an input that is
    mutated then. So they are enabled.
    """
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        return op(tensor, argument)


class _Softmax(torch.autograd.Function):
    """y = softmax(x), in place or not; its gradient is y * (g - sum(g * y))."""

    @staticmethod
    def forward(op: Callable[..., Tensor], in_place: bool, x: Tensor, dim: int) -> Tensor:
        y = _visibly(op, x, dim)
        return x if in_place else y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, in_place, x, ctx.dim = inputs
        ctx.dtype = x.dtype
        if in_place:
            ctx.mark_dirty(x)
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        # The formula as torch has it: summed in float32, and differentiable again.
        x_gradient = torch.ops.aten._softmax_backward_data(gradient, y, ctx.dim, ctx.dtype)
        return None, None, x_gradient, None


class _ApplyCausalMask(torch.autograd.Function):
    """The mask, in place. No gradient passes where it masks."""

    @staticmethod
    def forward(op: Callable[..., Tensor], scores: Tensor, q_offset: int) -> Tensor:
        _visibly(op, scores, q_offset)
        return scores

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, scores, ctx.q_offset = inputs
        ctx.mark_dirty(scores)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # Not a product: a gradient of inf or NaN is hidden too.
        return None, gradient.tril(ctx.q_offset), None


def _bump_version(tensor: Tensor | None) -> None:
    """Make a backward that has saved the tensor raise; the op's checks refuse None."""
    if tensor is not None:
        torch.autograd.graph.increment_version(tensor)


def _register_autograd(namespace: str) -> None:
    ops = getattr(torch.ops, namespace)

    def below(op: Any, tensor: Tensor, argument: int) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            result: Tensor = op(tensor, argument)
            return result

    def softmax(x: Tensor, dim: int = -1) -> Tensor:
        if needs_gradient(f"{namespace}::softmax", {"x": x}):
            result: Tensor = _Softmax.apply(ops.softmax, False, x, dim)
            return result
        return below(ops.softmax, x, dim)

    def softmax_(x: Tensor, dim: int = -1) -> Tensor:
        if needs_gradient(f"{namespace}::softmax_", {"x": x}):
            check_not_a_leaf("softmax_", "x", x, "pass x.clone()")
            result: Tensor = _Softmax.apply(ops.softmax_, True, x, dim)
            return result
        _bump_version(x)
        return below(ops.softmax_, x, dim)

    def apply_causal_mask_(scores: Tensor, q_offset: int = 0) -> Tensor:
        if needs_gradient(f"{namespace}::apply_causal_mask_", {"scores": scores}):
            check_not_a_leaf("apply_causal_mask_", "scores", scores, "pass scores.clone()")
            result: Tensor = _ApplyCausalMask.apply(ops.apply_causal_mask_, scores, q_offset)
            return result
        _bump_version(scores)
        return below(ops.apply_causal_mask_, scores, q_offset)

    for kernel in (softmax, softmax_, apply_causal_mask_):
        python_kernel(f"{namespace}::{kernel.__name__}", "Autograd")(kernel)


def _register_functional(namespace: str, name: str, functional: str) -> None:
    """`functional` replaces the op in functional graphs, such as those of torch.compile."""
    packet = getattr(getattr(torch.ops, namespace), name)
    functional_op = getattr(getattr(torch.ops, namespace), functional)

    @packet.default.py_functionalize_impl
    def functionalize(ctx: Any, tensor: Any, argument: int | None = None) -> Any:
        arguments = () if argument is None else (argument,)
        with ctx.redispatch_to_next():
            result = functional_op(ctx.unwrap_tensors(tensor), *arguments)
        ctx.replace(tensor, result)
        ctx.commit_update(tensor)
        ctx.sync(tensor)
        return tensor

    if functional == "softmax":
        return

    @torch.library.register_fake(f"{namespace}::{functional}")
    def fake(tensor: Tensor, argument: int = 0) -> Tensor:
        return torch.empty_like(tensor)

    @torch.library.impl(f"{namespace}::{functional}", "CompositeExplicitAutograd")
    def to_copy(tensor: Tensor, argument: int = 0) -> Tensor:
        result: Tensor = packet(torch.empty_like(tensor).copy_(tensor), argument)
        return result


for _namespace in NAMESPACES:
    _register_autograd(_namespace)
    _register_functional(_namespace, "softmax_", "softmax")
    _register_functional(_namespace, "apply_causal_mask_", "_apply_causal_mask_to_copy")
