"""`CascadePlan`: pages that several sequences of a batch share are read only once."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.call.arguments import (
    INT32_MAX,
    Window,
    as_bool,
    as_int_at_least,
    check_rank,
    integers,
    on_device,
    only_given,
    to_bhld,
    window,
)
from torch_metal_attn.call.options import limit_options
from torch_metal_attn.kv_cache.trees import Rows, rows_of_ints
from torch_metal_attn.ops.names import ArgumentNames

_NAMES = ArgumentNames({"k": "k_cache", "v": "v_cache"}, blhd=True)


@dataclass(frozen=True)
class SharedPages:
    """The block table rows of `sequences` have equal pages in columns [first, end)."""

    sequences: tuple[int, ...]
    first: int
    end: int


@dataclass(frozen=True)
class _Walk:
    """The arguments of one call of attention."""

    block_table: Tensor  # (N, blocks)
    seqused_k: Tensor  # (N,)
    gathered: Tensor | None = None  # (R,): sequences, ordered by table row; None for all
    packing: dict[str, Any] = field(default_factory=dict)  # the op's options for packed queries
    places: Tensor | None = None  # (B,): the index in `gathered` of each sequence
    mask: Tensor | None = None  # (B, Lq): True for queries of sequences in `gathered`


class CascadePlan:
    """A plan to read shared pages of a batch once per step. One plan serves all layers.

    Sequences whose block tables begin with the same pages share a prefix. Some of them may share
    further pages, so prefixes form a tree. Each level of the tree is one call of `flash_decode`, in
    which the queries of all sequences that share pages are packed as one sequence. One more call
    reads the other pages of each sequence, and `merge_state_` merges the results (FlashInfer's
    MultiLevelCascade, vLLM's cascade attention). A page is shared only if all queries of these
    sequences see all of its keys.

    Args: block_table: (B, max_blocks), ints. seqlens: (B,), the keys of each sequence, including
        the keys of the new tokens. page_size: keys of a page. q_length: queries of each sequence.
        causal, window_size: as in `flash_attn_with_kvcache`. Sequences that are longer than a
        window share no pages. min_pages: prefixes of fewer pages are not shared. device: that of
        the caches; None is block_table's, or the CPU. The constructor copies tensors to the host.

    Attributes: levels: the `SharedPages` of each level. keys_read: the keys that a layer reads per
        KV head. keys_alone: the keys that it would read without sharing.

    Raises: ValueError, TypeError: an invalid argument, or sizes that do not agree.
    """

    def __init__(
        self,
        block_table: Rows,
        seqlens: Tensor | Sequence[int],
        page_size: int,
        q_length: int = 1,
        *,
        causal: bool = True,
        window_size: Window = (-1, -1),
        min_pages: int = 1,
        device: torch.device | str | None = None,
    ) -> None:
        lengths = integers("seqlens", seqlens)
        pages = rows_of_ints("block_table", block_table, len(lengths))
        page_size = as_int_at_least("page_size", page_size, 1, INT32_MAX)
        q_length = as_int_at_least("q_length", q_length, 1, INT32_MAX // max(len(lengths), 1))
        min_pages = as_int_at_least("min_pages", min_pages, 1)
        if len({len(row) for row in pages}) > 1:
            raise ValueError("block_table has rows of different lengths; it must be (B, blocks)")
        for b, (row, length) in enumerate(zip(pages, lengths, strict=True)):
            for page in row:
                if not -INT32_MAX <= page <= INT32_MAX:
                    raise ValueError(f"block_table[{b}] has {page}; it must fit int32")
            if not 0 <= length <= len(row) * page_size:
                raise ValueError(
                    f"seqlens[{b}] is {length}; it must be in 0..{len(row) * page_size}, the keys "
                    f"of {len(row)} pages"
                )
        if device is None:
            device = block_table.device if isinstance(block_table, Tensor) else "cpu"
        device = on_device(device)
        self.batch_size, self.q_length, self.page_size = len(lengths), q_length, page_size
        left, right = window(window_size)
        self._options = limit_options(as_bool("causal", causal), left, right)
        # Raises if the cache that created the plan has changed since.
        self.check_current: Callable[[Tensor], None] | None = None
        right = 0 if causal else right
        limits = [_shareable(length, q_length, left, right) // page_size for length in lengths]
        self.levels = _levels(pages, limits, min_pages)
        starts = [0] * len(lengths)
        shared = [one for level in self.levels for one in level]
        for one in shared:
            for b in one.sequences:
                starts[b] = one.end
        rest = [row[start:] for row, start in zip(pages, starts, strict=True)]
        used = [n - start * page_size for n, start in zip(lengths, starts, strict=True)]
        self.keys_alone = sum(lengths)
        self.keys_read = sum(one.end - one.first for one in shared) * page_size + sum(used)
        self._walks = [self._shared_walk(level, pages, device) for level in self.levels]
        self._rest = _Walk(block_table_of(rest, device), _ints(used, device))

    def attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        learnable_sink: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        hadamard: int = 0,
        num_splits: int = 0,
    ) -> Tensor:
        """Attention of one layer, as `flash_attn_with_kvcache` without k and v.

        Args: q: (B, q_length, Hq, D). k_cache, v_cache: (pages, page_size, Hkv, D) and Dv; they may
            be quantised, with k_scale, v_scale and hadamard; fp8_e4m3's scales are (Hkv,).
            learnable_sink: (Hq,), counted once. num_splits: for each level's call. The other
            options of `flash_attn_with_kvcache` are not supported, as they depend on a key's
            position or sequence.

        Returns: (B, q_length, Hq, Dv), in q's dtype.

        Raises: as `flash_attn_with_kvcache`; ValueError if the sizes of q or the caches differ from
            the plan's, or if a cache created the plan and has changed since. Changes of a
            block_table that you passed are not detected.
        """
        check_rank("q", q, "(B, L, H, D)")
        check_rank("k_cache", k_cache, "(pages, page, H, D)")
        check_rank("v_cache", v_cache, "(pages, page, H, D)")
        if q.shape[:2] != (self.batch_size, self.q_length):
            raise ValueError(
                f"q has shape {tuple(q.shape)}; the plan is for ({self.batch_size}, "
                f"{self.q_length}, H, D)"
            )
        if k_cache.shape[1] != self.page_size:
            raise ValueError(
                f"k_cache has pages of {k_cache.shape[1]} keys; the plan is for {self.page_size}"
            )
        if self.check_current is not None:
            self.check_current(k_cache)
        given = only_given(k_scale=to_bhld("k_scale", k_scale), v_scale=to_bhld("v_scale", v_scale))
        for name, scale in given.items():
            if scale.dim() == 2:
                raise ValueError(
                    f"{name} has shape {tuple(scale.shape)}; in a plan it must be (Hkv,), as "
                    "sequences share pages"
                )
        caches = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        score = only_given(softmax_scale=softmax_scale)
        score |= {"softcap": softcap, "num_splits": num_splits, "hadamard": hadamard}
        rest = self._options | only_given(learnable_sink=learnable_sink)
        out, lse = self._decode(self._rest, q, caches, score | given | rest)
        for walk in self._walks:
            part, part_lse = self._decode(walk, q, caches, score | given)
            torch.ops.metal_attn.merge_state_(out, lse, part, part_lse, mask=walk.mask)
        return out.transpose(1, 2)

    def _decode(
        self, walk: _Walk, q: Tensor, caches: tuple[Tensor, Tensor], options: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        where = {"block_table": walk.block_table, "seqused_k": walk.seqused_k}
        op = torch.ops.metal_attn.flash_decode
        if walk.gathered is None:
            return _NAMES.run(op, (q.transpose(1, 2), *caches), options | where)
        q = q[walk.gathered].flatten(0, 1)  # (R * Lq, Hq, D)
        out, lse = _NAMES.run(op, (q, *caches), options | where | walk.packing)
        # (R * Lq, Hq, Dv) and (Hq, R * Lq)
        out = out.unflatten(0, (-1, self.q_length))[walk.places].transpose(1, 2)
        lse = lse.unflatten(1, (-1, self.q_length))[:, walk.places].transpose(0, 1)
        return out, lse

    def _shared_walk(
        self, level: list[SharedPages], pages: list[list[int]], device: torch.device
    ) -> _Walk:
        places, present = [0] * self.batch_size, [False] * self.batch_size
        gathered = [b for shared in level for b in shared.sequences]
        for place, b in enumerate(gathered):
            places[b], present[b] = place, True
        widths = [len(shared.sequences) for shared in level]
        ends = [self.q_length * end for end in accumulate(widths, initial=0)]
        mask = torch.tensor(present, device=device)[:, None].expand(-1, self.q_length)
        return _Walk(
            block_table_of([pages[s.sequences[0]][s.first : s.end] for s in level], device),
            _ints([(s.end - s.first) * self.page_size for s in level], device),
            torch.tensor(gathered, device=device),
            {"cu_seqlens_q": _ints(ends, device), "max_seqlen_q": self.q_length * max(widths)},
            torch.tensor(places, device=device),
            None if all(present) else mask.contiguous(),
        )


def _shareable(length: int, q_length: int, left: int, right: int) -> int:
    """The number of first keys that all queries of a sequence see."""
    if left >= 0 and length - 1 > left:
        return 0
    # The first query sees the fewest keys. It is at key length - q_length.
    seen = length if right < 0 else length - q_length + 1 + right
    return max(min(length, seen), 0)


def _levels(pages: list[list[int]], limits: list[int], min_pages: int) -> list[list[SharedPages]]:
    """The tree of prefixes, by depth. limits: the most pages that each sequence may share."""
    levels: list[list[SharedPages]] = []
    # Sequences with equal pages before `at`, `first`, `at`, depth. Pages before `first` are done.
    waiting = deque([(tuple(range(len(pages))), 0, 0, 0)])
    while waiting:
        group, first, at, depth = waiting.popleft()
        by_page: dict[int, list[int]] = {}
        for b in group:
            if limits[b] > at:
                by_page.setdefault(pages[b][at], []).append(b)
        for sharing in by_page.values():
            if len(sharing) < 2:
                continue
            end, row = at + 1, pages[sharing[0]]
            while all(limits[b] > end and pages[b][end] == row[end] for b in sharing):
                end += 1
            if end - first < min_pages:
                waiting.append((tuple(sharing), first, end, depth))
                continue
            levels += [[]] if depth == len(levels) else []
            levels[depth].append(SharedPages(tuple(sharing), first, end))
            waiting.append((tuple(sharing), end, end, depth + 1))
    return levels


def zero_padded(rows: list[list[int]]) -> list[list[int]]:
    """Rows of a block table, padded to one width of at least 1."""
    width = max([1, *map(len, rows)])
    return [row + [0] * (width - len(row)) for row in rows]


def block_table_of(rows: list[list[int]], device: torch.device) -> Tensor:
    table = _ints(zero_padded(rows), device)
    return table if rows else table.view(0, 1)


def _ints(values: Any, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
