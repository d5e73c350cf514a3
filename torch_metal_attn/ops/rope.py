"""`metal_attn::rope`, `rope_` and `rope_tables` in Python: fake, CPU and autograd kernels."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.ops.cpu import cpu_kernel
from torch_metal_attn.ops.differentiation import (
    apply,
    autograd_kernel,
    below_autograd,
    check_not_a_leaf,
    count_writes,
    needs_gradient,
    run_below_autograd,
    save,
    saved,
)
from torch_metal_attn.ops.fake import check, register_fake
from torch_metal_attn.ops.layout import empty_like_query
from torch_metal_attn.reference import rotate_pairs
from torch_metal_attn.runtime.refusals import invalid

_OPS = torch.ops.metal_attn


@register_fake("rope")
def _fake(q: Tensor, k: Tensor | None, *_: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return empty_like_query(q), q.new_empty(0) if k is None else empty_like_query(k)


@register_fake("rope_tables")
def _fake_tables(
    inv_freq: Tensor, positions: Tensor, *, dtype: torch.dtype | None = None, **_: Any
) -> tuple[Tensor, Tensor]:
    shape = (*positions.shape, inv_freq.shape[0])
    cos = inv_freq.new_empty(shape, dtype=dtype or torch.float32)
    return cos, torch.empty_like(cos)


def _rows(
    q: Tensor,
    positions: Tensor | None = None,
    seqlen_offset: int = 0,
    seqlen_offsets: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """The row of cos and sin of each token: (1, L) or (B, L) int64."""
    if positions is not None:
        rows = positions.long()
        return rows if rows.dim() == 2 else rows[None]
    rows = torch.arange(q.shape[2], device=q.device)[None] + seqlen_offset
    return rows if seqlen_offsets is None else rows + seqlen_offsets.long()[:, None]


def _check_rows(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, **options: Any) -> None:
    """Raise ValueError for a row outside the tables, which the shader skips."""
    rows = _rows(q, **options)
    if rows.numel() == 0:
        return
    low, high = (int(bound) for bound in rows.aminmax())
    if low < 0 or high >= cos.shape[-2]:
        passed = [n for n in ("positions", "seqlen_offsets") if options.get(n) is not None]
        raise invalid(
            f"`{passed[0] if passed else 'seqlen_offset'}` asks for rows {low} to {high} of cos; "
            f"they must be in 0..{cos.shape[-2] - 1}"
        )


@cpu_kernel("rope_", _check_rows)
def _cpu_inplace(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, **options: Any) -> None:
    rows = _rows(q, **options)

    def gather(table: Tensor) -> Tensor:
        if table.dim() == 3 and table.shape[0] > 1:
            batch = torch.arange(table.shape[0], device=table.device)[:, None]
            return table[batch, rows][:, None].float()
        return (table[0] if table.dim() == 3 else table)[rows][:, None].float()

    columns = 2 * cos.shape[-1]
    if columns == 0:
        return
    cos, sin = gather(cos), gather(sin)
    if options.get("conjugate", False):
        sin = -sin
    interleaved = options.get("interleaved", False)
    for x in (q, k):
        if x is not None:
            rotated = x[..., :columns]
            rotated.copy_(rotate_pairs(rotated.float(), cos, sin, interleaved))


@cpu_kernel("rope", _check_rows)
def _cpu(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    q = empty_like_query(q).copy_(q)
    k = None if k is None else empty_like_query(k).copy_(k)
    _cpu_inplace(q, k, cos, sin, **options)
    return q, q.new_empty(0) if k is None else k


@cpu_kernel("rope_tables")
def _cpu_tables(
    inv_freq: Tensor,
    positions: Tensor,
    *,
    attention_factor: float = 1.0,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    angles = positions[..., None].float() * inv_freq
    dtype = dtype or torch.float32
    return (angles.cos() * attention_factor).to(dtype), (angles.sin() * attention_factor).to(dtype)


class _Rope(torch.autograd.Function):
    """`rope` of q and k, or `rope_` of q alone: autograd refuses to write two views in one call.

    A rotation is orthogonal, so its gradient is the inverse rotation.
    """

    @staticmethod
    def forward(
        in_place: bool, numbers: dict[str, Any], q: Tensor, k: Tensor | None, *tables: Tensor | None
    ) -> Any:
        with below_autograd():
            result = _call(_OPS.rope_ if in_place else _OPS.rope, q, k, tables, numbers)
        return q if in_place else result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        in_place, numbers, q, k, *tables = inputs
        ctx.numbers = {**numbers, "conjugate": not numbers.get("conjugate", False)}
        save(ctx, *tables)
        if in_place:
            ctx.mark_dirty(q)
        elif k is None:
            ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        needed = ctx.needs_input_grad[2:4]
        q, *k = [x for x, need in zip(gradients, needed, strict=False) if need]
        rotated = iter(_call(_OPS.rope, q, k[0] if k else None, saved(ctx), ctx.numbers))
        return (None, None, *(next(rotated) if need else None for need in needed), *(None,) * 4)


def _call(
    op: Callable[..., Any],
    q: Tensor,
    k: Tensor | None,
    tables: Sequence[Tensor | None],
    numbers: dict[str, Any],
) -> Any:
    cos, sin, positions, seqlen_offsets = tables
    return op(*(q, k, cos, sin), positions=positions, seqlen_offsets=seqlen_offsets, **numbers)


def _split_options(
    cos: Tensor, sin: Tensor, options: dict[str, Any]
) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
    """The tables and the other tensors in the order of `_call`, and the options without tensors."""
    chosen = ("positions", "seqlen_offsets")
    numbers = {name: x for name, x in options.items() if name not in chosen}
    return (cos, sin, *map(options.get, chosen)), numbers


def _needs(name: str, q: Tensor, k: Tensor | None, tables: Sequence[Tensor | None]) -> bool:
    constants = ("cos", "sin", "positions")
    arguments = dict(zip(("q", "k", *constants), (q, k, *tables), strict=False))
    return needs_gradient(f"metal_attn::{name}", arguments, constants)


@autograd_kernel("rope")
def _rope(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, **options: Any) -> Any:
    tables, numbers = _split_options(cos, sin, options)
    arguments: tuple[Any, ...] = (False, numbers, q, k, *tables)
    if _needs("rope", q, k, tables):
        return apply(_Rope, *arguments)
    return _Rope.forward(*arguments)


@autograd_kernel("rope_")
def _rope_inplace(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, **options: Any) -> None:
    tables, numbers = _split_options(cos, sin, options)
    if not _needs("rope_", q, k, tables):
        run_below_autograd(_OPS.rope_, q, k, cos, sin, **options)
        return
    check("rope_", (q, k, cos, sin), options)  # all checks precede the first write
    rotated = {n: x for n, x in (("q", q), ("k", k)) if x is not None}
    for name, x in rotated.items():
        check_not_a_leaf("rope_", name, x, "call rope")
    for x in rotated.values():
        _Rope.apply(True, numbers, x, None, *tables)


@autograd_kernel("rope_tables")
def _rope_tables(inv_freq: Tensor, positions: Tensor, **options: Any) -> Any:
    arguments = {"inv_freq": inv_freq, "positions": positions}
    needs_gradient("metal_attn::rope_tables", arguments, tuple(arguments))
    return run_below_autograd(_OPS.rope_tables, inv_freq, positions, **options)


count_writes("rope_", lambda arguments: ["q"] if arguments["k"] is None else ["q", "k"])
