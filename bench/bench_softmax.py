"""What softmax and apply_causal_mask_ do per element, counted by the simulator.

Memory instructions, converts and exps are those of the source after -O1, per element of the row;
SIMD reductions are per SIMD group and barriers per threadgroup, both per row.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from bench.tables import Traffic, headings, print_table, traffic
from torch_metal_attn import simulate

ROWS = 8
LENGTHS = (1024, 8192, 65536)  # one SIMD group a row, one threadgroup, one of the largest
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
COLUMNS = (
    *("loads", "load_bytes", "stores", "store_bytes"),
    *("exps", "converts", "reductions", "barriers"),
)


def softmax(length: int, dtype: torch.dtype, wide: bool) -> Traffic:
    """Softmax of rows along the last dimension or, if not `wide`, along the first."""
    x = torch.zeros(ROWS, length, dtype=dtype) if wide else torch.zeros(length, ROWS, dtype=dtype)
    with simulate(check=True) as run:
        torch.ops.metal_attn.softmax(x, 1 if wide else 0)
    return traffic(run, "softmax", x.numel(), (x.itemsize, x.itemsize), rows=ROWS)


def causal_mask(length: int, dtype: torch.dtype, wide: bool) -> Traffic:
    """The mask of square scores, per masked score."""
    scores = torch.zeros(length, length, dtype=dtype)
    with simulate(check=True) as run:
        torch.ops.metal_attn.apply_causal_mask_(scores if wide else scores.t())
    masked = length * (length - 1) // 2
    return traffic(run, "apply_causal_mask", masked, (0, dtype.itemsize), rows=length)


def rows() -> Iterator[list[Any]]:
    """Each kernel, length, dtype and layout."""
    cases = [("softmax", softmax, length) for length in LENGTHS]
    cases.append(("apply_causal_mask", causal_mask, 512))
    for (name, count, length), dtype, wide in product(cases, DTYPES, (True, False)):
        layout = "contiguous" if wide else "strided"
        yield [name, layout, length, dtype, *count(length, dtype, wide).cells(COLUMNS)]


if __name__ == "__main__":
    print_table(["kernel", "rows", "length", "dtype", *headings(COLUMNS)], rows())
