"""flash-attn's functions on `metal_attn::flash_fwd` and `flash_varlen_fwd`.

Under autocast q, k and v are cast as for torch's own attention. Gradients of q, k, v,
alibi_slopes and learnable_sink take linear memory and have the same bits every time. If the
incoming gradient is not contiguous in its last dimension (as after `sum()`), it is copied first.

Nothing is ignored silently. The ops raise ValueError for unsupported shapes, strides and dtypes,
and NotImplementedError for unsupported gradients.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from torch_metal_attn.call.arguments import (
    Window,
    as_bool,
    as_int,
    check_one_dtype,
    check_packed,
    check_rank,
    check_tensors,
    first_options,
    only_given,
    window,
)
from torch_metal_attn.call.autocast import autocast
from torch_metal_attn.call.options import (
    FlashAttnOptions,
    NewerOptions,
    check_newer,
    named_options,
    op_options,
    options_of,
)
from torch_metal_attn.ops import fast_path
from torch_metal_attn.ops.attention_weights import dense_weights, varlen_weights
from torch_metal_attn.ops.fast_path import call_bhld
from torch_metal_attn.ops.names import ArgumentNames

FlashAttnResult = Tensor | tuple[Tensor, Tensor, Tensor | None]

# The overloads, which torch.ops would otherwise look up in every call.
_FLASH_FWD = torch.ops.metal_attn.flash_fwd.default
_FLASH_VARLEN_FWD = torch.ops.metal_attn.flash_varlen_fwd.default

# The names of arguments in errors. blhd: these functions take (B, L, H, D), the ops (B, H, L, D).
_NAMES = ArgumentNames(blhd=True)
_QKV_NAMES = ArgumentNames({name: f"qkv[:, :, {i}]" for i, name in enumerate("qkv")})
_KV_NAMES = ArgumentNames({"k": "kv[:, :, 0]", "v": "kv[:, :, 1]"})
_VARLEN_QKV_NAMES = ArgumentNames(
    {name: f"qkv[:, {i}]" for i, name in enumerate("qkv")}
    | {f"{name}_{side}": name for name in ("cu_seqlens", "max_seqlen") for side in "qk"}
)
_VARLEN_KV_NAMES = ArgumentNames({"k": "kv[:, 0]", "v": "kv[:, 1]"})


@named_options
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **newer: Unpack[NewerOptions],
) -> FlashAttnResult:
    """Attention with the arguments of `flash_attn.flash_attn_func` (2.x).

    The diagonal is aligned bottom-right: the last query is at the last key, and query i is at key
    index p = i + Lk - Lq.

    Args:
        q: (B, Lq, Hq, D) in float32, float16 or bfloat16; D up to 576.
        k: (B, Lk, Hkv, D); Hkv divides Hq.
        v: (B, Lk, Hkv, Dv); Dv up to 512.
        dropout_p: probability to drop a weight, in 0..1 (Srivastava et al. 2014). The random
            numbers come from torch's default generator of q's device.
        softmax_scale: factor of the scores; D ** -0.5 if None.
        causal: query i sees key j only if j <= p, whatever the right side of window_size is.
        window_size: (left, right): query i sees key j only if p - left <= j <= p + right. A
            negative number or None means no limit.
        softcap: c > 0 replaces a score by c * tanh(score / c) (Gemma 2, 2024); 0.0 is off.
        alibi_slopes: (Hq,) or (B, Hq), float32: slope * |p - j| is subtracted from the scores
            (Press et al. 2021). Differentiable.
        deterministic: accepted; every kernel here is deterministic.
        return_attn_probs: also return the log-sum-exp and S_dmask.
        attention_chunk: c > 0 lets a query see only keys with j // c == p // c (Llama 4). From
            flash-attn 3.
        learnable_sink: (Hq,) in one of the three dtypes: one more logit in the softmax's
            denominator (gpt-oss). From flash-attn 4. Differentiable.

    Returns:
        out (B, Lq, Hq, Dv), contiguous if q is; 0 for a query that sees no key. With
        return_attn_probs, (out, softmax_lse, S_dmask). softmax_lse (B, Hq, Lq), float32, includes
        the sink, is computed before dropout, and is -inf for a query that sees no key. S_dmask is
        None without dropout, else (B, Hq, Lq, Lk) in q's dtype. It is as large as the scores, so
        use it only in tests. See `attention_weights.dense_weights`.

    Raises:
        NotImplementedError: a second derivative is computed.
        TypeError: an argument has the wrong type.
        ValueError: a shape, stride, dtype or number that the op does not support.
    """
    if (
        not newer
        and alibi_slopes is None
        and deterministic is False
        and return_attn_probs is False
        and type(dropout_p) is float
        and dropout_p == 0.0
        and type(softcap) is float
        and softcap == 0.0
        and fast_path.is_usable(q, k, v)
    ):
        try:
            return fast_path.flash_attn(q, k, v, *first_options(softmax_scale, causal, window_size))
        except Exception as error:
            if not fast_path.refused(error):
                raise
    if newer:
        check_newer("flash_attn_func", newer)
    check_rank("q", q, "(B, L, H, D)")
    check_rank("k", k, "(B, L, H, D)")
    check_rank("v", v, "(B, L, H, D)")
    if deterministic is not False:
        as_bool("deterministic", deterministic)
    q, k, v = autocast(q, k, v)
    check_one_dtype(q, k, v)
    score = {"softcap": softcap, "alibi_slopes": alibi_slopes, **newer}
    options = op_options(q, dropout_p, softmax_scale, causal, window(window_size), score)
    out, softmax_lse = _NAMES.run(call_bhld, (_FLASH_FWD, q, k, v), options)
    if return_attn_probs is False or not as_bool("return_attn_probs", return_attn_probs):
        return out
    return out, softmax_lse, dense_weights(q, k, options)


@options_of(flash_attn_func, 3)
def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, *positional: Any, **options: Unpack[FlashAttnOptions]
) -> FlashAttnResult:
    """`flash_attn_func` with k and v in one tensor, which is not copied.

    Args: q: (B, Lq, Hq, D). kv: (B, Lk, 2, Hkv, D). The other arguments are those of
        `flash_attn_func`.
    """
    check_newer("flash_attn_kvpacked_func", options)
    check_packed("kv", kv, "(B, L, 2, Hkv, D)")
    operands = (q, kv[:, :, 0], kv[:, :, 1])
    return _of_parts(flash_attn_func, _KV_NAMES, (*operands, *positional), options)


@options_of(flash_attn_func, 3)
def flash_attn_qkvpacked_func(
    qkv: Tensor, *positional: Any, **options: Unpack[FlashAttnOptions]
) -> FlashAttnResult:
    """`flash_attn_func` with q, k and v in one tensor, which is not copied.

    Args: qkv: (B, L, 3, H, D). The other arguments are those of `flash_attn_func`.
    """
    check_newer("flash_attn_qkvpacked_func", options)
    check_packed("qkv", qkv, "(B, L, 3, H, D)")
    operands = (qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2])
    return _of_parts(flash_attn_func, _QKV_NAMES, (*operands, *positional), options)


@named_options
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_k: Tensor | None = None,
    **newer: Unpack[NewerOptions],
) -> FlashAttnResult:
    """Attention over concatenated sequences, as `flash_attn.flash_attn_varlen_func` (2.x).

    Sequence b consists of the rows cu_seqlens[b] to cu_seqlens[b + 1] - 1, and may be empty.
    Positions count from each sequence's first row, and each diagonal is aligned bottom-right.

    Args:
        q: (Tq, Hq, D).
        k: (Tk, Hkv, D).
        v: (Tk, Hkv, Dv).
        cu_seqlens_q, cu_seqlens_k: (B + 1,), int32, contiguous, on q's device, starting at 0.
        max_seqlen_q, max_seqlen_k: at least the longest sequence.
        block_table: (B, max_blocks), int32: keys and values are in the pages of a cache (Kwon et
            al. 2023, PagedAttention). k is then (pages, page, Hkv, D) and v (pages, page, Hkv, Dv),
            with any page size, and key i of sequence b is row i % page of page block_table[b, i //
            page]. cu_seqlens_k then only gives the number of keys, and there are no gradients.
        seqused_k: (B,), int32: the number of keys used in each sequence; the last query is at the
            last used key. From flash-attn 3.
        The other arguments are those of `flash_attn_func`.

    Returns:
        out (Tq, Hq, Dv); rows after the last sequence are 0. With return_attn_probs, (out,
        softmax_lse, S_dmask): softmax_lse is (Hq, Tq) in float32; S_dmask is None, or with
        dropout (B, Hq, max_seqlen_q, max_seqlen_k), as in `flash_attn_func`.

    Raises: as `flash_attn_func`. Values of cu_seqlens, seqused_k and block_table are checked on the
        CPU; on mps, invalid values give NaN rows.
    """
    if newer:
        check_newer("flash_attn_varlen_func", newer)
    kv_layout = "(T, H, D)" if block_table is None else "(pages, page, H, D)"
    for name, tensor, layout in (("q", q, "(T, H, D)"), ("k", k, kv_layout), ("v", v, kv_layout)):
        check_rank(name, tensor, layout)
    check_tensors(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if deterministic is not False:
        as_bool("deterministic", deterministic)
    q, k, v = autocast(q, k, v)
    if block_table is None:
        check_one_dtype(q, k, v)
    else:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    score = {"softcap": softcap, "alibi_slopes": alibi_slopes, **newer}
    options = op_options(q, dropout_p, softmax_scale, causal, window(window_size), score)
    options |= only_given(seqused_k=seqused_k, block_table=block_table)
    arguments = (
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        as_int("max_seqlen_q", max_seqlen_q),
        as_int("max_seqlen_k", max_seqlen_k),
    )
    out, softmax_lse = _NAMES.run(_FLASH_VARLEN_FWD, arguments, options)
    if return_attn_probs is False or not as_bool("return_attn_probs", return_attn_probs):
        return out
    return out, softmax_lse, varlen_weights(q, k, *arguments[3:], options)


@options_of(flash_attn_varlen_func, 7, without="block_table")
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *positional: Any,
    **options: Unpack[FlashAttnOptions],
) -> FlashAttnResult:
    """`flash_attn_varlen_func` with k and v in one tensor, which is not copied.

    Args: q: (Tq, Hq, D). kv: (Tk, 2, Hkv, D). The other arguments are those of
        `flash_attn_varlen_func`.
    """
    check_newer("flash_attn_varlen_kvpacked_func", options)
    check_packed("kv", kv, "(T, 2, Hkv, D)")
    packing = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    operands = (q, kv[:, 0], kv[:, 1], *packing)
    return _of_parts(flash_attn_varlen_func, _VARLEN_KV_NAMES, (*operands, *positional), options)


@options_of(flash_attn_varlen_func, 7, without="block_table")
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *positional: Any,
    **options: Unpack[FlashAttnOptions],
) -> FlashAttnResult:
    """`flash_attn_varlen_func` with q, k and v in one tensor, which is not copied.

    Args: qkv: (T, 3, H, D). cu_seqlens: (B + 1,), for queries and keys. max_seqlen: at least the
        longest sequence. The other arguments are those of `flash_attn_varlen_func`.
    """
    check_newer("flash_attn_varlen_qkvpacked_func", options)
    check_packed("qkv", qkv, "(T, 3, H, D)")
    check_tensors(cu_seqlens=cu_seqlens)
    max_seqlen = as_int("max_seqlen", max_seqlen)
    packing = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    operands = (qkv[:, 0], qkv[:, 1], qkv[:, 2], *packing)
    return _of_parts(flash_attn_varlen_func, _VARLEN_QKV_NAMES, (*operands, *positional), options)


def _of_parts(
    function: Callable[..., FlashAttnResult],
    names: ArgumentNames,
    positional: tuple[Any, ...],
    options: FlashAttnOptions,
) -> FlashAttnResult:
    """Call `function` on the parts of packed tensors; errors name the parts, as in qkv[:, :, 0]."""
    try:
        return function(*positional, **options)
    except (ValueError, NotImplementedError) as error:
        raise names.error(error) from None
