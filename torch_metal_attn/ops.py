"""The Python side of each op of csrc/library.cpp: fake kernel, CPU kernel and autograd."""

from typing import Any

import torch
from torch import SymInt, Tensor

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


@torch.library.register_fake("metal_attn::flash_fwd")
def _flash_fwd_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal_offset: int | None = None,
) -> FlashFwdResult:
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


def _flash_fwd_setup_context(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: FlashFwdResult
) -> None:
    """Nothing to save: there is no backward kernel."""


def _flash_fwd_backward(ctx: Any, *gradients: Tensor) -> Any:
    raise NotImplementedError(
        "metal_attn::flash_fwd has no backward yet: run under torch.no_grad(), detach q, "
        "k and v, or train with torch.nn.functional.scaled_dot_product_attention"
    )


torch.library.register_autograd(
    "metal_attn::flash_fwd", _flash_fwd_backward, setup_context=_flash_fwd_setup_context
)
