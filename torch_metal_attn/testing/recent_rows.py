"""Runs cases of `Step` on caches of `kv_cache` that keep recent rows in full precision."""

from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.kv_cache import PagedKVCache, StaticKVCache
from torch_metal_attn.testing.tensors import dtype_of
from torch_metal_attn.with_kvcache import VERIFY_QUERIES

# Arguments of the op that a cache's `decode_step` does not take.
_NOT_OF_CACHES = (
    *("k_cache", "v_cache", "k_scale", "v_scale", "cache_seqlens", "block_table", "hadamard"),
    *("cu_seqlens_q", "cu_seqlens_k_new", "max_seqlen_q", "rotary_from_leftpad"),
    "window_size_left",
)


def step_of_cache(
    case: Any, device: torch.device, old: list[Tensor], **arguments: Any
) -> tuple[Tensor, None]:
    """Fill a cache with `old`, and call its `decode_step`."""
    size = (case.kv_heads, case.head_dim, case.v_head_dim)
    scale = torch.linspace(0.02, 0.03, case.kv_heads, device=device)
    scales = {"k_scale": scale} if case.format == "fp8_e4m3" else {}
    if (case.v_format or case.format) == "fp8_e4m3" and not case.values_in_keys:
        scales["v_scale"] = scale
    names = ("format", "hadamard", "values_in_keys", "recent")
    options: dict[str, Any] = scales | {n: getattr(case, n) for n in names}
    options |= {"dtype": dtype_of(case.dtype), "device": device, "v_format": case.v_format or None}
    batch = len(case.lengths)
    cache: Any
    if case.cache == "paged":
        cache = PagedKVCache(batch * case.capacity // case.page, case.page, *size, **options)
        ids = [cache.allocate() for _ in case.lengths]
    else:
        cache = StaticKVCache(batch, case.capacity, *size, **options)
        ids = list(range(batch))
    sequences = (ids,) if case.cache == "paged" else ()
    cache.append(*sequences, *(x[:, :, : max(case.lengths)].to(device) for x in old))
    for id, length in zip(ids, case.lengths, strict=True):
        cache.truncate(id, length, keep_recent=False)
    kept = {n: x for n, x in arguments.items() if n not in _NOT_OF_CACHES}
    if case.packed:
        kept["length"] = [new for _, new in case.packed]
    if not case.rotary_columns:
        kept = {name: x for name, x in kept.items() if not name.startswith("rota")}
    return cache.decode_step(*sequences, **kept, softmax_scale=case.head_dim**-0.5), None


def first_recent(case: Any) -> list[int]:
    """For each sequence, the first row that attention reads in full precision."""
    if not case.recent:
        return [case.capacity] * len(case.lengths)
    room = case.recent + VERIFY_QUERIES
    filled = max(max(case.lengths) - room, 0)
    ends = zip(case.lengths, case.lengths_after, strict=True)
    return [max(min(filled, n), end - room) for n, end in ends]
