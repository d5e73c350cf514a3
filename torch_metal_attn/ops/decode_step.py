"""`metal_attn::decode_step` in Python: fake and CPU kernels, and autograd of its writes."""

from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.ops import append_kv
from torch_metal_attn.ops.cpu import cpu_kernel
from torch_metal_attn.ops.differentiation import refuse
from torch_metal_attn.ops.fake import register_fake
from torch_metal_attn.ops.flash_fwd import FlashFwdResult
from torch_metal_attn.ops.layout import empty_like_query
from torch_metal_attn.quantisation import columns
from torch_metal_attn.reference import attention

_ROTARY = (
    *("rotary_cos", "rotary_sin"),
    *("rotary_interleaved", "rotate_q_by_token", "rotary_from_leftpad", "rotary_first_column"),
)
# Options of both the append and the attention.
_CACHE = ("leftpad_k", "block_table", "cache_batch_idx", "k_scale", "v_scale")


def _split(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of append_kv, and those of attention without q's tables."""
    append = {n: x for n, x in options.items() if n in (*_ROTARY, *_CACHE)}
    return append, {n: x for n, x in options.items() if n not in _ROTARY}


@register_fake("decode_step")
def _fake(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *_: Any, **options: Any
) -> FlashFwdResult:
    out = empty_like_query(q, columns(v_cache, options.get("v_scale")))
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


@cpu_kernel("decode_step")
def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    *,
    num_splits: int = 0,
    **options: Any,
) -> FlashFwdResult:
    """The op composed of `rope`, `append_kv`, and attention to what the cache then holds."""
    append, attend = _split(options)
    if append.get("rotary_cos") is not None:
        q = q.clone()
        append["q"] = q
    append_kv.reference(k, v, k_cache, v_cache, cache_seqlens, **append)
    out, lse = attention(q, k_cache, v_cache, seqused_k=cache_seqlens + k.shape[2], **attend)
    return empty_like_query(q, out.shape[-1]).copy_(out), lse


refuse("decode_step", "detach it, as a cache keeps no graph", append_kv.written_caches)
