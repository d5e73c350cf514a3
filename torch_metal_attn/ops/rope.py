"""`metal_attn::rope`, `rope_` and `rope_tables` in Python: fake, CPU and autograd kernels."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from torch_metal_attn.ops.differentiation import (
    apply,
    below_autograd,
    count_writes,
    refuse_tangents,
)
from torch_metal_attn.ops.fake import NAMESPACES, register_fake
from torch_metal_attn.ops.layout import empty_like_query
from torch_metal_attn.ops.refusals import python_kernel, unmarked
from torch_metal_attn.reference import rotate_pairs
from torch_metal_attn.runtime import session


def _empty_rotated(x: Tensor) -> Tensor:
    """An uninitialised tensor like x, without gaps and with the last dimension innermost."""
    return empty_like_query(x, x.shape[-1])


@register_fake("rope")
def _fake(q: Tensor, k: Tensor | None, *_: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return _empty_rotated(q), q.new_empty(0) if k is None else _empty_rotated(k)


@register_fake("rope_")
def _fake_inplace(*_: Tensor | None, **options: Any) -> None:
    pass


@register_fake("rope_tables")
def _fake_tables(
    inv_freq: Tensor, positions: Tensor, *, dtype: torch.dtype | None = None, **_: Any
) -> tuple[Tensor, Tensor]:
    shape = (*positions.shape, inv_freq.shape[0])
    cos, sin = (inv_freq.new_empty(shape, dtype=dtype or torch.float32) for _ in range(2))
    return cos, sin


def _rows(
    q: Tensor,
    table_rows: int,
    *,
    positions: Tensor | None = None,
    seqlen_offset: int = 0,
    seqlen_offsets: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """The row of cos and sin of each token: (1, L) or (B, L) int64. ValueError if it is missing."""
    if positions is not None:
        name, rows = "positions", positions.long()
        rows = rows if rows.dim() == 2 else rows[None]
    else:
        name, rows = "seqlen_offset", torch.arange(q.shape[2], device=q.device)[None]
        rows = rows + seqlen_offset
        if seqlen_offsets is not None:
            name, rows = "seqlen_offsets", rows + seqlen_offsets.long()[:, None]
    if rows.numel() > 0:
        low, high = (int(bound) for bound in rows.aminmax())
        if low < 0 or high >= table_rows:
            raise ValueError(
                unmarked(
                    f"`{name}` asks for rows {low} to {high} of cos; they must be in "
                    f"0..{table_rows - 1}"
                )
            )
    return rows


def _reference(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, options: dict[str, Any]
) -> list[Tensor]:
    """The rotated columns of q and, if there is one, of k, in float32."""
    rows = _rows(q, cos.shape[-2], **options)

    def gather(table: Tensor) -> Tensor:
        if table.dim() == 3 and table.shape[0] > 1:
            batch = torch.arange(table.shape[0], device=table.device)[:, None]
            return table[batch, rows][:, None].float()
        return (table[0] if table.dim() == 3 else table)[rows][:, None].float()

    cos, sin = gather(cos), gather(sin)
    if options.get("conjugate", False):
        sin = -sin
    interleaved = options.get("interleaved", False)
    if cos.shape[-1] == 0:
        return [x[..., :0].float() for x in (q, k) if x is not None]
    columns = 2 * cos.shape[-1]
    return [
        rotate_pairs(x[..., :columns].float(), cos, sin, interleaved)
        for x in (q, k)
        if x is not None
    ]


def _cpu(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, **options: Any) -> Any:
    """The shader if the simulator is on, else plain torch, with the same checks."""
    torch.ops.metal_attn_explain.rope(q, k, cos, sin, **options)
    if session.active():
        _rows(q, cos.shape[-2], **options)
        with session.raising():
            return torch.ops.metal_attn_simulator.rope(q, k, cos, sin, **options)
    results = []
    tensors = [x for x in (q, k) if x is not None]
    for x, rotated in zip(tensors, _reference(q, k, cos, sin, options), strict=True):
        result = _empty_rotated(x).copy_(x)
        result[..., : rotated.shape[-1]] = rotated
        results.append(result)
    return results[0], results[1] if k is not None else q.new_empty(0)


def _cpu_inplace(q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, **options: Any) -> None:
    torch.ops.metal_attn_explain.rope_(q, k, cos, sin, **options)
    if session.active():
        _rows(q, cos.shape[-2], **options)
        with session.raising():
            torch.ops.metal_attn_simulator.rope_(q, k, cos, sin, **options)
        return
    tensors = [x for x in (q, k) if x is not None]
    for x, rotated in zip(tensors, _reference(q, k, cos, sin, options), strict=True):
        x[..., : rotated.shape[-1]] = rotated


def _cpu_tables(
    inv_freq: Tensor,
    positions: Tensor,
    *,
    attention_factor: float = 1.0,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    options: dict[str, Any] = {"attention_factor": attention_factor, "dtype": dtype}
    if session.active():
        with session.raising():
            tables: tuple[Tensor, Tensor] = torch.ops.metal_attn_simulator.rope_tables(
                inv_freq, positions, **options
            )
            return tables
    torch.ops.metal_attn_explain.rope_tables(inv_freq, positions, **options)
    angles = positions[..., None].float() * inv_freq
    table_dtype = dtype or torch.float32
    cos = (angles.cos() * attention_factor).to(table_dtype)
    return cos, (angles.sin() * attention_factor).to(table_dtype)


class _Rope(torch.autograd.Function):
    """The op for autograd. A rotation is orthogonal, so its gradient is the inverse rotation."""

    @staticmethod
    def forward(
        op: Callable[..., Any],
        q: Tensor,
        k: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None,
        seqlen_offsets: Tensor | None,
        numbers: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        with below_autograd():
            result: tuple[Tensor, Tensor] = op(
                q, k, cos, sin, positions=positions, seqlen_offsets=seqlen_offsets, **numbers
            )
            return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.op, _, k, cos, sin, positions, seqlen_offsets, ctx.numbers = inputs
        ctx.save_for_backward(cos, sin, positions, seqlen_offsets)
        if k is None:
            ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> Any:
        cos, sin, positions, seqlen_offsets = ctx.saved_tensors
        options = {
            **ctx.numbers,
            "positions": positions,
            "seqlen_offsets": seqlen_offsets,
            "conjugate": not ctx.numbers.get("conjugate", False),
        }
        for_q, for_k = ctx.needs_input_grad[1:3]
        if for_q and for_k:
            grad_q, grad_k = ctx.op(grad_q, grad_k, cos, sin, **options)
        elif for_q:
            grad_q, _ = ctx.op(grad_q, None, cos, sin, **options)
        elif for_k:
            grad_k, _ = ctx.op(grad_k, None, cos, sin, **options)
        return (
            None,
            grad_q if for_q else None,
            grad_k if for_k else None,
            *(None,) * 5,
        )


class _RopeInplace(torch.autograd.Function):
    """`rope_` for one tensor. With two, autograd would refuse those that are views."""

    @staticmethod
    def forward(
        op: Callable[..., Any],
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None,
        seqlen_offsets: Tensor | None,
        numbers: dict[str, Any],
    ) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            op(x, None, cos, sin, positions=positions, seqlen_offsets=seqlen_offsets, **numbers)
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        op, x, cos, sin, positions, seqlen_offsets, ctx.numbers = inputs
        ctx.rope = torch.ops.metal_attn.rope
        if op is torch.ops.metal_attn_simulator.rope_:
            ctx.rope = torch.ops.metal_attn_simulator.rope
        ctx.mark_dirty(x)
        ctx.save_for_backward(cos, sin, positions, seqlen_offsets)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        cos, sin, positions, seqlen_offsets = ctx.saved_tensors
        numbers = {**ctx.numbers, "conjugate": not ctx.numbers.get("conjugate", False)}
        grad, _ = ctx.rope(
            grads[0],
            None,
            cos,
            sin,
            positions=positions,
            seqlen_offsets=seqlen_offsets,
            **numbers,
        )
        return (None, grad, *(None,) * 5)


def _refuse_derivatives(op: str, tensors: dict[str, Any], constants: tuple[str, ...]) -> bool:
    """Whether gradients are requested. Raises NotImplementedError for missing ones."""
    given = {name: x for name, x in tensors.items() if isinstance(x, Tensor)}
    refuse_tangents(op, given)
    if not torch.is_grad_enabled():
        return False
    for name in constants:
        if name in given and given[name].requires_grad:
            raise NotImplementedError(
                unmarked(f"{op} has no gradient for `{name}`, which requires grad: detach it")
            )
    return any(tensor.requires_grad for tensor in given.values())


def _autograd(namespace: str) -> Callable[..., Any]:
    op = getattr(torch.ops, namespace).rope

    def rope(
        q: Tensor,
        k: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        *,
        positions: Tensor | None = None,
        seqlen_offsets: Tensor | None = None,
        **numbers: Any,
    ) -> Any:
        arguments = (op, q, k, cos, sin, positions, seqlen_offsets, numbers)
        tensors = {"q": q, "k": k, "cos": cos, "sin": sin, "positions": positions}
        if _refuse_derivatives(f"{namespace}::rope", tensors, ("cos", "sin", "positions")):
            return apply(_Rope, *arguments)
        return _Rope.forward(*arguments)

    return rope


def _autograd_inplace(namespace: str) -> Callable[..., Any]:
    op = getattr(torch.ops, namespace).rope_

    def rope_(
        q: Tensor,
        k: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        *,
        positions: Tensor | None = None,
        seqlen_offsets: Tensor | None = None,
        **numbers: Any,
    ) -> None:
        tensors = {"q": q, "k": k, "cos": cos, "sin": sin, "positions": positions}
        if not _refuse_derivatives(f"{namespace}::rope_", tensors, ("cos", "sin", "positions")):
            with torch._C._AutoDispatchBelowAutograd():
                op(q, k, cos, sin, positions=positions, seqlen_offsets=seqlen_offsets, **numbers)
            return
        # All checks before anything is written; where compiled, the fake kernel makes them.
        explain = torch.ops.metal_attn_explain.rope_
        compiling = torch.compiler.is_compiling() or is_fake(q)
        if not compiling and q.device.type in ("cpu", "mps"):
            with torch._C._AutoDispatchBelowAutograd():
                explain(
                    *(q, k, cos, sin),
                    positions=positions,
                    seqlen_offsets=seqlen_offsets,
                    **numbers,
                )
        for name, x in (("q", q), ("k", k)):
            if x is None or not x.requires_grad:
                continue
            # Autograd refuses a view of a leaf too, but only when it has been written.
            base = x._base
            if (x if base is None else base).is_leaf:
                what = "is a leaf" if base is None else "is a view of a leaf"
                raise RuntimeError(
                    f"{name} {what} that requires grad, so rope_ cannot rotate it in place: "
                    "call rope"
                )
        for x in (q, k):
            if x is not None:
                _RopeInplace.apply(op, x, cos, sin, positions, seqlen_offsets, numbers)

    return rope_


def _autograd_tables(namespace: str) -> Callable[..., Any]:
    op = getattr(torch.ops, namespace).rope_tables

    def rope_tables(inv_freq: Tensor, positions: Tensor, **options: Any) -> Any:
        tensors = {"inv_freq": inv_freq, "positions": positions}
        _refuse_derivatives(f"{namespace}::rope_tables", tensors, ("inv_freq", "positions"))
        with torch._C._AutoDispatchBelowAutograd():
            return op(inv_freq, positions, **options)

    return rope_tables


def _written(given: dict[str, Any]) -> list[str]:
    return ["q", "k"] if given["k"] is not None else ["q"]


python_kernel("metal_attn::rope", "CPU")(_cpu)
python_kernel("metal_attn::rope_", "CPU")(_cpu_inplace)
python_kernel("metal_attn::rope_tables", "CPU")(_cpu_tables)
_libraries = []
for _namespace in NAMESPACES:
    python_kernel(f"{_namespace}::rope", "Autograd")(_autograd(_namespace))
    python_kernel(f"{_namespace}::rope_", "Autograd")(_autograd_inplace(_namespace))
    python_kernel(f"{_namespace}::rope_tables", "Autograd")(_autograd_tables(_namespace))
    _libraries.append(count_writes(_namespace, "rope_", _written))
