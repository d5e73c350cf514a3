"""`metal_attn::flash_fwd` and `flash_varlen_fwd` in Python: fake kernels, CPU kernels, autograd."""

from collections.abc import Callable
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.autograd import forward_ad

from torch_metal_attn import reference
from torch_metal_attn.ops import flash_fwd_checks as checks
from torch_metal_attn.simulator import session

FlashFwdResult = tuple[Tensor, Tensor]


def _empty_like_query(q: Tensor, head_dim: int) -> Tensor:
    """An uninitialised dense tensor of q's shape but for its last size, in memory in q's order.

    So a (B, L, H, D) tensor seen as (B, H, L, D) gives a result that is contiguous when seen as (B,
    L, H, Dv).
    """

    def step_of(dim: int) -> tuple[bool, int]:
        # A broadcast dimension says nothing about the order and goes outermost, as in C++.
        stride: int = q.stride(dim)
        return bool(stride == 0), stride

    order = sorted(range(q.dim() - 1), key=step_of, reverse=True)
    strides: list[int | SymInt] = [1] * q.dim()
    step: int | SymInt = head_dim
    for dim in reversed(order):
        strides[dim] = step
        step = step * max(q.size(dim), 1)
    return q.new_empty_strided((*q.shape[:-1], head_dim), strides)


@torch.library.register_fake("metal_attn_simulator::flash_fwd")
@torch.library.register_fake("metal_attn::flash_fwd")
def _flash_fwd_fake(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> FlashFwdResult:
    checks.dense(q, k, v, options)
    return _empty_like_query(q, v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.register_fake("metal_attn_simulator::flash_varlen_fwd")
@torch.library.register_fake("metal_attn::flash_varlen_fwd")
def _flash_varlen_fwd_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **options: Any,
) -> FlashFwdResult:
    checks.varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, options)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    return _empty_like_query(q, v.shape[-1]), lse


def _register_cpu(name: str, oracle: Callable[..., FlashFwdResult]) -> None:
    """The shader if the simulator is on, else the reference: the same checks either way."""

    def flash_fwd(*arguments: Any, **options: Any) -> FlashFwdResult:
        if session.active():
            with session.raising():
                result: FlashFwdResult = getattr(torch.ops.metal_attn_simulator, name)(
                    *arguments, **options
                )
                return result
        getattr(torch.ops.metal_attn, f"{name}_explain")(*arguments, **options)
        out, lse = oracle(*arguments, **options)
        q, _, v = arguments[:3]
        return _empty_like_query(q, v.shape[-1]).copy_(out), lse

    torch.library.impl(f"metal_attn::{name}", "CPU")(flash_fwd)


class _FlashFwd(torch.autograd.Function):
    """The op for autograd: it runs, and asking for any derivative raises."""

    @staticmethod
    def forward(
        op: Callable[..., FlashFwdResult],
        positional: int,
        names: tuple[str, ...],
        *arguments: Any,
    ) -> FlashFwdResult:
        options = dict(zip(names, arguments[positional:], strict=True))
        with torch._C._AutoDispatchBelowAutograd():
            return op(*arguments[:positional], **options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: FlashFwdResult) -> None:
        """Nothing to save: there is no backward kernel."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError(
            "metal_attn::flash_fwd has no backward yet: run under torch.no_grad(), detach its "
            "tensors, or train with torch.nn.functional.scaled_dot_product_attention"
        )


def _register_autograd(namespace: str, name: str) -> None:
    op = getattr(getattr(torch.ops, namespace), name)

    # Not torch.library.register_autograd, which drops the tangents of forward-mode derivatives.
    def flash_fwd(*arguments: Any, **options: Any) -> FlashFwdResult:
        # None passes here and is refused below, by the op's own checks.
        values = (*arguments, *options.values())
        tensors = [value for value in values if isinstance(value, Tensor)]
        if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
            raise NotImplementedError(
                f"{namespace}::{name} has no forward-mode derivative (jvp): detach its tensors"
            )
        call = (op, len(arguments), tuple(options), *values)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            result: FlashFwdResult = _FlashFwd.apply(*call)
            return result
        return _FlashFwd.forward(*call)

    torch.library.impl(f"{namespace}::{name}", "Autograd")(flash_fwd)


_register_cpu("flash_fwd", reference.attention)
_register_cpu("flash_varlen_fwd", reference.varlen_attention)
for _namespace in ("metal_attn", "metal_attn_simulator"):
    for _name in ("flash_fwd", "flash_varlen_fwd"):
        _register_autograd(_namespace, _name)
