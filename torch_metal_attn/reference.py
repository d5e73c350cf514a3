"""The one oracle: attention in plain torch operations, for any dtype, device and length.

The CPU path of `metal_attn::flash_fwd`, the dense-mask route of the transformers integration, the
tests and the benchmarks all call `attention`, so that there is one definition of what the kernels
have to compute.
"""

import torch
from torch import Tensor

# Scores held at once. 2**23 float32 scores take 32 MiB, small beside any model and large enough for
# full-speed matmuls.
_SCORES_PER_BLOCK = 2**23


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal_offset: int | None = None,
    mask: Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Scaled dot-product attention with its log-sum-exp.

    For query i, with s_j = softmax_scale * <q_i, k_j> (+ mask_ij if the mask is additive) over the
    keys j it sees:

        out_i = sum_j exp(s_j - lse_i) v_j        lse_i = log sum_j exp(s_j)

    after Vaswani et al. 2017 (the softmax) and Dao et al. 2022, FlashAttention (the log-sum-exp
    kept per row). Key j is seen if j <= i + causal_offset (always, without one) and the mask is not
    False there. A query that sees no key gets out 0 and lse -inf; a NaN in the data comes out as
    NaN. Query head h reads key/value head h // (Hq // Hkv).

    Args: q: (B, Hq, Lq, D). k: (B, Hkv, Lk, D); Hkv divides Hq. v: (B, Hkv, Lk, Dv). softmax_scale:
        factor of the scores; D ** -0.5 if None. causal_offset: the causal diagonal; None means no
        causal mask. 0 aligns top-left, Lk - Lq bottom-right. mask: broadcastable to (B, Hq, Lq,
        Lk). Bool: False hides the key. Floating: added to the scaled score. compute_dtype: dtype of
        every intermediate and of both results. Without it, float32 (float64 for float64 inputs)
        inside, and `out` rounded to q's dtype at the end.

    Returns:
        out (B, Hq, Lq, Dv) and lse (B, Hq, Lq), natural logarithm.

    Raises:
        ValueError: the query heads are no multiple of the key/value heads.
        TypeError: the mask is neither bool nor floating.
    """
    batch, heads, q_length, head_dim = q.shape
    kv_heads, kv_length = k.shape[1], k.shape[2]
    if heads and (kv_heads == 0 or heads % kv_heads):
        raise ValueError(f"q has {heads} heads, which is no multiple of the {kv_heads} heads of k")
    if mask is not None and mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise TypeError(f"mask must be bool or floating, got {mask.dtype}")
    out_dtype = compute_dtype or q.dtype
    dtype = compute_dtype or torch.promote_types(q.dtype, torch.float32)
    if _autocasts(q.device.type):
        # Autocast would do the products in half precision, whatever the dtypes here are.
        with torch.autocast(q.device.type, enabled=False):
            return attention(
                q,
                k,
                v,
                softmax_scale=softmax_scale,
                causal_offset=causal_offset,
                mask=mask,
                compute_dtype=compute_dtype,
            )
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    if mask is not None:
        mask = mask.expand(batch, heads, q_length, kv_length)
    if causal_offset is not None:
        # Beyond these no row changes any more, and the sums below stay within int64 for any offset.
        causal_offset = max(-q_length, min(kv_length, causal_offset))
    k, v = k.to(dtype), v.to(dtype)

    rows = max(1, _SCORES_PER_BLOCK // max(1, batch * heads * kv_length))
    if rows >= q_length:
        out, lse = _query_block(q.to(dtype), k, v, scale, causal_offset, mask)
        return out.to(out_dtype), lse
    blocks = []
    for start in range(0, q_length, rows):
        stop = min(start + rows, q_length)
        offset = None if causal_offset is None else causal_offset + start
        # No query of this block sees a key past `end`.
        end = kv_length if offset is None else min(kv_length, max(0, stop - start + offset))
        out, lse = _query_block(
            q[:, :, start:stop].to(dtype),
            k[:, :, :end],
            v[:, :, :end],
            scale,
            offset,
            None if mask is None else mask[:, :, start:stop, :end],
        )
        blocks.append((out.to(out_dtype), lse))
    return torch.cat([out for out, _ in blocks], 2), torch.cat([lse for _, lse in blocks], 2)


def _autocasts(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _query_block(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal_offset: int | None, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`attention` for queries whose scores all fit in memory; everything in one dtype."""
    batch, heads, q_length, head_dim = q.shape
    kv_heads, kv_length = k.shape[1], k.shape[2]
    # The query heads that share a KV head become rows of one matrix, so k and v are never repeated.
    rows = heads * q_length // max(kv_heads, 1)
    grouped = q.reshape(batch, kv_heads, rows, head_dim)
    scores = (
        torch.matmul(grouped, k.transpose(-1, -2))
        .mul(scale)
        .view(batch, heads, q_length, kv_length)
    )
    if mask is not None:
        scores = (
            scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        )
    if causal_offset is not None:
        query = torch.arange(q_length, device=q.device)[:, None]
        key = torch.arange(kv_length, device=q.device)
        scores = scores.masked_fill(key > query + causal_offset, -torch.inf)
    if kv_length == 0:
        out = q.new_zeros(batch, heads, q_length, v.shape[-1])
        return out, q.new_full((batch, heads, q_length), -torch.inf)

    row_max = scores.amax(-1, keepdim=True)
    # -inf - -inf would be NaN: a row without keys subtracts 0 and keeps exp(-inf) = 0.
    row_max = row_max.masked_fill(row_max == -torch.inf, 0.0)
    weights = torch.exp(scores - row_max)
    row_sum = weights.sum(-1, keepdim=True)
    out = torch.matmul(weights.view(batch, kv_heads, rows, kv_length), v).view(
        batch, heads, q_length, v.shape[-1]
    )
    out = out / row_sum.masked_fill(row_sum == 0.0, 1.0)
    return out, (row_max + row_sum.log()).squeeze(-1)
