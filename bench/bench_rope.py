"""What `metal_attn::rope` moves, counted in the simulator: loads and stores per row of a head.

The kernel is bound by memory, so what counts is bytes, and how few instructions move them. A row is
the head dim of one token and head. The least is reading and writing each of its bytes once.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from torch_metal_attn import rope, simulate

LENGTH = 1024
HEADS, KV_HEADS = 32, 8


@dataclass(frozen=True)
class Traffic:
    """Device memory instructions and bytes per row."""

    loads: float
    load_bytes: float
    stores: float
    store_bytes: float
    least_bytes: int  # of each direction

    HEADINGS: ClassVar = ("loads", "(bytes)", "stores", "(bytes)", "least bytes")

    def cells(self) -> list[str]:
        """The values, formatted."""
        values = (self.loads, self.load_bytes, self.stores, self.store_bytes, self.least_bytes)
        return [f"{value:g}" for value in values]


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
    counters = session.counters["rope"]
    assert counters.launches == 1
    rows = (HEADS + KV_HEADS) * length
    columns = rotary_dim if inplace else head_dim
    return Traffic(
        counters.loads["device"] / rows,
        counters.load_bytes["device"] / rows,
        counters.stores["device"] / rows,
        counters.store_bytes["device"] / rows,
        columns * q.element_size(),
    )


CASES: dict[str, dict[str, Any]] = {
    "halves": {},
    "interleaved": {"interleaved": True},
    "in place": {"inplace": True},
    "bfloat16 tables": {"table_dtype": torch.bfloat16},
    "a quarter of the columns": {"partial": 4},
    "a quarter, in place": {"partial": 4, "inplace": True},
    "rows off their alignment": {"aligned": False},
}


def count(case: str, head_dim: int, dtype: torch.dtype) -> Traffic:
    """One cell of the table."""
    options = dict(CASES[case])
    partial = options.pop("partial", 1)
    return traffic(head_dim, dtype, rotary_dim=head_dim // partial, **options)


def main() -> None:
    """Print the table, in Markdown."""
    print("| case | D | dtype | " + " | ".join(Traffic.HEADINGS) + " |")
    print("| --- " * (3 + len(Traffic.HEADINGS)) + "|")
    for case in CASES:
        for head_dim in (64, 128):
            for dtype in (torch.bfloat16, torch.float32):
                row = [case, str(head_dim), str(dtype).removeprefix("torch.")]
                row += count(case, head_dim, dtype).cells()
                print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
