"""`metal_attn::softmax`, `softmax_` and `apply_causal_mask_` in Python.

Contains fake kernels, CPU kernels, autograd, and what replaces mutating ops in functional graphs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.ops.cpu import cpu_kernel
from torch_metal_attn.ops.differentiation import (
    autograd_kernel,
    check_not_a_leaf,
    needs_gradient,
    run_below_autograd,
    save,
    saved,
)
from torch_metal_attn.ops.fake import register_fake

_OPS = torch.ops.metal_attn


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


def _run_with_grad(op: Callable[..., Tensor], tensor: Tensor, argument: int) -> Tensor:
    """Run the op with gradients on; otherwise torch.compile drops a mutated input's gradient."""
    with torch.enable_grad():
        return run_below_autograd(op, tensor, argument)


class _Softmax(torch.autograd.Function):
    """y = softmax(x), in place or not; its gradient is y * (g - sum(g * y))."""

    @staticmethod
    def forward(op: Callable[..., Tensor], in_place: bool, x: Tensor, dim: int) -> Tensor:
        y = _run_with_grad(op, x, dim)
        return x if in_place else y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, in_place, x, ctx.dim = inputs
        ctx.dtype = x.dtype
        if in_place:
            ctx.mark_dirty(x)
        save(ctx, output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (y,) = saved(ctx)
        # torch's op sums in float32 and is differentiable.
        x_gradient = torch.ops.aten._softmax_backward_data(gradient, y, ctx.dim, ctx.dtype)
        return None, None, x_gradient, None


class _ApplyCausalMask(torch.autograd.Function):
    @staticmethod
    def forward(scores: Tensor, q_offset: int) -> Tensor:
        _run_with_grad(_OPS.apply_causal_mask_, scores, q_offset)
        return scores

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        scores, ctx.q_offset = inputs
        ctx.mark_dirty(scores)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # A product with 0 would not hide a gradient of inf or NaN.
        return gradient.tril(ctx.q_offset), None


def _bump_version(tensor: Tensor | None) -> None:
    """Let any backward that saved the tensor raise. The op's checks refuse None later."""
    if tensor is not None:
        torch.autograd.graph.increment_version(tensor)


@autograd_kernel("softmax")
def _softmax(x: Tensor, dim: int = -1) -> Any:
    if needs_gradient("metal_attn::softmax", {"x": x}):
        return _Softmax.apply(_OPS.softmax, False, x, dim)
    return run_below_autograd(_OPS.softmax, x, dim)


@autograd_kernel("softmax_")
def _softmax_inplace(x: Tensor, dim: int = -1) -> Any:
    if needs_gradient("metal_attn::softmax_", {"x": x}):
        check_not_a_leaf("softmax_", "x", x, "pass x.clone()")
        return _Softmax.apply(_OPS.softmax_, True, x, dim)
    _bump_version(x)
    return run_below_autograd(_OPS.softmax_, x, dim)


@autograd_kernel("apply_causal_mask_")
def _apply_causal_mask(scores: Tensor, q_offset: int = 0) -> Any:
    if needs_gradient("metal_attn::apply_causal_mask_", {"scores": scores}):
        check_not_a_leaf("apply_causal_mask_", "scores", scores, "pass scores.clone()")
        return _ApplyCausalMask.apply(scores, q_offset)
    _bump_version(scores)
    return run_below_autograd(_OPS.apply_causal_mask_, scores, q_offset)


def _replace_in_graphs(op: Any, functional: Any) -> None:
    """`functional` replaces the op in functional graphs, such as those of torch.compile."""

    @op.default.py_functionalize_impl
    def functionalize(ctx: Any, tensor: Any, argument: int | None = None) -> Any:
        arguments = () if argument is None else (argument,)
        with ctx.redispatch_to_next():
            result = functional(ctx.unwrap_tensors(tensor), *arguments)
        ctx.replace(tensor, result)
        ctx.commit_update(tensor)
        ctx.sync(tensor)
        return tensor


@torch.library.register_fake("metal_attn::_apply_causal_mask_to_copy")
def _masked_copy_fake(scores: Tensor, q_offset: int = 0) -> Tensor:
    return torch.empty_like(scores)


@torch.library.impl("metal_attn::_apply_causal_mask_to_copy", "CompositeExplicitAutograd")
def _masked_copy(scores: Tensor, q_offset: int = 0) -> Tensor:
    return _OPS.apply_causal_mask_(torch.empty_like(scores).copy_(scores), q_offset)


_replace_in_graphs(_OPS.softmax_, _OPS.softmax)
_replace_in_graphs(_OPS.apply_causal_mask_, _OPS._apply_causal_mask_to_copy)
