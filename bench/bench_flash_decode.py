"""Counts of flash_decode, for each number of KV heads that 32 query heads share.

Bytes read from device memory are relative to those of the cache. Counts are per thread, per 32 keys
and tile: all queries of a KV head, up to 32. The second table has the bytes of several queries.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from bench.inner_loop import BLOCK, slopes
from bench.tables import print_table
from torch_metal_attn import simulate
from torch_metal_attn.runtime import extension
from torch_metal_attn.simulator import Counters
from torch_metal_attn.tools.costs import in_keys

HEADS = 32
KV_HEADS = (1, 2, 4, 8, 32)
HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (576, 512))
LENGTHS = (1024, 2048)
# The problems of the second table, which have one KV head.
QUERIES = (1, 4, 16, 64)
QUERY_HEADS = (1, 4, 8, 16)

COLUMNS = (
    *("MMA", "device loads", "tg loads", "tg stores", "converts", "exps", "floats", "integers"),
    *("selects", "shuffles", "barriers"),
)
SHARES = ("bytes / cache", "bytes a key / cache")
HEADINGS = ("KV heads", "D", "Dv", "SIMD groups", *SHARES, *COLUMNS)


def operands(
    kv_heads: int, head_dims: tuple[int, int], length: int, heads: int = HEADS, queries: int = 1
) -> tuple[torch.Tensor, ...]:
    """Queries of each head and a half precision cache. If Dv < D, v is the first columns of k."""
    head_dim, v_head_dim = head_dims
    q = torch.randn(1, heads, queries, head_dim).half()
    k = torch.randn(1, kv_heads, length, head_dim).half()
    v = k[..., :v_head_dim] if v_head_dim < head_dim else torch.randn_like(k)
    return q, k, v


def cache_bytes(k: torch.Tensor, v: torch.Tensor) -> int:
    """Bytes of k and v, or of k alone if it contains v."""
    return k.nbytes + (0 if in_keys(k, v) else v.nbytes)


def count(kv_heads: int, head_dims: tuple[int, int], length: int) -> Counters:
    with simulate(count=True) as session:
        torch.ops.metal_attn.flash_decode(*operands(kv_heads, head_dims, length), num_splits=1)
    return session.counters["flash_decode"]


def read_share(kv_heads: int, head_dims: tuple[int, int], length: int) -> float:
    """Bytes read from device memory, relative to the bytes of the cache."""
    _, k, v = operands(kv_heads, head_dims, length)
    return count(kv_heads, head_dims, length).load_bytes["device"] / cache_bytes(k, v)


def row(kv_heads: int, head_dims: tuple[int, int]) -> dict[str, float]:
    short, long = (count(kv_heads, head_dims, length) for length in LENGTHS)
    q, k, v = operands(kv_heads, head_dims, LENGTHS[0])
    packed = torch.ops.metal_attn_explain.flash_decode(q, k, v, num_splits=1)
    (explained,) = extension.launches(packed)
    simdgroups = explained["threads"][0] // 32
    # If SIMD groups split the columns, each of them loops over all keys.
    split_columns = int(explained["defines"]["COLUMN_SIMDGROUPS"]) > 1
    loops = kv_heads * (simdgroups if split_columns else 1)
    read = long.load_bytes["device"] - short.load_bytes["device"]
    shares = (read_share(kv_heads, head_dims, LENGTHS[0]), read / cache_bytes(k, v))
    return {
        **dict(zip(HEADINGS, (kv_heads, *head_dims, simdgroups, *shares), strict=False)),
        **slopes((short, long), loops, COLUMNS, (LENGTHS[1] - LENGTHS[0]) / BLOCK),
    }


def rows() -> Iterator[list[Any]]:
    for kv_heads, head_dims in product(KV_HEADS, HEAD_DIMS):
        if head_dims[0] == head_dims[1] or kv_heads == 1:
            yield [*row(kv_heads, head_dims).values()]


QUERIES_HEADINGS = ("queries", "heads", "rows", "passes", "D", "Dv", *SHARES)


def queries_row(queries: int, heads: int, head_dims: tuple[int, int]) -> list[Any]:
    read = []
    for length in LENGTHS:
        q, k, v = operands(1, head_dims, length, heads, queries)
        with simulate(count=True) as session:
            torch.ops.metal_attn.flash_decode(q, k, v, causal=True, num_splits=1)
        read.append(session.counters["flash_decode"].load_bytes["device"])
    packed = torch.ops.metal_attn_explain.flash_decode(q, k, v, causal=True, num_splits=1)
    defines = extension.launches(packed)[0]["defines"]
    rows_at_once = int(defines.get("VECTOR_ROWS", 8 * int(defines["ROW_FRAGMENTS"])))
    rows_at_once *= int(defines.get("ROW_SIMDGROUPS", 1))
    rows, longest = queries * heads, cache_bytes(k, v)
    added = longest * (1 - LENGTHS[0] / LENGTHS[1])
    shares = (read[0] / (longest - added), (read[1] - read[0]) / added)
    return [queries, heads, rows, -(-rows // rows_at_once), *head_dims, *shares]


if __name__ == "__main__":
    print_table(HEADINGS, rows())
    problems = product(QUERY_HEADS, QUERIES)
    print_table(QUERIES_HEADINGS, (queries_row(n, heads, (128, 128)) for heads, n in problems))
