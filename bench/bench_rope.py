"""What `metal_attn::rope` moves, counted in the simulator: loads and stores per row of a head.

The kernel is bound by memory, so what counts is bytes, and how few instructions move them. A row is
the head dim of one token and head. The least is reading and writing each of its bytes once.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from bench import tables
from bench.tables import Traffic
from torch_metal_attn import rope, simulate

LENGTH = 1024
HEADS, KV_HEADS = 32, 8
COLUMNS = ("loads", "load_bytes", "stores", "store_bytes", "least_store_bytes")


def traffic(
    head_dim: int,
    dtype: torch.dtype,
    *,
    rotary_dim: int | None = None,
    table_dtype: torch.dtype = torch.float32,
    aligned: bool = True,
    inplace: bool = False,
    length: int = LENGTH,
    **options: Any,
) -> Traffic:
    """Counts of q and k of a grouped-query layer, rotated in one dispatch."""
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    width = head_dim + (0 if aligned else 1)
    q, k = (torch.randn(1, h, length, width).to(dtype) for h in (HEADS, KV_HEADS))
    q, k = q[..., width - head_dim :], k[..., width - head_dim :]
    cos, sin = rope.tables(rope.default(rotary_dim)[0], length, dtype=table_dtype)
    op = torch.ops.metal_attn.rope_ if inplace else torch.ops.metal_attn.rope
    with simulate(count=True) as session:
        op(q, k, cos, sin, **options)
    least = (rotary_dim if inplace else head_dim) * q.itemsize
    return tables.traffic(session, "rope", (HEADS + KV_HEADS) * length, (least, least))


CASES: dict[str, dict[str, Any]] = {
    "halves": {},
    "interleaved": {"interleaved": True},
    "in place": {"inplace": True},
    "bfloat16 tables": {"table_dtype": torch.bfloat16},
    "a quarter of the columns": {"partial": 4},
    "a quarter, in place": {"partial": 4, "inplace": True},
    "rows off their alignment": {"aligned": False},
}


def rows() -> Iterator[list[Any]]:
    """Each case, head dim and dtype."""
    for case, head_dim, dtype in product(CASES, (64, 128), (torch.bfloat16, torch.float32)):
        options = dict(CASES[case])
        partial = options.pop("partial", 1)
        counts = traffic(head_dim, dtype, rotary_dim=head_dim // partial, **options)
        yield [case, head_dim, dtype, *counts.cells(COLUMNS)]


if __name__ == "__main__":
    tables.print_table(["case", "D", "dtype", *tables.headings(COLUMNS)], rows())
