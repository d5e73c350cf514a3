"""The op behind the signatures that callers already know: flash-attn's and torch's.

Nothing is ignored: an argument that the kernels do not implement yet raises NotImplementedError
with its name and value, and `metal_attn::flash_fwd` itself refuses shapes, strides and dtypes that
it cannot run (ValueError).
"""

import math

import torch
from torch import Tensor


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Attention with the arguments of `flash_attn.flash_attn_func` (2.x).

    Args: q: (B, Lq, Hq, D), float32, float16 or bfloat16; D a multiple of 8 up to 256. k: (B, Lk,
        Hkv, D); Hkv divides Hq. v: (B, Lk, Hkv, Dv). dropout_p: only 0.0 so far. softmax_scale:
        factor of the scores; D ** -0.5 if None. causal: align the diagonal bottom-right: the last
        query sees every key, and query i key j iff j <= i + Lk - Lq. The same as window_size=(-1,
        0). window_size: (left, right), negative for no limit: query i sees key j iff -left <= j - i
        - (Lk - Lq) <= right. A left limit is not implemented yet. softcap: only 0.0 (off) so far.
        alibi_slopes: only None so far. deterministic: accepted; every kernel here is deterministic.
        return_attn_probs: also return the log-sum-exp.

    Returns: out (B, Lq, Hq, Dv), contiguous if q is; a query that sees no key gets 0. With
        return_attn_probs (out, softmax_lse, None): softmax_lse (B, Hq, Lq) in float32; flash-attn's
        third value is a dropout pattern, which exists only with dropout.

    Raises:
        NotImplementedError: an argument with a value that has no kernel yet.
        TypeError: an argument of another type.
        ValueError: shapes, strides or dtypes that the op refuses.
    """
    _check_tensors(q=q, k=k, v=v)
    if dropout_p != 0.0:
        raise NotImplementedError(
            f"dropout_p={dropout_p}: dropout is not implemented yet, only 0.0 is accepted"
        )
    if softcap != 0.0:
        raise NotImplementedError(
            f"softcap={softcap}: a softcap is not implemented yet, only 0.0 (off) is accepted"
        )
    if alibi_slopes is not None:
        raise NotImplementedError(
            f"alibi_slopes {_given(alibi_slopes)}: ALiBi is not implemented yet, "
            "only None is accepted"
        )
    if (
        not isinstance(window_size, (tuple, list))
        or len(window_size) != 2
        or not all(isinstance(limit, int | torch.SymInt) for limit in window_size)
    ):
        raise TypeError(f"window_size is {window_size!r}; it must be two ints, (left, right)")
    left, right = window_size
    if left >= 0:
        raise NotImplementedError(
            f"window_size={(left, right)}: a left window is not implemented yet, "
            "only a negative left is accepted"
        )
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be (B, L, H, D)")
    if causal:
        right = 0
    elif right >= 2**31:
        right = -1  # beyond every length, and the sum below must fit an int64
    causal_offset = k.shape[1] - q.shape[1] + right if right >= 0 else None
    out, softmax_lse = torch.ops.metal_attn.flash_fwd(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        softmax_scale=softmax_scale,
        causal=causal_offset is not None,
        q_offset=causal_offset,
    )
    out = out.transpose(1, 2)
    return (out, softmax_lse, None) if return_attn_probs else out


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention with the arguments of `torch.nn.functional.scaled_dot_product_attention`.

    Args: query: (..., Hq, Lq, D): any number of leading dimensions, none included; float32, float16
        or bfloat16. key: (..., Hkv, Lk, D); leading dimensions broadcast against those of query and
        value. value: (..., Hkv, Lk, Dv). attn_mask: only None so far. dropout_p: only 0.0 so far.
        is_causal: align the diagonal top-left: query i sees key j iff j <= i. scale: factor of the
        scores; D ** -0.5 if None. enable_gqa: let Hkv be a divisor of Hq. Without it the head
        dimension broadcasts like any other.

    Returns: (..., Hq, Lq, Dv). A query that sees no key gets 0, where torch's own backends differ
        from each other.

    Dimensions before the heads are merged into one batch dimension, as a view: nothing is copied.

    Raises: RuntimeError: what torch refuses: attn_mask together with is_causal, fewer than two
        dimensions, dtypes that differ, a dropout_p outside 0..1, heads or leading dimensions that
        do not fit. NotImplementedError: an argument with a value that has no kernel yet.
        TypeError: an argument of another type. ValueError: shapes, strides or dtypes that the op
        refuses, and leading dimensions that cannot be merged as a view.
    """
    _check_tensors(query=query, key=key, value=value)
    if attn_mask is not None and is_causal:
        raise RuntimeError("Explicit attn_mask should not be set when is_causal=True")
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise RuntimeError(
            "Expected query, key, and value to all be at least 2 dimensional, but got "
            f"query.dim: {query.dim()} key.dim: {key.dim()} and value.dim: {value.dim()} instead."
        )
    if not (query.dtype == key.dtype == value.dtype):
        raise RuntimeError(
            "Expected query, key, and value to have the same dtype, but got "
            f"query.dtype: {query.dtype} key.dtype: {key.dtype} "
            f"and value.dtype: {value.dtype} instead."
        )
    if not isinstance(dropout_p, (int, float)):
        raise TypeError(f"dropout_p is {dropout_p!r}; it must be a number")
    if not 0.0 <= dropout_p <= 1.0:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {dropout_p}")
    if attn_mask is not None:
        raise NotImplementedError(
            f"attn_mask {_given(attn_mask)}: masks are not implemented yet, only None is accepted"
        )
    if dropout_p != 0.0:
        raise NotImplementedError(
            f"dropout_p={dropout_p}: dropout is not implemented yet, only 0.0 is accepted"
        )

    leading, (q, k, v) = _broadcast_leading((query, key, value), enable_gqa)
    out, _ = torch.ops.metal_attn.flash_fwd(
        q, k, v, softmax_scale=scale, causal=is_causal, q_offset=0
    )
    return out.view(*leading, *out.shape[-2:])


def _check_tensors(**arguments: object) -> None:
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}; it must be a tensor")


def _given(value: object) -> str:
    return f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r}"


def _broadcast_leading(
    operands: tuple[Tensor, Tensor, Tensor], enable_gqa: bool
) -> tuple[tuple[int, ...], tuple[Tensor, Tensor, Tensor]]:
    """Broadcast query, key and value to (B, H, L, D) each.

    Returns the leading dimensions of the result, heads included, and the three tensors: views with
    stride 0 where a dimension is broadcast.
    """
    heads = [tensor.shape[-3] if tensor.dim() > 2 else 1 for tensor in operands]
    if enable_gqa:
        _, key_heads, value_heads = heads
        if min(tensor.dim() for tensor in operands) < 3:
            raise RuntimeError("enable_gqa needs query, key and value of at least 3 dimensions")
        if not all(count > 0 and heads[0] % count == 0 for count in (key_heads, value_heads)):
            raise RuntimeError(
                "Number of heads in key and value must divide the number of heads in query, "
                f"but got query: {heads[0]} key: {key_heads} and value: {value_heads}."
            )
        if key_heads != value_heads and 1 not in (key_heads, value_heads):
            raise NotImplementedError(
                f"enable_gqa with {key_heads} key heads and {value_heads} value heads: "
                "the two must agree"
            )
        heads[1] = heads[2] = max(key_heads, value_heads)
    else:
        heads = list(torch.broadcast_shapes(*[(count,) for count in heads])) * 3
    batch = torch.broadcast_shapes(*[tensor.shape[:-3] for tensor in operands])
    q, k, v = (
        _merge_batch(name, tensor, (*batch, count, *tensor.shape[-2:]))
        for name, tensor, count in zip(("query", "key", "value"), operands, heads, strict=True)
    )
    has_heads = max(tensor.dim() for tensor in operands) > 2
    return (*batch, heads[0]) if has_heads else (), (q, k, v)


def _merge_batch(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`tensor` broadcast to `shape` (..., H, L, D), its leading dimensions made one, as a view."""
    whole = tensor.expand(shape)
    batch = shape[:-3]
    inner: int | None = None  # the next dimension inwards that has a stride to agree with
    for dim in reversed(range(len(batch))):
        if batch[dim] == 1 or 0 in shape:
            continue
        if inner is not None and whole.stride(dim) != batch[inner] * whole.stride(inner):
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)} and strides {tensor.stride()} cannot be "
                f"seen as {tuple(shape)} with its leading dimensions {tuple(batch)} merged into "
                f"one without a copy: call {name}.expand({', '.join(map(str, shape))})"
                ".contiguous() first"
                if tensor.shape != whole.shape
                else f"{name} of shape {tuple(tensor.shape)} and strides {tensor.stride()} cannot "
                f"have its leading dimensions {tuple(batch)} merged into one without a copy: "
                f"call {name}.contiguous() first"
            )
        inner = dim
    return whole.view(math.prod(batch), *shape[-3:])
