"""`metal_attn::decode_step` in Python: fake and CPU kernels, and autograd of its writes."""

from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.call.visibility import depths, tree_rows
from torch_metal_attn.ops import append_kv
from torch_metal_attn.ops.cpu import cpu_kernel
from torch_metal_attn.ops.differentiation import refuse
from torch_metal_attn.ops.fake import register_fake
from torch_metal_attn.ops.flash_decode import decode_reference
from torch_metal_attn.ops.flash_fwd import FlashFwdResult, empty_results
from torch_metal_attn.ops.layout import empty_like_query

# Options of both `append_kv` and attention. Options of `append_kv` alone begin with "rota".
_CACHE = ("leftpad_k", "block_table", "cache_batch_idx", "k_scale", "v_scale", "hadamard")
_WRITTEN = ("k_cache", "v_cache", "cache_seqlens")


def _dense(packed: Tensor, rows: slice) -> Tensor:
    return packed[rows].transpose(0, 1)[None]


def _of_sequence(b: int, arguments: dict[str, Any]) -> dict[str, Any]:
    # Without a table, sequence b is in row b of the caches.
    in_place = arguments.get("block_table") is None and arguments.get("cache_batch_idx") is None
    sequence = dict(arguments)
    for name, x in arguments.items():
        by_sequence = name in ("cache_seqlens", "leftpad_k", "block_table", "cache_batch_idx")
        if name in ("k_scale", "v_scale") and x is not None:
            by_sequence = x.dim() == 2
        if x is not None and (by_sequence or (in_place and torch.is_tensor(x) and x.dim() == 4)):
            sequence[name] = x[b : b + 1]
    return sequence


def _steps(parents: Tensor | None, tree_mask: Tensor | None) -> Tensor | None:
    seen = tree_rows(parents, tree_mask)
    return None if seen is None else depths(seen)


@register_fake("decode_step")
def _fake(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *_: Any, **options: Any
) -> FlashFwdResult:
    return empty_results(q, k_cache, v_cache, **options)


@cpu_kernel("decode_step")
def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    parents: Tensor | None = None,
    tree_mask: Tensor | None = None,
    **options: Any,
) -> FlashFwdResult:
    """The op composed of `rope`, `append_kv` and attention to the cache."""
    append = {n: x for n, x in options.items() if n in _CACHE or n.startswith("rota")}
    attend = {n: x for n, x in options.items() if not n.startswith("rota")}
    rotates = append.get("rotary_cos") is not None
    q = q.clone() if rotates else q
    written = (k_cache, v_cache, cache_seqlens)
    if cu_seqlens_q is None:
        new = k.shape[2] + torch.zeros_like(cache_seqlens)
        append["steps"] = _steps(parents, tree_mask)
        append_kv.reference(k, v, *written, **append | ({"q": q} if rotates else {}))
    else:
        ends = cu_seqlens_q if cu_seqlens_k_new is None else cu_seqlens_k_new
        new = ends.diff()
        attend["cu_seqlens_q"] = cu_seqlens_q
        for b in range(len(new)):
            rows = slice(*ends[b : b + 2].tolist())
            tree = (
                None if parents is None else parents[rows],
                None if tree_mask is None else tree_mask[rows, : rows.stop - rows.start],
            )
            sequence = _of_sequence(b, dict(zip(_WRITTEN, written, strict=True)) | append)
            if rotates:
                sequence["q"] = _dense(q, slice(*cu_seqlens_q[b : b + 2].tolist()))
            append_kv.reference(_dense(k, rows), _dense(v, rows), steps=_steps(*tree), **sequence)
    attend |= {"parents": parents, "tree_mask": tree_mask}
    out, lse = decode_reference(q, k_cache, v_cache, seqused_k=cache_seqlens + new, **attend)
    return empty_like_query(q, out.shape[-1]).copy_(out), lse


refuse("decode_step", "detach it, as a cache keeps no graph", append_kv.written_caches)
