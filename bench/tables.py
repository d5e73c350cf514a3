"""What the tables of counts share: what a kernel moves, and rows printed as they are counted."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_metal_attn.simulator.runs import Run
from torch_metal_attn.tools.text_table import markdown

_HEADINGS = {"load_bytes": "(bytes)", "store_bytes": "(bytes)"}


@dataclass(frozen=True)
class Traffic:
    """Counts of one launch, each divided by a number: instructions and bytes of device memory.

    Attributes: least_load_bytes, least_store_bytes: with each number read and written once.
    """

    loads: float
    load_bytes: float
    least_load_bytes: float
    stores: float
    store_bytes: float
    least_store_bytes: float
    exps: float
    converts: float
    shuffles: float
    reductions: float
    barriers: float

    def cells(self, columns: Sequence[str]) -> list[float]:
        """The values of these columns."""
        return [getattr(self, name) for name in columns]


def traffic(
    run: Run, kernel: str, count: float, least: tuple[float, float], rows: float | None = None
) -> Traffic:
    """The kernel's counts by `count` elements or rows; reductions and barriers by `rows`."""
    counters = run.counters[kernel]
    assert counters.launches == 1
    return Traffic(
        loads=counters.loads["device"] / count,
        load_bytes=counters.load_bytes["device"] / count,
        least_load_bytes=least[0],
        stores=counters.stores["device"] / count,
        store_bytes=counters.store_bytes["device"] / count,
        least_store_bytes=least[1],
        exps=counters.exps / count,
        converts=counters.converts / count,
        shuffles=counters.shuffles / count,
        reductions=counters.reductions / (rows or count),
        barriers=counters.threadgroup_barriers / (rows or count),
    )


def headings(columns: Sequence[str]) -> list[str]:
    """Those of a Traffic's columns."""
    return ["least" if "least" in name else _HEADINGS.get(name, name) for name in columns]


def print_table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table in Markdown, each row when it is there. Bytes stand beside what they are of."""
    headings = ["(bytes)" if name.endswith("(bytes)") else name for name in headings]
    for line in markdown(headings, (list(map(_cell, row)) for row in rows)):
        print(line, flush=True)
    print()


def _cell(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return f"{value:.4g}" if isinstance(value, float) else str(value)
