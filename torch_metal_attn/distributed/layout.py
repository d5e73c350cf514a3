"""The rows of a sequence that each process holds.

A sequence is split into chunks of lengths that differ by at most one. "contiguous" gives each
process one chunk. "zigzag" makes two chunks per process, and process r gets chunk r and the r-th
chunk from the end, so that each process sees about as many keys under a causal mask.
"""

import hashlib
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor

from torch_metal_attn.call.arguments import check_integers
from torch_metal_attn.wording import count_text, value_text

Spans = list[list[range]]  # the rows of each sequence that a process holds


def check_layout(layout: object) -> None:
    if layout not in ("contiguous", "zigzag"):
        raise ValueError(f'layout is {value_text(layout)}; it must be "contiguous" or "zigzag"')


def bounds_of(cu_seqlens: Tensor) -> list[int]:
    check_integers("cu_seqlens", cu_seqlens, "(sequences + 1)")
    bounds: list[int] = cu_seqlens.tolist()
    if not bounds or bounds[0] != 0:
        first = bounds[0] if bounds else "no element"
        raise ValueError(f"cu_seqlens starts with {first}; it must start with 0")
    if any(end < start for start, end in pairwise(bounds)):
        raise ValueError("cu_seqlens decreases; it must be 0 and then the end of each sequence")
    return bounds


def checksum(values: list[Any] | None) -> str | None:
    """A short text that is different for different values."""
    return None if values is None else hashlib.sha256(str(values).encode()).hexdigest()[:16]


def shares(bounds: list[int], processes: int, rank: int, layout: str) -> Spans:
    """The rows that a process holds of each sequence between the bounds."""
    lengths = [end - start for start, end in pairwise(bounds)]
    if layout == "contiguous":
        return [[_chunk(length, processes, rank)] for length in lengths]
    chunks = 2 * processes
    both = (rank, chunks - 1 - rank)
    return [[_chunk(length, chunks, index) for index in both] for length in lengths]


def shares_of_all(
    name: str, lengths: list[int], layout: str, bounds: list[int] | None
) -> list[Spans]:
    """The rows that each process holds. ValueError if `lengths` are not those of `shares`."""
    if bounds is None and layout == "contiguous":
        starts = accumulate(lengths, initial=0)
        return [[[range(start, start + n)]] for start, n in zip(starts, lengths, strict=False)]
    processes = len(lengths)
    whole = "the sequence" if bounds is None else "the sequences of cu_seqlens"
    bounds = [0, sum(lengths)] if bounds is None else bounds
    of_all = [shares(bounds, processes, rank, layout) for rank in range(processes)]
    for rank, (length, spans) in enumerate(zip(lengths, of_all, strict=True)):
        if length != rows(spans):
            raise ValueError(
                f"{name} has {count_text(length, 'row')} on rank {rank}; its {layout} share of "
                f"{whole} has {rows(spans)}: split whole sequences with shard_sequence"
            )
    return of_all


def rows(spans: Spans) -> int:
    return sum(len(span) for of_sequence in spans for span in of_sequence)


def in_packed(spans: Spans, bounds: list[int]) -> list[range]:
    """The rows as ranges of the concatenated sequences, which start at `bounds`."""
    return [
        range(start + span.start, start + span.stop)
        for start, of_sequence in zip(bounds, spans, strict=False)
        for span in of_sequence
    ]


def _chunk(length: int, chunks: int, index: int) -> range:
    return range(length * index // chunks, length * (index + 1) // chunks)
