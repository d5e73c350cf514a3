"""Visible keys of each query, in plain torch operations: positions, windows, lists and trees."""

import torch
from torch import Tensor


def existing_keys(
    seqused_k: Tensor | None, leftpad_k: Tensor | None, kv_length: int, device: torch.device
) -> Tensor | None:
    """Bool (B, Lk), or None if every key exists."""
    if seqused_k is None and leftpad_k is None:
        return None
    ends, pads = (None if x is None else x[:, None] for x in (seqused_k, leftpad_k))
    return _exist(torch.arange(kv_length, device=device), ends, pads)


def _exist(keys: Tensor, ends: Tensor | None, pads: Tensor | None) -> Tensor:
    exist = torch.ones_like(keys, dtype=torch.bool)
    if ends is not None:
        exist = exist & (keys < ends)
    return exist if pads is None else exist & (keys >= pads)


def positions_of(
    q_length: int,
    kv_length: int,
    q_offset: int | None,
    seqused_k: Tensor | None,
    device: torch.device,
) -> Tensor:
    """The key index of each query: (B or 1, Lq)."""
    query = torch.arange(q_length, device=device)[None]
    if q_offset is not None:
        return query + q_offset
    if seqused_k is not None:
        return query + (seqused_k.to(query.dtype)[:, None] - q_length)
    return query + (kv_length - q_length)


def in_window(
    position: Tensor, keys: Tensor, left: int, right: int, chunk: int, leftpad_k: Tensor | None
) -> Tensor:
    """The keys that positions (B or 1, rows, 1) see in windows and chunks: (B or 1, rows, Lk)."""
    visible = torch.ones_like(position - keys, dtype=torch.bool)
    if left >= 0:
        visible &= position - keys <= left
    if right >= 0:
        visible &= keys - position <= right
    if chunk > 0:
        origin = 0 if leftpad_k is None else leftpad_k.to(keys.dtype)[:, None, None]
        visible = visible & ((keys - origin) // chunk == (position - origin) // chunk)
    return visible


def _listed_keys(entries: Tensor, kv_block_size: int) -> Tensor:
    """The keys of the listed blocks, (..., keys) int64; those of entry -1 are negative."""
    first = entries.long()[..., None] * kv_block_size
    return (first + torch.arange(kv_block_size, device=entries.device)).flatten(-2)


def times_listed(
    indices: Tensor,
    kv_block_size: int,
    q_block_size: int,
    rows: slice,
    q_length: int,
    kv_length: int,
) -> Tensor:
    """How often each query's list contains each key: (B or 1, Hkv or 1, rows, Lk) int32."""
    queries = torch.arange(q_length, device=indices.device)[rows]
    keys = _listed_keys(indices[:, :, queries // q_block_size], kv_block_size)
    # An extra column counts entry -1 and entries after the last key.
    keys = keys.where(keys >= 0, kv_length).clamp(max=kv_length)
    times = torch.zeros(*keys.shape[:3], kv_length + 1, dtype=torch.int32, device=indices.device)
    return times.scatter_add_(3, keys, torch.ones_like(keys, dtype=torch.int32))[..., :kv_length]


def visible_listed(
    indices: Tensor,
    lists: slice,
    kv_block_size: int,
    q_block_size: int,
    q_length: int,
    kv_length: int,
    *,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    q_offset: int | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Listed keys (B, H, lists, K), and which queries see them (B, H, lists, q_block_size, K)."""
    keys = _listed_keys(indices[:, :, lists], kv_block_size)
    batch, heads, count, _ = keys.shape
    query = torch.arange(lists.start * q_block_size, lists.stop * q_block_size, device=keys.device)
    # Aligned bottom-right, a single query is at the last key.
    first = positions_of(1, kv_length, q_offset, seqused_k, keys.device)
    first = first if q_offset is not None else first + 1 - q_length
    # Each list becomes a sequence of its own.
    position = (first + query).expand(batch, -1).unflatten(1, (count, q_block_size))
    position = position[:, None].expand(-1, heads, -1, -1).flatten(0, 2)[..., None]
    listed = keys.flatten(0, 2)[:, None]
    ends, pads = (
        None if x is None else x.long().repeat_interleave(heads * count)
        for x in (seqused_k, leftpad_k)
    )
    right = 0 if causal else window_size_right
    seen = in_window(position, listed, window_size_left, right, attention_chunk, pads)
    seen = seen & (listed >= 0) & (listed < kv_length)
    seen = seen & _exist(listed, *(x if x is None else x[:, None, None] for x in (ends, pads)))
    seen = seen.view(batch, heads, count, q_block_size, keys.shape[3])
    return keys, seen & (query < q_length).view(count, q_block_size, 1)


def tree_rows(parents: Tensor | None, tree_mask: Tensor | None) -> Tensor | None:
    """The new tokens that each new token sees: bool (B or 1, L, L), or None without a tree.

    parents: (L,) or (B, L), an earlier token or -1 for no parent. A token sees itself and the
    tokens that its parent sees. tree_mask: (L, L) or (B, L, L).
    """
    if tree_mask is not None:
        return tree_mask if tree_mask.dim() == 3 else tree_mask[None]
    if parents is None:
        return None
    tree = parents.long() if parents.dim() == 2 else parents.long()[None]
    batch, length = tree.shape
    seen = torch.eye(length, dtype=torch.bool, device=tree.device).repeat(batch, 1, 1)
    for i in range(length):
        by_parent = seen[torch.arange(batch, device=tree.device), tree[:, i].clamp(min=0)]
        seen[:, i] |= by_parent & (tree[:, i, None] >= 0)
    return seen


def depths(seen: Tensor) -> Tensor:
    """The depth of each token, which is the number of earlier tokens that it sees."""
    return seen.tril(-1).sum(-1)


def tree_keys(seen: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """The keys that the queries of a tree see, and the number of new tokens seen before each key.

    seen: (B or 1, rows, L). new: (B or 1, Lk), the index of each key relative to the first new one.
    Both results are (B, rows, Lk).
    """
    (batch,), (_, rows, length) = torch.broadcast_shapes(seen.shape[:1], new.shape[:1]), seen.shape
    before = seen.cumsum(-1) - seen.long()
    place = new.clamp(0, max(length - 1, 0))[:, None].expand(batch, rows, -1)
    shown, ranks = (x.expand(batch, rows, length).gather(-1, place) for x in (seen, before))
    return shown | (new[:, None] < 0), ranks * (new[:, None] >= 0)
