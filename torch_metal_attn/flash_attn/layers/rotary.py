"""flash-attn's `flash_attn.layers.rotary`, on `metal_attn::rope`. Tensors are (B, L, H, D) here."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import torch_metal_attn.rope as rope
from torch_metal_attn.call.arguments import (
    INT32_MAX,
    as_bool,
    as_int,
    as_int_at_least,
    as_positive,
    check_integers,
    check_one_device,
    check_shape,
    check_tensor,
    check_tensors,
    is_readable_on_host,
    on_host,
)
from torch_metal_attn.ops.names import ArgumentNames
from torch_metal_attn.reference import rotate_pairs

__all__ = [
    "RotaryEmbedding",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
]

_ROPE = torch.ops.metal_attn.rope.default
_ROPE_INPLACE = torch.ops.metal_attn.rope_.default


def _names(q: str, k: str = "k") -> ArgumentNames:
    """The names of arguments in errors. The op's positions are computed from seqlen_offsets."""
    offsets = {"seqlen_offset": "seqlen_offsets", "positions": "seqlen_offsets"}
    return ArgumentNames({"q": q, "k": k, **offsets}, blhd=True)


_X_NAMES = _names("x")
_KV_NAMES = _names("kv[:, :, 0]")
_QKV_NAMES = _names("qkv[:, :, 0]", "qkv[:, :, 1]")
_HEADS_NAMES = _names(
    "qkv[:, :, :num_heads_q]", "qkv[:, :, num_heads_q : num_heads_q + num_heads_k]"
)
# Rotates a tensor in place, or rotates it back if the bool is True.
Rotate = Callable[[Tensor, bool], None]


class _RotateLeaf(torch.autograd.Function):
    """Rotates in place a leaf that requires grad, as flash-attn does; torch's ops refuse this."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, rotate: Rotate) -> Tensor:
        ctx.rotate = rotate
        rotated = leaf.detach()
        rotate(rotated, False)
        return rotated

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        ctx.rotate(grad, True)
        return grad, None


def _in_place(
    x: Tensor,
    names: ArgumentNames,
    options: dict[str, Any],
    calls: Callable[[Tensor], list[tuple[Tensor | None, ...]]],
) -> Tensor:
    """Rotate x in place. Returns x, or a tensor with the graph if x is a leaf. calls: the op's."""

    def rotate(target: Tensor, back: bool) -> None:
        for arguments in calls(target):
            names.run(_ROPE_INPLACE, arguments, {**options, "conjugate": back})

    base = x if x._base is None else x._base
    if torch.is_grad_enabled() and base.is_leaf and base.requires_grad:
        return _RotateLeaf.apply(x, rotate)
    rotate(x, False)
    return x


def apply_rotary_emb_torch(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> Tensor:
    """`apply_rotary_emb` in torch's operators, for comparison, in any dtype.

    Args: x: (B, L, H, D). cos, sin: (L, R / 2) or (B, L, R / 2), R <= D.

    Raises:
        ValueError: a table has the wrong size.
    """
    check_one_device(x=x, cos=cos, sin=sin)
    for name, table in (("cos", cos), ("sin", sin)):
        if (
            min(table.dim(), x.dim() - 1) < 2
            or table.shape != cos.shape
            or table.shape[-2] != x.shape[-3]
            or not 0 < 2 * table.shape[-1] <= x.shape[-1]
        ):
            raise ValueError(
                f"{name} has shape {tuple(table.shape)} and x {tuple(x.shape)}; for x (B, L, H, "
                "D) both tables must be (L, R / 2) or (B, L, R / 2), with 0 < R <= D"
            )
    interleaved = as_bool("interleaved", interleaved)
    return rotate_pairs(x, cos.unsqueeze(-2), sin.unsqueeze(-2), interleaved)


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """`flash_attn.layers.rotary.apply_rotary_emb`, by `metal_attn::rope`.

    Args: x: (B, L, H, D), or (T, H, D) with cu_seqlens. cos, sin: (P, R / 2), R <= D. interleaved:
        neighbouring columns form a pair, instead of columns i and i + R / 2. inplace: rotate x
        itself and return it; if x is a leaf that requires grad, the result is another tensor in
        x's memory that carries the graph. seqlen_offsets: position of each sequence's first token,
        an int or (B) int32 or int64. cu_seqlens: (B + 1) int32 or int64, the cumulative lengths of
        the sequences packed in x; row 0 of cos and sin rotates tokens after the last sequence.
        max_seqlen: the longest length, if known; it is checked against the rows of cos.

    Returns: a tensor like x. Differentiable in x.

    Raises:
        ValueError: a shape, dtype or offset that `metal_attn::rope` does not support.
    """
    check_tensors(x=x, cos=cos, sin=sin)
    packed = cu_seqlens is not None
    layout = "with cu_seqlens it must be (T, H, D)" if packed else "it must be (B, L, H, D)"
    if x.dim() != 4 - packed:
        raise ValueError(f"x has shape {tuple(x.shape)}; {layout}")
    if cu_seqlens is None:
        options = _options(x, seqlen_offsets, interleaved)
    else:
        rows, offset = cos.shape[-2], seqlen_offsets
        if not isinstance(offset, Tensor):
            offset = as_int("seqlen_offsets", offset)
            if max_seqlen is not None and as_int("max_seqlen", max_seqlen) + offset > rows:
                raise ValueError(
                    f"max_seqlen is {max_seqlen} and seqlen_offsets {offset}; their sum must "
                    f"be at most {rows}, the rows of cos"
                )
        options = {"positions": _packed_positions(x.shape[0], cu_seqlens, offset)}
        options["interleaved"] = as_bool("interleaved", interleaved)

    def to_bhld(tensor: Tensor) -> Tensor:
        return (tensor[None] if packed else tensor).transpose(1, 2)

    if as_bool("inplace", inplace):
        return _in_place(x, _X_NAMES, options, lambda x: [(to_bhld(x), None, cos, sin)])
    rotated, _ = _X_NAMES.run(_ROPE, (to_bhld(x), None, cos, sin), options)
    result: Tensor = rotated.transpose(1, 2)
    return result[0] if packed else result


apply_rotary_emb_func = apply_rotary_emb  # flash-attn keeps the old name


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotate q and k in place inside `qkv`, in one dispatch, or in two if k has other tables.

    Args: qkv: (B, L, 3, H, D), or (B, L, Hq + 2 Hk, D) with num_heads_q = Hq. cos, sin: (P, R / 2),
        R <= D. cos_k, sin_k: tables for k, of the same shape and dtype; pass both or neither.
        interleaved, seqlen_offsets: as in `apply_rotary_emb`.

    Returns: qkv; for a leaf that requires grad, a tensor in its memory that carries the graph.
        Differentiable in qkv.

    Raises:
        ValueError: the wrong shape; num_heads_q is missing, not needed, or does not leave as many
            heads for k as for v; tables that differ; a call that `metal_attn::rope` refuses.
    """
    check_tensors(qkv=qkv, cos=cos, sin=sin)
    if num_heads_q is not None:
        num_heads_q = as_int("num_heads_q", num_heads_q)
    _check_heads(qkv, num_heads_q)
    _check_own_tables(cos, cos_k, sin_k)
    options = _options(qkv, seqlen_offsets, interleaved)
    names = _QKV_NAMES if num_heads_q is None else _HEADS_NAMES

    def calls(target: Tensor) -> list[tuple[Tensor | None, ...]]:
        if num_heads_q is None:
            parts = target[:, :, 0], target[:, :, 1]
        else:
            end_of_k = (target.shape[2] + num_heads_q) // 2
            parts = target[:, :, :num_heads_q], target[:, :, num_heads_q:end_of_k]
        q, k = (x.transpose(1, 2) for x in parts)
        if cos_k is None:
            return [(q, k, cos, sin)]
        return [(q, None, cos, sin), (k, None, cos_k, sin_k)]

    return _in_place(qkv, names, options, calls)


def apply_rotary_emb_kv_(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
) -> Tensor:
    """Rotate k in place inside `kv` (B, L, 2, H, D) and return kv; see `apply_rotary_emb`.

    Raises:
        ValueError: the wrong shape, or a call that `metal_attn::rope` refuses.
    """
    check_tensors(kv=kv, cos=cos, sin=sin)
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ValueError(f"kv has shape {tuple(kv.shape)}; it must be (B, L, 2, H, D)")
    options = _options(kv, seqlen_offsets, interleaved)
    return _in_place(
        kv, _KV_NAMES, options, lambda kv: [(kv[:, :, 0].transpose(1, 2), None, cos, sin)]
    )


class RotaryEmbedding(nn.Module):
    """Rotates q and k in place, by tables that grow to the longest length that has been used.

    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021), section 3.3;
    with scale_base Sun et al., "A Length-Extrapolatable Transformer" (2022), which multiplies q's
    pairs by a power of the position and k's by its inverse.

    Args: dim: number of columns to rotate, even. base: base of the wavelengths. interleaved: as in
        `apply_rotary_emb`. scale_base: the number of positions over which the weights change by one
        power (512 in the paper); None disables the weights. device: that of the frequencies.

    Raises:
        ValueError: dim, base or scale_base is not positive, or dim is odd.
    """

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved = dim, float(as_positive("base", base)), interleaved
        self.scale_base = None if scale_base is None else as_positive("scale_base", scale_base)
        self.register_buffer("inv_freq", rope.default(dim, self.base, device=device)[0], False)
        scale = None
        if scale_base is not None:
            pairs = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
            scale = (pairs + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, False)
        self._tables: tuple[Tensor, ...] = ()

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotate q and k in place; return qkv, or (q, kv).

        Args: qkv: as in `apply_rotary_emb_qkv_`; with kv it is q (B, L, H, D). kv: (B, L, 2, H, D).
            seqlen_offset: position of the first token, an int or (B,) int32 or int64. max_seqlen:
            the last position plus 1. Required if seqlen_offset is a tensor, as the host does not
            read its values.

        Raises:
            ValueError: max_seqlen is missing, or the functions above refuse the arguments.
        """
        check_tensor("qkv", qkv)
        if qkv.dim() < 4:
            raise ValueError(f"qkv has shape {tuple(qkv.shape)}; it must have 4 or 5 dimensions")
        if max_seqlen is None:
            if isinstance(seqlen_offset, Tensor):
                raise ValueError(
                    "max_seqlen is None; if seqlen_offset is a tensor, pass max_seqlen: the last "
                    "position plus 1"
                )
            max_seqlen = qkv.shape[1] + as_int("seqlen_offset", seqlen_offset)
        max_seqlen = as_int_at_least("max_seqlen", max_seqlen, 0, INT32_MAX)
        cos, sin, cos_k, sin_k = self._tables_for(max_seqlen, qkv)
        if kv is None:
            tables_of_k: tuple[Any, Any] = (None, None) if self.scale is None else (cos_k, sin_k)
            return apply_rotary_emb_qkv_(
                qkv, cos, sin, *tables_of_k, self.interleaved, seqlen_offset, num_heads_q
            )
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)

    def _tables_for(self, length: int, like: Tensor) -> tuple[Tensor, ...]:
        """cos and sin for q and for k: (length or more, dim / 2), in `like`'s dtype and device."""
        if self._tables:
            cos = self._tables[0]
            # Autograd cannot save tables that were created in inference mode.
            savable = not cos.is_inference() or torch.is_inference_mode_enabled()
            fits = cos.shape[0] >= length and (cos.device, cos.dtype) == (like.device, like.dtype)
            if savable and fits:
                return self._tables
        inv_freq = self.inv_freq.to(like.device)
        if inv_freq.dtype != torch.float32:  # the model was cast
            inv_freq, _ = rope.default(self.dim, self.base, device=like.device)
        tables = rope.tables(inv_freq, length)
        q_tables = k_tables = tables
        if self.scale is not None:
            assert self.scale_base is not None
            positions = torch.arange(length, device=like.device, dtype=torch.float32)
            powers = (positions - length // 2) / self.scale_base
            weights = self.scale.to(like.device, torch.float32) ** powers[:, None]
            q_tables = (tables[0] * weights, tables[1] * weights)
            k_tables = (tables[0] / weights, tables[1] / weights)
        self._tables = tuple(table.to(like.dtype) for table in (*q_tables, *k_tables))
        return self._tables


def _check_heads(qkv: Tensor, num_heads_q: int | None) -> None:
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        if num_heads_q is not None:
            raise ValueError(
                f"num_heads_q is {num_heads_q}; it must be None for qkv of shape (B, L, 3, H, D)"
            )
        return
    if qkv.dim() != 4:
        raise ValueError(
            f"qkv has shape {tuple(qkv.shape)}; it must be (B, L, 3, H, D), or "
            "(B, L, Hq + 2 Hk, D) with num_heads_q"
        )
    heads = qkv.shape[2]
    if num_heads_q is None or not 0 < num_heads_q <= heads or (heads - num_heads_q) % 2:
        raise ValueError(
            f"num_heads_q is {num_heads_q}; it must leave an even number of the {heads} heads of "
            "qkv, half for k and half for v"
        )


def _check_own_tables(cos: Tensor, cos_k: Tensor | None, sin_k: Tensor | None) -> None:
    """Check k's tables before q is rotated in place."""
    if cos_k is None and sin_k is None:
        return
    for name, table in (("cos_k", cos_k), ("sin_k", sin_k)):
        if table is None:
            raise ValueError(f"{name} is None; give both cos_k and sin_k, or neither")
        check_tensor(name, table)
        if table.shape != cos.shape or table.dtype != cos.dtype:
            raise ValueError(
                f"{name} has shape {tuple(table.shape)} and dtype {table.dtype}; it must "
                f"match cos: {tuple(cos.shape)} and {cos.dtype}"
            )


def _options(x: Tensor, seqlen_offsets: int | Tensor, interleaved: bool) -> dict[str, Any]:
    """The op's options for x (B, L, ...)."""
    options: dict[str, Any] = {"interleaved": as_bool("interleaved", interleaved)}
    if not isinstance(seqlen_offsets, Tensor):
        return options | {"seqlen_offset": as_int("seqlen_offsets", seqlen_offsets)}
    if seqlen_offsets.dtype == torch.int32:
        return options | {"seqlen_offsets": seqlen_offsets}
    _check_offsets(seqlen_offsets, x.shape[0])
    tokens = torch.arange(x.shape[1], device=seqlen_offsets.device)
    return options | {"positions": seqlen_offsets[:, None] + tokens}


def _check_offsets(seqlen_offsets: Tensor, batch: int) -> None:
    check_integers("seqlen_offsets", seqlen_offsets, "(B)")
    check_shape("seqlen_offsets", seqlen_offsets, (batch,))


def _packed_positions(tokens: int, cu_seqlens: Tensor, seqlen_offsets: int | Tensor) -> Tensor:
    """Position of each packed token: (T) int64."""
    check_integers("cu_seqlens", cu_seqlens, "(B + 1)")
    if cu_seqlens.shape[0] < 1:
        raise ValueError("cu_seqlens has shape (0,); it must be (B + 1)")
    if isinstance(seqlen_offsets, Tensor):
        check_one_device(cu_seqlens=cu_seqlens, seqlen_offsets=seqlen_offsets)
    if is_readable_on_host(cu_seqlens):
        ends = on_host("cu_seqlens", cu_seqlens)
        if ends[0] != 0 or ends != sorted(ends) or ends[-1] > tokens:
            raise ValueError(
                f"cu_seqlens is {ends}; it must rise from 0 to at most {tokens}, the tokens of x"
            )
    batch = cu_seqlens.shape[0] - 1
    if batch == 0:
        return torch.zeros(tokens, dtype=torch.int64, device=cu_seqlens.device)
    bounds = cu_seqlens.long()
    token = torch.arange(tokens, device=cu_seqlens.device)
    sequence = torch.searchsorted(bounds[1:].contiguous(), token, right=True)
    last = sequence.clamp(max=batch - 1)
    position = token - bounds[last]
    if isinstance(seqlen_offsets, Tensor):
        _check_offsets(seqlen_offsets, batch)
        seqlen_offsets = seqlen_offsets.long()[last]
    position = position + seqlen_offsets
    return torch.where(sequence < batch, position, 0)
