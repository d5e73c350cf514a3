"""`metal_attn::flash_fwd` in Python: fake kernel, CPU kernel and autograd."""

from collections.abc import Callable
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.autograd import forward_ad

from torch_metal_attn import reference
from torch_metal_attn.simulator import session

FlashFwdResult = tuple[Tensor, Tensor]


def _empty_like_query(q: Tensor, head_dim: int) -> Tensor:
    """An uninitialised dense (B, Hq, Lq, head_dim) tensor, in memory in the order of q.

    So a (B, L, H, D) tensor seen as (B, H, L, D) gives a result that is contiguous when seen as (B,
    L, H, Dv).
    """

    def step_of(dim: int) -> tuple[bool, int]:
        # A broadcast dimension says nothing about the order and goes outermost, as in C++.
        stride: int = q.stride(dim)
        return bool(stride == 0), stride

    order = sorted(range(3), key=step_of, reverse=True)
    strides: list[int | SymInt] = [1, 1, 1, 1]
    step: int | SymInt = head_dim
    for dim in reversed(order):
        strides[dim] = step
        step = step * max(q.size(dim), 1)
    return q.new_empty_strided((*q.shape[:3], head_dim), strides)


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """What csrc/ops/flash_fwd.cpp checks, for tensors without data: meta, and while compiling."""
    rule = torch._check_value
    for name, tensor in (("k", k), ("v", v)):
        rule(
            tensor.device == q.device,
            lambda n=name, t=tensor: (
                f"{n} is on {t.device} and q on {q.device}; they must be on one device"
            ),
        )
        rule(
            tensor.dtype == q.dtype,
            lambda n=name, t=tensor: f"{n} has dtype {t.dtype} and q {q.dtype}; they must be alike",
        )
    rule(
        q.dtype in (torch.float32, torch.float16, torch.bfloat16),
        lambda: f"q has dtype {q.dtype}; it must be float32, float16 or bfloat16",
    )
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        rule(
            tensor.dim() == 4,
            lambda n=name, t=tensor: (
                f"{n} has {t.dim()} dimensions, shape {tuple(t.shape)}; it must have 4: "
                "(batch, heads, length, head_dim)"
            ),
        )
    alike = (
        ("k", k, "q", q, 0, "a batch"),
        ("v", v, "q", q, 0, "a batch"),
        ("v", v, "k", k, 1, "a number of heads"),
        ("v", v, "k", k, 2, "a length"),
        ("k", k, "q", q, 3, "a head dim"),
    )
    for name, tensor, other_name, other, dim, what in alike:
        size, other_size = tensor.shape[dim], other.shape[dim]
        rule(
            size == other_size,
            lambda n=name, s=size, o=other_name, z=other_size, w=what: (
                f"{n} has {w} of {s} and {o} of {z}; they must be equal"
            ),
        )
    heads, kv_heads = q.shape[1], k.shape[1]
    rule(
        heads == 0 or (kv_heads > 0 and heads % kv_heads == 0),
        lambda: f"q has {heads} heads and k {kv_heads}; k's must divide q's",
    )
    for name, tensor in (("q", q), ("v", v)):
        head_dim = tensor.shape[3]
        rule(
            8 <= head_dim <= 256 and head_dim % 8 == 0,
            lambda n=name, d=head_dim: (
                f"{n} has a head dim of {d}; it must be a multiple of 8 in 8..256"
            ),
        )
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        rule(
            tensor.stride(3) == 1,
            lambda n=name, t=tensor: (
                f"{n} has strides {t.stride()}; the last must be 1: call {n}.contiguous() first"
            ),
        )


@torch.library.register_fake("metal_attn_simulator::flash_fwd")
@torch.library.register_fake("metal_attn::flash_fwd")
def _flash_fwd_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal_offset: int | None = None,
) -> FlashFwdResult:
    _check(q, k, v)
    return _empty_like_query(q, v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.impl("metal_attn::flash_fwd", "CPU")
def _flash_fwd_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal_offset: int | None = None,
) -> FlashFwdResult:
    """The shader if the simulator is on, else the reference: the same checks either way."""
    options: dict[str, Any] = {"softmax_scale": softmax_scale, "causal_offset": causal_offset}
    if session.active():
        with session.raising():
            return torch.ops.metal_attn_simulator.flash_fwd(q, k, v, **options)
    torch.ops.metal_attn.flash_fwd_explain(q, k, v, **options)
    out, lse = reference.attention(q, k, v, **options)
    return _empty_like_query(q, v.shape[-1]).copy_(out), lse


class _FlashFwd(torch.autograd.Function):
    """The op for autograd: it runs, and asking for any derivative raises."""

    @staticmethod
    def forward(
        op: Callable[..., FlashFwdResult], options: dict[str, Any], *tensors: Tensor
    ) -> FlashFwdResult:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*tensors, **options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: FlashFwdResult) -> None:
        """Nothing to save: there is no backward kernel."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError(
            "metal_attn::flash_fwd has no backward yet: run under torch.no_grad(), detach q, "
            "k and v, or train with torch.nn.functional.scaled_dot_product_attention"
        )


def _register_autograd(op: Callable[..., FlashFwdResult], name: str) -> None:
    # Not torch.library.register_autograd, which drops the tangents of forward-mode derivatives.
    def flash_fwd(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> FlashFwdResult:
        # None passes here and is refused below, by the op's own checks.
        tensors = [tensor for tensor in (q, k, v) if tensor is not None]
        if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
            raise NotImplementedError(
                f"{name} has no forward-mode derivative (jvp): detach q, k and v"
            )
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            result: FlashFwdResult = _FlashFwd.apply(op, options, q, k, v)
            return result
        return _FlashFwd.forward(op, options, q, k, v)

    torch.library.impl(name, "Autograd")(flash_fwd)


_register_autograd(torch.ops.metal_attn.flash_fwd, "metal_attn::flash_fwd")
_register_autograd(torch.ops.metal_attn_simulator.flash_fwd, "metal_attn_simulator::flash_fwd")
