"""The kernel calls for one process' queries and another process' keys.

Without a window or ALiBi there is at most one call, because a chunk's queries see either all keys
of another chunk or no key. Otherwise there is a call for each pair of chunks, because the mask or
bias depends on their distance.
"""

from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.call.options import limit_options
from torch_metal_attn.distributed.layout import Spans, rows

Packing = tuple[Tensor, Tensor, int, int]  # cu_seqlens_q, cu_seqlens_k and their longest lengths


@dataclass(frozen=True)
class Call:
    """The rows of queries and keys, the kernel's options, and the number of a packed sequence."""

    q: slice
    k: slice
    options: dict[str, Any] = field(default_factory=dict)
    packing: Packing | None = None
    sequence: int = 0


@dataclass(frozen=True)
class Visible:
    """The keys that a query sees. p and j are positions of a query and a key in their sequence."""

    causal: bool
    left: int  # p - left <= j; -1 is no limit
    right: int  # j <= p + right; -1 is no limit
    alibi: bool = False  # the score depends on |p - j|

    @property
    def by_distance(self) -> bool:
        return self.alibi or self.left >= 0 or self.right >= 0

    def reaches(self, queries: range, keys: range) -> bool:
        if not queries or not keys:
            return False
        right = 0 if self.causal else self.right
        return not (
            (self.left >= 0 and keys[-1] < queries[0] - self.left)
            or (right >= 0 and keys[0] > queries[-1] + right)
        )


def calls(
    queries: Spans,
    keys: Spans,
    visible: Visible,
    is_local: bool,
    earlier: bool,
    packed: bool,
    device: torch.device,
) -> list[Call]:
    """The calls for one process' keys. earlier: its first chunk precedes that of this process."""
    if visible.by_distance:
        return _calls_of_pairs(queries, keys, visible)
    last_queries = first_keys = False
    if visible.causal and not is_local:
        # Contiguous: all queries see earlier chunks, and none of them later chunks. Zigzag: earlier
        # processes have one chunk of keys before and one after all queries here, and both chunks of
        # later processes are between the two chunks of queries.
        zigzag = len(queries) > 0 and len(queries[0]) > 1
        if not earlier and not zigzag:
            return []
        first_keys, last_queries = earlier and zigzag, not earlier
    options = {"causal": True} if visible.causal and is_local else {}
    if packed:
        entries = [
            entry
            for pair in zip(queries, keys, strict=True)
            for entry in _entries(*pair, last_queries, first_keys)
        ]
        return [Call(slice(None), slice(None), options, _packing(entries, device))]
    (q_spans,), (k_spans,) = queries, keys
    q_start = len(q_spans[0]) if last_queries else 0
    k_stop = len(k_spans[0]) if first_keys else rows(keys)
    call = Call(slice(q_start, rows(queries)), slice(0, k_stop), options)
    return [call] if call.q.start < call.q.stop and call.k.stop > 0 else []


def _entries(
    q_spans: list[range], k_spans: list[range], last_queries: bool, first_keys: bool
) -> list[tuple[int, int]]:
    """The lengths of one sequence in a packed call. Excluded rows get an entry of length 0."""
    queries, keys = rows([q_spans]), rows([k_spans])
    if last_queries:
        first = len(q_spans[0])
        return [(first, 0), (queries - first, keys)]
    if first_keys:
        first = len(k_spans[0])
        return [(queries, first), (0, keys - first)]
    return [(queries, keys)]


def _packing(entries: list[tuple[int, int]], device: torch.device) -> Packing:
    lengths = [[entry[side] for entry in entries] for side in (0, 1)]
    cu_seqlens_q, cu_seqlens_k = (
        torch.tensor([0, *accumulate(each)], dtype=torch.int32, device=device) for each in lengths
    )
    return cu_seqlens_q, cu_seqlens_k, max(lengths[0], default=0), max(lengths[1], default=0)


def _calls_of_pairs(queries: Spans, keys: Spans, visible: Visible) -> list[Call]:
    listed = []
    q_start = k_start = 0
    for sequence, (q_spans, k_spans) in enumerate(zip(queries, keys, strict=True)):
        q_places, q_start = _places(q_spans, q_start)
        k_places, k_start = _places(k_spans, k_start)
        for q_span, q_place in zip(q_spans, q_places, strict=True):
            for k_span, k_place in zip(k_spans, k_places, strict=True):
                if visible.reaches(q_span, k_span):
                    # q_offset counts from the first key of this call.
                    limits = limit_options(visible.causal, visible.left, visible.right)
                    options = limits | {"q_offset": q_span.start - k_span.start}
                    listed.append(Call(q_place, k_place, options, sequence=sequence))
    return listed


def _places(spans: list[range], start: int) -> tuple[list[slice], int]:
    """The slices of the spans in the process' rows, and the start of the next sequence."""
    bounds = list(accumulate((len(span) for span in spans), initial=start))
    return [slice(a, b) for a, b in pairwise(bounds)], bounds[-1]
