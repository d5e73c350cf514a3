"""What softmax and apply_causal_mask_ do per element, counted by the simulator.

Memory instructions, converts and exps are those of the source after -O1, per element of the row;
SIMD reductions are per SIMD group and barriers per threadgroup, both per row.
"""

from dataclasses import astuple, dataclass
from typing import ClassVar

import torch

from torch_metal_attn import simulate
from torch_metal_attn.simulator import Counters

ROWS = 8
LENGTHS = (1024, 8192, 65536)  # one SIMD group a row, one threadgroup, one of the largest
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class RowCounts:
    """Counts of a kernel, in the order of the table's columns."""

    loads: float
    load_bytes: float
    stores: float
    store_bytes: float
    exps: float
    converts: float
    reductions: float
    barriers: float

    HEADINGS: ClassVar = (
        *("loads", "(bytes)", "stores", "(bytes)", "exps", "converts"),
        *("reductions a row", "barriers a row"),
    )

    def cells(self) -> list[str]:
        """The values, formatted."""
        return [f"{value:.4g}" for value in astuple(self)]


def per_element(counters: Counters, elements: int, rows: int) -> RowCounts:
    """`counters` of a run over `rows` rows with `elements` elements in all."""
    return RowCounts(
        loads=counters.loads["device"] / elements,
        load_bytes=counters.load_bytes["device"] / elements,
        stores=counters.stores["device"] / elements,
        store_bytes=counters.store_bytes["device"] / elements,
        exps=counters.exps / elements,
        converts=counters.converts / elements,
        reductions=counters.reductions / rows,
        barriers=counters.threadgroup_barriers / rows,
    )


def softmax(length: int, dtype: torch.dtype, wide: bool) -> RowCounts:
    """Softmax of rows along the last dimension or, if not `wide`, along the first."""
    x = torch.zeros(ROWS, length, dtype=dtype) if wide else torch.zeros(length, ROWS, dtype=dtype)
    with simulate(check=True) as run:
        torch.ops.metal_attn.softmax(x, 1 if wide else 0)
    return per_element(run.counters["softmax"], x.numel(), ROWS)


def causal_mask(length: int, dtype: torch.dtype, wide: bool) -> RowCounts:
    """The mask of square scores, per masked score."""
    scores = torch.zeros(length, length, dtype=dtype)
    with simulate(check=True) as run:
        torch.ops.metal_attn.apply_causal_mask_(scores if wide else scores.t())
    masked = length * (length - 1) // 2
    return per_element(run.counters["apply_causal_mask"], masked, length)


def main() -> None:
    """Print the table, in Markdown."""
    print("| kernel | rows | length | dtype | " + " | ".join(RowCounts.HEADINGS) + " |")
    print("| --- " * (4 + len(RowCounts.HEADINGS)) + "|")
    cases = [("softmax", softmax, length) for length in LENGTHS]
    cases.append(("apply_causal_mask", causal_mask, 512))
    for name, count, length in cases:
        for dtype in DTYPES:
            for wide in (True, False):
                row = [name, "contiguous" if wide else "strided", str(length)]
                row.append(str(dtype).removeprefix("torch."))
                row += count(length, dtype, wide).cells()
                print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
