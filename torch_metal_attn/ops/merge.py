"""`metal_attn::merge_state`, `merge_state_` and `merge_splits`: fake and CPU kernels, autograd."""

from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.ops.cpu import cpu_kernel
from torch_metal_attn.ops.differentiation import (
    apply,
    autograd_kernel,
    below_autograd,
    needs_gradient,
    refuse,
    save,
    saved,
)
from torch_metal_attn.ops.fake import register_fake
from torch_metal_attn.ops.layout import empty_like_query

State = tuple[Tensor, Tensor]  # out, lse


def _lse_of(rows: Tensor) -> Tensor:
    """Rows (B, H, L) or packed (T, H) in the layout of log-sum-exps: (B, H, L) or (H, T)."""
    return rows.transpose(0, 1) if rows.dim() == 2 else rows


@register_fake("merge_state")
def _merge_state_fake(out_a: Tensor, lse_a: Tensor, *_: Tensor, **options: Any) -> State:
    return empty_like_query(out_a), lse_a.new_empty(lse_a.shape)


@register_fake("merge_splits")
def _merge_splits_fake(
    partial_out: Tensor,
    partial_lse: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    **options: Any,
) -> State:
    rows = partial_out.shape[:3]
    out = partial_out.new_empty((*rows, partial_out.shape[-1]), dtype=out_dtype)
    return out, partial_lse.new_empty(rows)


def _merged(out: Tensor, lse: Tensor, sink: Tensor | None = None) -> State:
    """Merge S states, out (..., S, D) and lse (..., S), and a sink (..., 1)."""
    logits = lse if sink is None else torch.cat([lse, sink], -1)
    # The clamp avoids -inf - -inf, which is NaN.
    row_max = logits.amax(-1, keepdim=True).clamp_min(torch.finfo(lse.dtype).min)
    weights = (logits - row_max).exp()
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    shares = (weights / total.masked_fill(empty, 1.0))[..., : lse.shape[-1], None]
    # 0 * NaN is NaN, so the output of a state without keys must not be multiplied.
    merged = (out.masked_fill((lse == -torch.inf)[..., None], 0.0) * shares).sum(-2)
    return merged, (row_max + total.log()).masked_fill(empty, -torch.inf).squeeze(-1)


def _normalised_lse(lse: Tensor, infinity_is_empty: bool = False) -> Tensor:
    return lse.masked_fill(lse == torch.inf, -torch.inf) if infinity_is_empty else lse


@cpu_kernel("merge_state_")
def _merge_state_inplace_cpu(
    *state: Tensor, infinity_is_empty: bool = False, mask: Tensor | None = None
) -> None:
    out, lse = _merge_state_cpu(*state, infinity_is_empty=infinity_is_empty)
    if mask is not None:
        rows = mask[:, None] if mask.dim() == 1 else mask[:, None, :]
        out = torch.where(rows[..., None], out, state[0])
        lse = torch.where(_lse_of(rows), lse, state[1])
    state[0].copy_(out)
    state[1].copy_(lse)


@cpu_kernel("merge_state")
def _merge_state_cpu(*state: Tensor, infinity_is_empty: bool = False) -> State:
    out_a, lse_a, out_b, lse_b = state
    rows_a, rows_b = (_lse_of(_normalised_lse(lse, infinity_is_empty)) for lse in (lse_a, lse_b))
    outs, lses = torch.stack([out_a, out_b], -2), torch.stack([rows_a, rows_b], -1)
    merged, lse = _merged(outs.float(), lses)
    # Merging with a state without keys returns the other state, bit for bit.
    for rows, other, other_rows in ((rows_b, out_a, rows_a), (rows_a, out_b, rows_b)):
        empty = rows == -torch.inf
        live = (other_rows != -torch.inf)[..., None]
        merged = torch.where(empty[..., None], torch.where(live, other.float(), 0.0), merged)
        lse = torch.where(empty, other_rows, lse)
    return empty_like_query(out_a).copy_(merged), _lse_of(lse).contiguous()


@cpu_kernel("merge_splits")
def _merge_splits_cpu(
    partial_out: Tensor,
    partial_lse: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    learnable_sink: Tensor | None = None,
    infinity_is_empty: bool = False,
) -> State:
    sink = learnable_sink
    if sink is not None:
        sink = sink.float()[:, None, None].expand(*partial_lse.shape[:3], 1)
    out, lse = _merged(partial_out, _normalised_lse(partial_lse, infinity_is_empty), sink)
    return out.to(out_dtype or torch.float32), lse


class _MergeState(torch.autograd.Function):
    """out = w_a out_a + w_b out_b with w_a = sigmoid(lse_a - lse_b). Its gradients are

    d out_a = w_a dout      d lse_a = w_a dlse + w_a w_b sum(dout (out_a - out_b))

    and the same for b. The formulas do not use the results, whose rounding would add errors.
    """

    @staticmethod
    def forward(options: dict[str, bool], *states: Tensor) -> State:
        with below_autograd():
            return torch.ops.metal_attn.merge_state(*states, **options)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: State) -> None:
        ctx.options, *states = inputs
        save(ctx, *states)

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> Any:
        out_a, lse_a, out_b, lse_b = saved(ctx)
        lse_a, lse_b = (_normalised_lse(lse, **ctx.options) for lse in (lse_a, lse_b))
        empty_a, empty_b = lse_a == -torch.inf, lse_b == -torch.inf
        # A weight of 0 is not enough, as the output of a state without keys may be NaN.
        ahead = (lse_a - lse_b).masked_fill(empty_a & empty_b, 0.0)
        weight_a = ahead.sigmoid().masked_fill(empty_a, 0.0)
        weight_b = (-ahead).sigmoid().masked_fill(empty_b, 0.0)
        distance = out_a.float() - out_b.float()
        distance = distance.masked_fill(_lse_of(empty_a | empty_b)[..., None], 0.0)
        dout_rows = dout.float()
        moved = weight_a * weight_b * _lse_of((dout_rows * distance).sum(-1))
        dout_a, dout_b = (
            (_lse_of(weight)[..., None] * dout_rows).to(dout.dtype)
            for weight in (weight_a, weight_b)
        )
        dlse_a, dlse_b = weight_a * dlse + moved, weight_b * dlse - moved
        return None, dout_a, dlse_a, dout_b, dlse_b


@autograd_kernel("merge_state")
def _merge_state(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, **options: bool
) -> State:
    states = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    if needs_gradient("metal_attn::merge_state", states):
        return apply(_MergeState, options, *states.values())
    return _MergeState.forward(options, *states.values())


refuse(
    "merge_state_",
    "detach its arguments, or use merge_state",
    lambda arguments: {"out_a": ("lse_a", "out_b", "lse_b"), "lse_a": ("lse_b",)},
)
refuse("merge_splits", "detach its arguments, or join states with merge_state")
