"""flash-attn's functions on `metal_attn::flash_fwd` and `flash_varlen_fwd`.

Under autocast q, k and v are cast to its dtype, as for torch's own attention. Gradients of q, k, v,
alibi_slopes and learnable_sink take linear memory and have the same bits every time. If the
incoming gradient is not contiguous in its last dimension (as after `sum()`), it is copied first.

Nothing is ignored silently. The ops raise ValueError for unsupported shapes, strides and dtypes,
and NotImplementedError for unsupported gradients.
"""

from typing import Any

import torch
from torch import Tensor

from torch_metal_attn import arguments as given
from torch_metal_attn.arguments import (
    Window,
    check_one_dtype,
    check_packed,
    check_rank,
    check_tensor,
)
from torch_metal_attn.attention_weights import dense_weights, varlen_weights
from torch_metal_attn.autocast import autocast
from torch_metal_attn.ops import plain
from torch_metal_attn.ops.differentiation import forward_only
from torch_metal_attn.ops.flash_fwd_checks import splits as check_splits
from torch_metal_attn.ops.plain import heads_second
from torch_metal_attn.wording import Wording

FlashAttnResult = Tensor | tuple[Tensor, Tensor, Tensor | None]

# The overloads themselves: torch.ops would look them up in every call.
_FLASH_FWD = torch.ops.metal_attn.flash_fwd.default
_FLASH_VARLEN_FWD = torch.ops.metal_attn.flash_varlen_fwd.default
_FLASH_DECODE = torch.ops.metal_attn.flash_decode.default
_DECODE_STEP = torch.ops.metal_attn.decode_step.default
_APPEND_KV = torch.ops.metal_attn.append_kv.default

# What errors call the arguments. The ops' tensors are (B, H, L, D).
_WORDING = Wording(heads_third=True)
_OF_QKV = Wording({name: f"qkv[:, :, {i}]" for i, name in enumerate("qkv")})
_OF_KV = Wording({"k": "kv[:, :, 0]", "v": "kv[:, :, 1]"})
_OF_VARLEN_QKV = Wording(
    {name: f"qkv[:, {i}]" for i, name in enumerate("qkv")}
    | {f"{name}_{side}": name for name in ("cu_seqlens", "max_seqlen") for side in "qk"}
)
_OF_VARLEN_KV = Wording({"k": "kv[:, 0]", "v": "kv[:, 1]"})
_OF_CACHE = Wording({"leftpad_k": "cache_leftpad"}, heads_third=True)
# For ops whose keys are the cache.
_OF_CACHED_KEYS = Wording(
    {"k": "k_cache", "v": "v_cache", "seqused_k": "cache_seqlens", **_OF_CACHE.names},
    heads_third=True,
)

# With up to this many queries per sequence reading the keys takes the time: flash_decode reads each
# key once, and splits the keys over the GPU.
DECODE_QUERIES = 32


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
    *,
    attention_chunk: int = 0,
    learnable_sink: Tensor | None = None,
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
            negative number or None is no limit.
        softcap: c > 0 makes a score c * tanh(score / c) (Gemma 2, 2024); 0.0 is off.
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
        the sink, is taken before dropout, and is -inf without keys. S_dmask is None, or with
        dropout (B, Hq, Lq, Lk) in q's dtype: for tests, as it is as large as the scores. See
        `attention_weights.dense_weights`.

    Raises:
        NotImplementedError: a second derivative, when it is asked for.
        TypeError: an argument of another type.
        ValueError: a shape, stride, dtype or number that the op does not support.
    """
    if (
        alibi_slopes is None
        and learnable_sink is None
        and deterministic is False
        and return_attn_probs is False
        and type(dropout_p) is float
        and dropout_p == 0.0
        and type(softcap) is float
        and softcap == 0.0
        and type(attention_chunk) is int
        and attention_chunk == 0
        and plain.applies(q, k, v)
    ):
        try:
            return plain.flash_attn(
                q, k, v, *given.first_options(softmax_scale, causal, window_size)
            )
        except Exception as error:
            if not plain.refused(error):
                raise
    check_rank("q", q, "(B, L, H, D)")
    check_rank("k", k, "(B, L, H, D)")
    check_rank("v", v, "(B, L, H, D)")
    if deterministic is not False:
        given.flag("deterministic", deterministic)
    q, k, v = autocast(q, k, v)
    check_one_dtype(q, k, v)
    options = given.options(
        q,
        dropout_p,
        softmax_scale,
        causal,
        given.window(window_size),
        softcap,
        alibi_slopes,
        attention_chunk,
        learnable_sink,
    )
    out, softmax_lse = _WORDING.run(heads_second, (_FLASH_FWD, q, k, v), options)
    if return_attn_probs is False or not given.flag("return_attn_probs", return_attn_probs):
        return out
    return out, softmax_lse, dense_weights(q, k, options)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **options: Any,
) -> FlashAttnResult:
    """`flash_attn_func` with k and v in one tensor, which is not copied.

    Args: q: (B, Lq, Hq, D). kv: (B, Lk, 2, Hkv, D). The other arguments are those of
        `flash_attn_func`. Those from newer versions of flash-attn are keywords here too.
    """
    check_packed("kv", kv, "(B, L, 2, Hkv, D)")
    try:
        return flash_attn_func(
            q,
            kv[:, :, 0],
            kv[:, :, 1],
            dropout_p,
            softmax_scale,
            causal,
            window_size,
            softcap,
            alibi_slopes,
            deterministic,
            return_attn_probs,
            **options,
        )
    except (ValueError, NotImplementedError) as error:
        raise _OF_KV.error(error) from None


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **options: Any,
) -> FlashAttnResult:
    """`flash_attn_func` with q, k and v in one tensor, which is not copied.

    Args: qkv: (B, L, 3, H, D). The other arguments are those of `flash_attn_func`. Those from newer
        versions of flash-attn are keywords here too.
    """
    check_packed("qkv", qkv, "(B, L, 3, H, D)")
    try:
        return flash_attn_func(
            qkv[:, :, 0],
            qkv[:, :, 1],
            qkv[:, :, 2],
            dropout_p,
            softmax_scale,
            causal,
            window_size,
            softcap,
            alibi_slopes,
            deterministic,
            return_attn_probs,
            **options,
        )
    except (ValueError, NotImplementedError) as error:
        raise _OF_QKV.error(error) from None


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
    attention_chunk: int = 0,
    learnable_sink: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> FlashAttnResult:
    """Attention over concatenated sequences, as `flash_attn.flash_attn_varlen_func` (2.x).

    Sequence b consists of the rows cu_seqlens[b] to cu_seqlens[b + 1] - 1, and may be empty.
    Positions count from each sequence's first row, and its diagonal is aligned bottom-right.

    Args:
        q: (Tq, Hq, D).
        k: (Tk, Hkv, D).
        v: (Tk, Hkv, Dv).
        cu_seqlens_q, cu_seqlens_k: (B + 1,), int32, contiguous, on q's device, starting at 0.
        max_seqlen_q, max_seqlen_k: at least the longest sequence.
        alibi_slopes: (Hq,) or (B, Hq), float32.
        block_table: (B, max_blocks), int32: keys and values are in the pages of a cache (Kwon et
            al. 2023, PagedAttention). k is then (pages, page, Hkv, D) and v (pages, page, Hkv, Dv),
            with any page size, and key i of sequence b is row i % page of page block_table[b, i //
            page]. cu_seqlens_k then only gives the number of keys, and there are no gradients.
        seqused_k: (B,), int32: the number of keys used in each sequence; the last query is at the
            last of them. From flash-attn 3.
        The other arguments are those of `flash_attn_func`.

    Returns:
        out (Tq, Hq, Dv); rows after the last sequence are 0. With return_attn_probs, (out,
        softmax_lse, S_dmask): softmax_lse (Hq, Tq) in float32; S_dmask None, or with dropout (B,
        Hq, max_seqlen_q, max_seqlen_k), as in `flash_attn_func`.

    Raises: as `flash_attn_func`. Values of cu_seqlens, seqused_k and block_table are checked on the
        CPU; on mps, invalid ones give NaN rows.
    """
    kv_layout = "(T, H, D)" if block_table is None else "(pages, page, H, D)"
    for name, tensor, layout in (("q", q, "(T, H, D)"), ("k", k, kv_layout), ("v", v, kv_layout)):
        check_rank(name, tensor, layout)
    for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_tensor(name, tensor)
    if deterministic is not False:
        given.flag("deterministic", deterministic)
    q, k, v = autocast(q, k, v)
    if block_table is None:
        check_one_dtype(q, k, v)
    else:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    options = given.options(
        q,
        dropout_p,
        softmax_scale,
        causal,
        given.window(window_size),
        softcap,
        alibi_slopes,
        attention_chunk,
        learnable_sink,
    )
    options |= given.only_given(seqused_k=seqused_k, block_table=block_table)
    arguments = (
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        given.whole("max_seqlen_q", max_seqlen_q),
        given.whole("max_seqlen_k", max_seqlen_k),
    )
    out, softmax_lse = _WORDING.run(_FLASH_VARLEN_FWD, arguments, options)
    if return_attn_probs is False or not given.flag("return_attn_probs", return_attn_probs):
        return out
    return out, softmax_lse, varlen_weights(q, k, *arguments[3:], options)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
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
    **options: Any,
) -> FlashAttnResult:
    """`flash_attn_varlen_func` with k and v in one tensor, which is not copied.

    Args: q: (Tq, Hq, D). kv: (Tk, 2, Hkv, D). The other arguments are those of
        `flash_attn_varlen_func`. Those from newer versions of flash-attn are keywords here too.
    """
    check_packed("kv", kv, "(T, 2, Hkv, D)")
    try:
        return flash_attn_varlen_func(
            q,
            kv[:, 0],
            kv[:, 1],
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            dropout_p,
            softmax_scale,
            causal,
            window_size,
            softcap,
            alibi_slopes,
            deterministic,
            return_attn_probs,
            **options,
        )
    except (ValueError, NotImplementedError) as error:
        raise _OF_VARLEN_KV.error(error) from None


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    **options: Any,
) -> FlashAttnResult:
    """`flash_attn_varlen_func` with q, k and v in one tensor, which is not copied.

    Args: qkv: (T, 3, H, D). cu_seqlens: (B + 1,), for queries and keys. max_seqlen: at least the
        longest sequence. The other arguments are those of `flash_attn_varlen_func`. Those from
        newer versions of flash-attn are keywords here too.
    """
    check_packed("qkv", qkv, "(T, 3, H, D)")
    check_tensor("cu_seqlens", cu_seqlens)
    max_seqlen = given.whole("max_seqlen", max_seqlen)
    try:
        return flash_attn_varlen_func(
            qkv[:, 0],
            qkv[:, 1],
            qkv[:, 2],
            cu_seqlens,
            cu_seqlens,
            max_seqlen,
            max_seqlen,
            dropout_p,
            softmax_scale,
            causal,
            window_size,
            softcap,
            alibi_slopes,
            deterministic,
            return_attn_probs,
            **options,
        )
    except (ValueError, NotImplementedError) as error:
        raise _OF_VARLEN_QKV.error(error) from None


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    attention_chunk: int = 0,
    learnable_sink: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention to a cache, with the arguments of `flash_attn.flash_attn_with_kvcache` (2.x).

    If k and v are given, they are first written IN PLACE after each sequence's keys. With up to 32
    queries per sequence everything is one dispatch, or two if the keys are split over the GPU. The
    last query is at the last key, new keys included: query i is at key index i + length - Lq.

    Args:
        q: (B, Lq, Hq, D) in float32, float16 or bfloat16.
        k_cache: (Bc, Lk, Hkv, D), or with block_table (pages, page, Hkv, D). It has q's dtype, is
            float16 or bfloat16 with q in float32 (then `out` is float32, and k and v are rounded as
            they are written), or is quantised: int8, uint8 or float8_e4m3fn, see `quantisation`.
        v_cache: as k_cache, with Dv.
        k: (B, Lnew, Hkv, D) in q's dtype, or None.
        v: (B, Lnew, Hkv, Dv), or None.
        rotary_cos, rotary_sin: (rows, R/2), R <= D, only with k: k is rotated by the rows from
            cache_seqlens on, even if cache_leftpad is given. If causal or with a window, q is
            rotated by the same rows; otherwise all of q is rotated by the first of them.
        cache_seqlens: int or (B,) int32: the number of keys in the cache before the call. None is
            the whole cache, and not allowed with k.
        cache_batch_idx: (B,) int32: the row of the cache that each sequence has.
        cache_leftpad: (B,) int32: the number of keys to leave out at the start.
        block_table: (B, max_blocks) int32: key i of sequence b is row i % page of page
            block_table[b, i // page].
        rotary_interleaved: columns (2c, 2c + 1) form a pair, otherwise (c, c + R/2).
        num_splits: number of parts that the keys are split into, in 1..1024; 0 lets the op choose.
            Calls with more than 32 queries per sequence are never split.
        return_softmax_lse: also return the log-sum-exp.
        k_scale, v_scale: scales of a quantised cache: (Bc, Lk, Hkv, D/32), or for fp8_e4m3 (Hkv,)
            or (B, Hkv).
        The other arguments are those of `flash_attn_func`.

    Returns:
        out (B, Lq, Hq, Dv); with return_softmax_lse also softmax_lse (B, Hq, Lq), float32.

    Raises: as `flash_attn_func`. There is no backward through a cache. If a tensor requires grad,
        `backward` raises NotImplementedError. The call itself raises it under torch.compile, in
        torch.func's transforms, and if new rows require grad and autograd cannot track the cache: a
        leaf that requires grad, or a view made by `unbind` or under `torch.no_grad()`. Lengths,
        indices and pages are checked on the CPU. On mps, invalid ones give NaN rows, and nothing
        outside the cache is read or written.
    """
    if (
        alibi_slopes is None
        and learnable_sink is None
        and cache_batch_idx is None
        and cache_leftpad is None
        and k_scale is None
        and v_scale is None
        and return_softmax_lse is False
        and type(num_splits) is int
        and num_splits == 0
        and type(softcap) is float
        and softcap == 0.0
        and type(attention_chunk) is int
        and attention_chunk == 0
    ):
        try:
            out = _plain_with_kvcache(
                q,
                k_cache,
                v_cache,
                k,
                v,
                rotary_cos,
                rotary_sin,
                cache_seqlens,
                block_table,
                given.first_options(softmax_scale, causal, window_size),
                rotary_interleaved,
            )
            if out is not None:
                return out
        except Exception as error:
            if not plain.refused(error):
                raise
    check_rank("q", q, "(B, L, H, D)")
    check_rank("k_cache", k_cache, "(B, L, H, D)")
    check_rank("v_cache", v_cache, "(B, L, H, D)")
    (query,) = autocast(q)
    seqlens = given.cache_seqlens(cache_seqlens, q)
    causal, limits = given.flag("causal", causal), given.window(window_size)
    return_softmax_lse = given.flag("return_softmax_lse", return_softmax_lse)
    options = given.options(
        q,
        0.0,
        softmax_scale,
        causal,
        limits,
        softcap,
        alibi_slopes,
        attention_chunk,
        learnable_sink,
    )
    cache = given.only_given(
        leftpad_k=cache_leftpad,
        block_table=block_table,
        cache_batch_idx=cache_batch_idx,
        k_scale=given.heads_first("k_scale", k_scale),
        v_scale=given.heads_first("v_scale", v_scale),
    )
    num_splits = given.whole("num_splits", num_splits)
    few = q.shape[1] <= DECODE_QUERIES
    if not few:
        check_splits(num_splits)
    if k is not None or v is not None:
        rotary: dict[str, Any] = {}
        if rotary_cos is not None or rotary_sin is not None:
            interleaved = given.flag("rotary_interleaved", rotary_interleaved)
            rotary = {
                "rotary_cos": rotary_cos,
                "rotary_sin": rotary_sin,
                "rotary_interleaved": rotary_cos is not None and interleaved,
                "rotate_q_by_token": causal or limits != given.NO_WINDOW,
            }
            if cache_leftpad is not None:
                rotary["rotary_from_leftpad"] = False
        new = _new_rows(k, v, seqlens)
        if few and new[0].numel() > 0:
            rows = (query, *new, k_cache, v_cache)
            options |= rotary | cache
            if num_splits != 0:
                options["num_splits"] = num_splits
            arguments = (*(x.transpose(1, 2) for x in rows), seqlens)
            out, lse = _OF_CACHE.run(_DECODE_STEP, arguments, options)
            return _with_lse(out.transpose(1, 2), lse, return_softmax_lse)
        if rotary_cos is not None:
            query = query.clone()
            rotary["q"] = query.transpose(1, 2)
        written = (*new, k_cache, v_cache)
        arguments = (*(x.transpose(1, 2) for x in written), seqlens)
        if not torch.compiler.is_compiling():
            # Attention to no queries refuses what attention would refuse, before rows are written.
            checked = (_FLASH_FWD, query[:, :0], k_cache, v_cache)
            with torch.no_grad():
                _OF_CACHED_KEYS.run(heads_second, checked, options | cache | {"seqused_k": seqlens})
        _OF_CACHE.run(_APPEND_KV, arguments, rotary | cache)
        assert seqlens is not None
        seqlens = seqlens + new[0].shape[1]
    elif rotary_cos is not None or rotary_sin is not None:
        raise ValueError(
            "rotary_cos or rotary_sin is given without k and v; they only rotate new keys"
        )
    options |= cache
    if seqlens is not None:
        options["seqused_k"] = seqlens
    if few and num_splits != 0:
        options["num_splits"] = num_splits
    op = _FLASH_DECODE if few else _FLASH_FWD
    out, lse = forward_only(
        "flash_attn_with_kvcache",
        "use flash_attn_func, or call it under torch.no_grad()",
        {"q": query, "k_cache": k_cache, "v_cache": v_cache, **options},
        lambda: _OF_CACHED_KEYS.run(heads_second, (op, query, k_cache, v_cache), options),
    )
    return _with_lse(out, lse, return_softmax_lse)


def _plain_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_seqlens: int | Tensor | None,
    block_table: Tensor | None,
    first: tuple[Any, ...],
    rotary_interleaved: bool,
) -> Tensor | None:
    """The call by a plain op; None if it is not plain."""
    tables: tuple[Any, ...] = (
        () if rotary_cos is None and rotary_sin is None else (rotary_cos, rotary_sin)
    )
    new: tuple[Any, ...] = () if k is None and v is None else (k, v)
    pages = () if block_table is None else (block_table,)
    if (
        not plain.applies(q, k_cache, v_cache, *new, *tables, *pages)
        or q.dim() != 4
        or q.size(1) > DECODE_QUERIES
        or (tables and not new)
        or (new and cache_seqlens is None)
    ):
        return None
    seqlens = cache_seqlens
    if type(seqlens) is not Tensor:
        seqlens = given.cache_seqlens(cache_seqlens, q)
    if not new:
        out: Tensor = plain.flash_attn_cached(q, k_cache, v_cache, seqlens, block_table, *first)
        return out
    if tables:
        interleaved = given.flag("rotary_interleaved", rotary_interleaved)
        scale, causal, left, right = first or (None, False, *given.NO_WINDOW)
        by_token = causal or left >= 0 or right >= 0
        first = (scale, causal, left, right, *tables, interleaved, by_token)
    return plain.flash_attn_step(q, *new, k_cache, v_cache, seqlens, block_table, *first)


def _new_rows(k: Tensor | None, v: Tensor | None, seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """New keys and values, cast to autocast's dtype."""
    if k is None or v is None:
        raise ValueError("only one of k and v is given; give both or neither")
    for name, tensor in (("k", k), ("v", v)):
        check_rank(name, tensor, "(B, L, H, D)")
    if seqlens is None:
        raise ValueError("cache_seqlens is None and k is given; say how many keys the cache holds")
    k, v = autocast(k, v)
    return k, v


def _with_lse(out: Tensor, lse: Tensor, wanted: bool) -> Tensor | tuple[Tensor, Tensor]:
    return (out, lse) if wanted else out
