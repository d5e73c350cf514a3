"""What `append_kv` and `copy_pages` move, counted in the simulator, and the least that must move.

Both are bound by memory, so what counts is bytes, and how few instructions move them. A row is the
head dim of one new token of one KV head. The least is reading its bytes once, and writing them once
in the cache's format.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from bench.tables import Traffic, headings, print_table, traffic
from torch_metal_attn import rope, simulate
from torch_metal_attn.quantisation import quantise

HEADS, KV_HEADS, LENGTH, PAGE = 32, 8, 256, 16
# Averaged over k and v.
COLUMNS = (
    *("loads", "load_bytes", "least_load_bytes"),
    *("stores", "store_bytes", "least_store_bytes"),
)


def append(
    head_dim: int,
    dtype: torch.dtype,
    *,
    format: str | None = None,
    paged: bool = False,
    rotary: bool = False,
    interleaved: bool = False,
    length: int = LENGTH,
) -> Traffic:
    """Counts of a grouped-query layer's keys and values, appended at position 3 of a sequence."""
    capacity = -(-(length + 3) // PAGE) * PAGE
    k, v = (torch.randn(1, KV_HEADS, length, head_dim).to(dtype) for _ in range(2))
    pages = capacity // PAGE
    shape = (pages, KV_HEADS, PAGE, head_dim) if paged else (1, KV_HEADS, capacity, head_dim)
    options: dict[str, Any] = {}
    caches = [torch.zeros(shape, dtype=dtype) for _ in range(2)]
    row_bytes = head_dim * dtype.itemsize
    if format is not None:
        given = torch.ones(KV_HEADS) if format == "fp8_e4m3" else None
        packed = [quantise(cache, format, given) for cache in caches]
        caches = [data for data, _ in packed]
        options |= {"k_scale": packed[0][1], "v_scale": packed[1][1]}
        scale_bytes = 0 if given is not None else head_dim // 32 * 2
        row_bytes = caches[0].shape[-1] * caches[0].itemsize + scale_bytes
    if paged:
        options["block_table"] = torch.randperm(pages).int()[None]
    if rotary:
        tables = rope.tables(rope.default(head_dim)[0], capacity)
        options |= dict(zip(("rotary_cos", "rotary_sin"), tables, strict=True))
        options["rotary_interleaved"] = interleaved
    seqlens = torch.tensor([3], dtype=torch.int32)
    with simulate(count=True) as session:
        torch.ops.metal_attn.append_kv(k, v, *caches, seqlens, **options)
    # A row of cos and sin serves all heads, of k and not of v.
    tables_bytes = head_dim * 4 / KV_HEADS / 2 if rotary else 0
    least = (head_dim * dtype.itemsize + tables_bytes, row_bytes)
    return traffic(session, "append_kv", 2 * KV_HEADS * length, least)


def copy(head_dim: int, dtype: torch.dtype) -> Traffic:
    """Counts of copied pages, per row of one head."""
    cache = torch.zeros(8, KV_HEADS, PAGE, head_dim, dtype=dtype)
    src, dst = torch.arange(4), torch.arange(4, 8)
    with simulate(count=True) as session:
        torch.ops.metal_attn.copy_pages(cache, src, dst)
    row_bytes = head_dim * dtype.itemsize
    return traffic(session, "copy_pages", 4 * KV_HEADS * PAGE, (row_bytes, row_bytes))


CASES: dict[str, dict[str, Any]] = {
    "append": {},
    "append one row": {"length": 1},
    "append to pages of 16": {"paged": True},
    "append, halves rotated": {"rotary": True},
    "append, pairs rotated": {"rotary": True, "interleaved": True},
    "append to q8_0": {"format": "q8_0"},
    "append to q4_0": {"format": "q4_0"},
    "append to fp8_e4m3": {"format": "fp8_e4m3"},
}


def rows() -> Iterator[list[Any]]:
    """Each case, head dim and dtype."""
    cases = [*CASES, "copy_pages"]
    for case, head_dim, dtype in product(cases, (64, 128), (torch.bfloat16, torch.float32)):
        options = CASES.get(case)
        count = copy if options is None else append
        yield [case, head_dim, dtype, *count(head_dim, dtype, **(options or {})).cells(COLUMNS)]


if __name__ == "__main__":
    print_table(["case", "D", "dtype", *headings(COLUMNS)], rows())
