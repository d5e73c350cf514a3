"""The reference: attention in plain torch operations, for any dtype, device and length.

The CPU path of `metal_attn::flash_fwd` and `flash_varlen_fwd`, the tests and the benchmarks all
call these functions, so that the results of the kernels have one definition.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from torch_metal_attn.call import philox
from torch_metal_attn.call.autocast import without_autocast
from torch_metal_attn.call.visibility import (
    depths,
    existing_keys,
    in_window,
    positions_of,
    times_listed,
    tree_keys,
    tree_rows,
)
from torch_metal_attn.quantisation import columns, dequantise, rotated

# 2**23 float32 scores take 32 MiB, which is enough for full-speed matmuls.
_SCORES_PER_BLOCK = 2**23


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    q_offset: int | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    learnable_sink: Tensor | None = None,
    q_rotary_cos: Tensor | None = None,
    q_rotary_sin: Tensor | None = None,
    k_rotary_cos: Tensor | None = None,
    k_rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    dropout_p: float = 0.0,
    rng_state: Tensor | None = None,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    hadamard: int = 0,
    indices: Tensor | None = None,
    kv_block_size: int = 1,
    q_block_size: int = 1,
    parents: Tensor | None = None,
    tree_mask: Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
    first_batch: int = 0,
    **transform: float,
) -> tuple[Tensor, Tensor]:
    """Scaled dot-product attention with its log-sum-exp.

    Query i is at key index p = i + q_offset and sees a set of keys V_i. The score of key j is

        s_j = softmax_scale * <q_i, k_j>
        s_j = transformed(s_j)                       the scalar options, such as softcap
        s_j = s_j - alibi_slope * |p - j|            (Press et al. 2021, ALiBi)
        s_j = s_j + attn_bias_ij

    and with sink the head's learnable_sink (gpt-oss, 2025), or -inf without one, over the j in V_i:

        lse_i = log(exp(sink) + sum_j exp(s_j))      out_i = sum_j exp(s_j - lse_i) z_ij v_j

    after Vaswani et al. 2017 (the softmax) and Dao et al. 2022, FlashAttention (the log-sum-exp of
    each row). z_ij is 1 without dropout; with dropout it is 1 / (1 - dropout_p) where
    `philox.dropout_mask` keeps the weight, and 0 elsewhere (Srivastava et al. 2014). A query that
    sees no key gets out 0 and lse = sink. NaN in data that a query sees gives NaN in its result.
    Query head h reads key/value head h // (Hq // Hkv).

    V_i holds the keys j for which all of these are true: leftpad_k <= j < seqused_k;
    p - window_size_left <= j <= p + window_size_right, where a negative size means no limit; with
    causal j <= p; with attention_chunk c > 0 floor((j - leftpad_k) / c) = floor((p - leftpad_k) /
    c) (Llama 4); attn_mask is not False; and with indices, query i's list contains j's block. A key
    that is listed twice counts twice, like two equal keys.

    Args: q: (B, Hq, Lq, D). k: (B, Hkv, Lk, D); Hkv divides Hq. v: (B, Hkv, Lk, Dv). softmax_scale:
        D ** -0.5 if None. q_offset: None aligns bottom-right: seqused_k - Lq; 0 is top-left.
        seqused_k, leftpad_k: (B,) integers; Lk and 0 if None. Other keys and values may be NaN.
        attn_mask: broadcastable to (B, Hq, Lq, Lk). Bool: False hides the key. Floating: as
        attn_bias. attn_bias: floating, of such a shape. alibi_slopes: (Hq,) or (B, Hq).
        learnable_sink: (Hq,). q_rotary_cos, q_rotary_sin: (Lq', R/2) or (B, Lq', R/2), Lq' >= Lq:
        row i rotates query i's first R columns before the product; k_rotary_cos and k_rotary_sin
        rotate keys. See `rotate`. dropout_p: in 0..1. rng_state: (2,) int64, a seed and an offset,
        if dropout_p > 0. block_table (B, max_blocks) or cache_batch_idx (B,): each sequence's keys
        and values in a cache, see `cached`; Lk is then the capacity of the table or cache. k_scale,
        v_scale, hadamard: of quantised k and v, see `quantisation`. indices: (B or 1, Hkv or 1,
        lists, entries): query i uses list i // q_block_size, and entry e lists the kv_block_size
        keys from e * kv_block_size on; -1 lists no key (DeepSeek-V3.2, 2025). parents, tree_mask:
        the last keys belong to the queries and form a tree, see `tree_rows`. The tree alone
        determines which of these keys a query sees; windows and chunks count positions by depth.
        first_batch: the first sequence's index for dropout. transform: options of `transformed`.
        compute_dtype: dtype of every intermediate and of both results. Without it, intermediates
        are float32 (float64 for float64 inputs), and `out` is rounded to q's dtype at the end.

    Returns:
        out (B, Hq, Lq, Dv) and lse (B, Hq, Lq), natural logarithm.

    Raises:
        ValueError: the number of query heads is not a multiple of the key/value heads.
        TypeError: the mask is neither bool nor floating.
    """
    k = _cached_values(k, k_scale, block_table, cache_batch_idx)
    v = _cached_values(v, v_scale, block_table, cache_batch_idx)
    batch, heads, q_length, head_dim = q.shape
    kv_heads, kv_length = k.shape[1], k.shape[2]
    if heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(
            f"q has {heads} heads and k {kv_heads}; the number of heads of k must divide that of q"
        )
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_bias = attn_mask if attn_bias is None else attn_mask + attn_bias
        attn_mask = None
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        raise TypeError(f"attn_mask must be bool or floating, got {attn_mask.dtype}")
    out_dtype = compute_dtype or q.dtype
    dtype = compute_dtype or torch.promote_types(q.dtype, torch.float32)
    if causal:
        window_size_right = 0

    exists = existing_keys(seqused_k, leftpad_k, kv_length, q.device)
    if q_rotary_cos is not None and q_rotary_sin is not None:
        q = rotate(q.to(dtype), q_rotary_cos, q_rotary_sin, rotary_interleaved)
    if k_rotary_cos is not None and k_rotary_sin is not None:
        k = rotate(k.to(dtype), k_rotary_cos, k_rotary_sin, rotary_interleaved)
    if exists is not None:
        # 0 * NaN is NaN, so a weight of 0 does not remove a NaN. Missing keys and values become 0.
        k, v = (x.masked_fill(~exists[:, None, :, None], 0.0) for x in (k, v))
    k, v = (rotated(x.to(dtype), hadamard) for x in (k, v))
    positions = positions_of(q_length, kv_length, q_offset, seqused_k, q.device)
    keys = torch.arange(kv_length, device=q.device)
    seen = tree_rows(parents, tree_mask) if q_length else None
    if seen is not None:
        new = keys - positions[:, :1]
        positions = positions[:, :1] + depths(seen)

    def block(rows: slice) -> tuple[Tensor, Tensor]:
        position = positions[:, rows, None]
        right = window_size_right if seen is None else -1
        limits = (window_size_left, right, attention_chunk, leftpad_k)
        if seen is None:
            visible = in_window(position, keys, *limits)
        else:
            shown, ranks = tree_keys(seen[:, rows], new)
            places = torch.minimum(keys - new[:, None].clamp(min=0) + ranks, position)
            visible = shown & in_window(position, places, *limits)
        if exists is not None:
            visible = visible & exists[:, None]
        visible = visible[:, None]
        if attn_mask is not None:
            visible = visible & _rows(attn_mask, rows, q_length)
        bias = _alibi(alibi_slopes, position, keys, dtype)
        if indices is not None:
            times = times_listed(indices, kv_block_size, q_block_size, rows, q_length, kv_length)
            if times.shape[1] > 1:
                times = times.repeat_interleave(heads // kv_heads, 1)
            visible = visible & (times > 0)
            bias = bias + times.clamp(min=1).to(dtype).log()
        if attn_bias is not None:
            bias = bias + _rows(attn_bias, rows, q_length)
        factors = None
        if rng_state is not None:
            sequences, queries = range(first_batch, first_batch + batch), range(q_length)[rows]
            kept = philox.keep_mask(rng_state, dropout_p, sequences, heads, queries, kv_length)
            factors = kept.to(dtype) * (1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0)
        seen_k, seen_v = k, v
        if one_row:
            by_head = visible.expand(-1, heads, -1, -1).unflatten(1, (kv_heads, -1))
            unread = ~by_head.any(2).transpose(2, 3)
            seen_k, seen_v = (x.masked_fill(unread, 0.0) for x in (k, v))
        return _query_block(
            q[:, :, rows].to(dtype),
            seen_k,
            seen_v,
            head_dim**-0.5 if softmax_scale is None else softmax_scale,
            transform,
            bias,
            visible,
            None if learnable_sink is None else learnable_sink.to(dtype),
            factors,
        )

    # Kernels skip unlisted keys. If k or v is not finite, a block is one query and zeroes them.
    one_row = indices is not None and not all(bool(x.isfinite().all()) for x in (k, v))
    rows = 1 if one_row else max(1, _SCORES_PER_BLOCK // max(1, batch * heads * kv_length))
    starts = range(0, max(q_length, 1), rows)
    run: Callable[[slice], tuple[Tensor, Tensor]] = block
    if len(starts) > 1 and torch.is_grad_enabled():
        # The backward computes each block again, so the forward saves no intermediates.
        run = partial(checkpoint, block, use_reentrant=False, preserve_rng_state=False)
    with without_autocast(q.device.type):  # autocast's torch.cat refuses float16 on the CPU
        blocks = [run(slice(start, min(start + rows, q_length))) for start in starts]
        out = torch.cat([out.to(out_dtype) for out, _ in blocks], 2)
        return out, torch.cat([lse for _, lse in blocks], 2)


def scores(
    q: Tensor,
    k: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    alibi_slopes: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """The scores before the softmax of `attention`: (B, Hq, Lq, Lk) float32, -inf if hidden."""
    with torch.no_grad():
        keys = torch.arange(k.shape[2], device=q.device)
        position = positions_of(q.shape[2], k.shape[2], None, None, q.device)[..., None]
        left, right = (options.get(f"window_size_{side}", -1) for side in ("left", "right"))
        limits = left, 0 if causal else right, options.get("attention_chunk", 0), None
        return _scores(
            q.float(),
            k.float(),
            q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
            {name: options[name] for name in _TRANSFORMS if name in options},
            _alibi(alibi_slopes, position, keys, torch.float32),
            in_window(position, keys, *limits)[:, None],
        )


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int = 0,
    *,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`attention` for packed sequences, each with its own queries and keys.

    Args: q: (Tq, Hq, D). k: (Tk, Hkv, D). v: (Tk, Hkv, Dv). cu_seqlens_q, cu_seqlens_k: (B + 1,):
        sequence b has the rows cu_seqlens[b] to cu_seqlens[b + 1] - 1. max_seqlen_q, max_seqlen_k:
        the sizes that masks and biases broadcast to. block_table or cache_batch_idx: k and v are a
        cache as in `attention`, and sequence b has the first cu_seqlens_k[b + 1] -
        cu_seqlens_k[b] of them. k_scale, v_scale and options: those of `attention`; positions and
        lengths count from each sequence's first row, and indices (1, Hkv or 1, Tq, entries) has a
        list for each row. parents (Tq,) and tree_mask (Tq, max_seqlen_q) are packed as q is.
        Without cu_seqlens_k, only queries are packed: k and v are those of `attention`.

    Returns:
        out (Tq, Hq, Dv) and lse (Hq, Tq). Queries outside all sequences get 0 and -inf; without
        cu_seqlens_k and with a sink, their lse is the sink.
    """
    out = q.new_zeros((*q.shape[:2], columns(v, v_scale)), dtype=compute_dtype or q.dtype)
    lse_dtype = compute_dtype or torch.promote_types(q.dtype, torch.float32)
    lse = q.new_full((q.shape[1], q.shape[0]), -torch.inf, dtype=lse_dtype)
    sink = options.get("learnable_sink")
    if cu_seqlens_k is None and sink is not None:
        lse[:] = sink[:, None]
    indexed = block_table is not None or cache_batch_idx is not None
    k_bounds = None if cu_seqlens_k is None else cu_seqlens_k.tolist()

    def rows_of_sequence(x: Tensor, b: int) -> Tensor:
        if x.dim() < 3:  # one scale per head
            return x if x.dim() == 1 else x[b]
        if k_bounds is not None and not indexed:
            return x[None, slice(*k_bounds[b : b + 2])].transpose(1, 2)
        tables = (None if i is None else i[b : b + 1] for i in (block_table, cache_batch_idx))
        rows = cached(x, *tables) if indexed else x[b : b + 1]
        return rows if k_bounds is None else rows[:, :, : k_bounds[b + 1] - k_bounds[b]]

    q_bounds = cu_seqlens_q.tolist()
    for b in range(len(q_bounds) - 1):
        queries = slice(*q_bounds[b : b + 2])
        keys = rows_of_sequence(k, b)
        kv_length = keys.shape[2]
        sequence_out, sequence_lse = attention(
            q[None, queries].transpose(1, 2),
            keys,
            rows_of_sequence(v, b),
            k_scale=None if k_scale is None else rows_of_sequence(k_scale, b),
            v_scale=None if v_scale is None else rows_of_sequence(v_scale, b),
            compute_dtype=compute_dtype,
            first_batch=b,
            **{
                name: option_of_sequence(name, value, b, queries, kv_length)
                for name, value in options.items()
            },
        )
        out[queries] = sequence_out[0].transpose(0, 1)
        lse[:, queries] = sequence_lse[0]
    return out, lse


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding (Su et al. 2021, RoFormer) of x, (B, H, L, D), in x's dtype.

    cos, sin: (L', R/2) or (B, L', R/2), L' >= L. The pair (a, b) of columns c and c + R/2, or with
    `interleaved` of columns 2c and 2c + 1, becomes (a cos_c - b sin_c, b cos_c + a sin_c). Columns
    from R on do not change.
    """
    cos, sin = (
        table[..., : x.shape[2], :].to(x.dtype).unsqueeze(-3)  # (1 or B, 1, L, R/2)
        for table in (cos, sin)
    )
    return rotate_pairs(x, cos, sin, interleaved)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """`rotate` with tables (..., R/2) that broadcast against x."""
    half = cos.shape[-1]
    first, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (first[..., 0::2], first[..., 1::2]) if interleaved else first.split(half, -1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    result = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([result, rest], -1)


def cached(x: Tensor, block_table: Tensor | None, cache_batch_idx: Tensor | None) -> Tensor:
    """A cache's rows in the order of each sequence's keys: (B, Hkv, Lk, D), 0 for missing pages.

    x: (Bc, Hkv, Lk, D), in which sequence b has row cache_batch_idx[b]; or (pages, Hkv, page, D),
    in which key i of sequence b is row i % page of page block_table[b, i // page] (Kwon et al.
    2023, PagedAttention). Scales of blocks are looked up in the same way. Scales per head are
    returned unchanged, and so is x without tables.
    """
    if x.dim() < 3 or (block_table is None and cache_batch_idx is None):
        return x
    if x.dtype == torch.float8_e4m3fn:
        return cached(x.view(torch.uint8), block_table, cache_batch_idx).view(x.dtype)
    if cache_batch_idx is not None:
        return x[cache_batch_idx.long()]
    assert block_table is not None
    if len(x) == 0:  # page 0 stands for missing pages below
        x = x.new_zeros(1, *x.shape[1:])
    exists = (block_table >= 0) & (block_table < len(x))
    pages = x[block_table.where(exists, 0).long()]  # (B, max_blocks, Hkv, page, D)
    pages = pages.masked_fill(~exists[..., None, None, None], 0)
    return pages.transpose(1, 2).flatten(2, 3)


def _cached_values(x: Tensor, scale: Tensor | None, *tables: Tensor | None) -> Tensor:
    """K or V of a cache, dequantised to float32 if necessary."""
    x, scale = cached(x, *tables), None if scale is None else cached(scale, *tables)
    quantised = not x.is_floating_point() or x.dtype == torch.float8_e4m3fn
    return dequantise(x, scale, torch.float32) if quantised else x


def _alibi(slopes: Tensor | None, position: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
    """The bias of slopes (H,) or (B, H), broadcastable to (B, H, rows, Lk); 0 without slopes."""
    if slopes is None:
        return torch.zeros((), dtype=dtype, device=keys.device)
    return -slopes.to(dtype)[..., None, None] * (position - keys).abs()[:, None]


def _rows(mask: Tensor, rows: slice, q_length: int) -> Tensor:
    """These rows of a mask with a row per query; a mask that broadcasts over queries as it is."""
    return mask[..., rows, :] if mask.dim() > 1 and mask.shape[-2] == q_length != 1 else mask


def option_of_sequence(name: str, value: Any, b: int, queries: slice, kv_length: int) -> Any:
    """An option of `varlen_attention` in the form that `attention` takes for sequence b."""
    if not isinstance(value, Tensor):
        return value
    if name == "indices":
        return value[:, :, queries]
    if name in ("parents", "tree_mask"):
        packed = value[queries]
        return packed[:, : len(packed)] if name == "tree_mask" else packed
    if name in ("seqused_k", "leftpad_k"):
        return value[b : b + 1]
    if name in ("attn_mask", "attn_bias"):
        if value.dim() == 4 and value.shape[0] > 1:
            value = value[b : b + 1]
        if value.shape[-1] > 1:
            value = value[..., :kv_length]
        q_length = queries.stop - queries.start
        return value[..., :q_length, :] if value.dim() > 1 and value.shape[-2] > 1 else value
    if name == "alibi_slopes" and value.dim() == 2:
        return value[b]
    if "rotary" in name and value.dim() == 3 and value.shape[0] > 1:
        return value[b]
    return value


def transformed(scores: Tensor, *, softcap: float = 0.0) -> Tensor:
    """Functions of a single score. softcap > 0: Gemma 2's soft cap (2024)."""
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    return scores


_TRANSFORMS = frozenset(transformed.__annotations__) - {"scores", "return"}


def _scores(
    q: Tensor,
    k: Tensor,
    scale: float,
    transform: dict[str, float],
    bias: Tensor,
    visible: Tensor,
) -> Tensor:
    batch, heads, q_length, head_dim = q.shape
    kv_heads, kv_length = k.shape[1], k.shape[2]
    # The query heads that share a KV head become rows of one matrix, so k is not repeated.
    rows = heads * q_length // max(kv_heads, 1)
    grouped = q.reshape(batch, kv_heads, rows, head_dim)
    products = torch.matmul(grouped, k.transpose(-1, -2)).mul(scale)
    scores = transformed(products.view(batch, heads, q_length, kv_length), **transform)
    return (scores + bias).masked_fill(~visible, -torch.inf)


def _query_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    transform: dict[str, float],
    bias: Tensor,
    visible: Tensor,
    sink: Tensor | None,
    dropout_factors: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`attention` for a block of queries, with all operands in one dtype."""
    batch, heads, q_length, _ = q.shape
    kv_heads, kv_length = k.shape[1], k.shape[2]
    rows = heads * q_length // max(kv_heads, 1)
    scores = _scores(q, k, scale, transform, bias, visible)

    # The result does not depend on the number that is subtracted, so the maximum is detached.
    row_max = q.new_full((batch, heads, q_length, 1), -torch.inf)
    if kv_length:
        row_max = scores.detach().amax(-1, keepdim=True)
    if sink is not None:
        sink = sink[:, None, None]
        row_max = torch.maximum(row_max, sink.detach())
    # -inf - -inf would be NaN, so a row without keys subtracts 0 and keeps exp(-inf) = 0.
    row_max = row_max.masked_fill(row_max == -torch.inf, 0.0)
    weights = torch.exp(scores - row_max)
    row_sum = weights.sum(-1, keepdim=True)
    if sink is not None:
        row_sum = row_sum + torch.exp(sink - row_max)
    if dropout_factors is not None:
        weights = weights * dropout_factors
    out = torch.matmul(weights.view(batch, kv_heads, rows, kv_length), v)
    out = out.view(batch, heads, q_length, v.shape[-1])
    # log's derivative is infinite at 0, so a sum of 0 is replaced to give gradients of 0, not NaN.
    empty = row_sum == 0.0
    row_sum = row_sum.masked_fill(empty, 1.0)
    lse = (row_max + row_sum.log()).masked_fill(empty, -torch.inf)
    return out / row_sum, lse.squeeze(-1)
