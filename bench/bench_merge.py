"""What merge_state and merge_splits do per element of out, counted by the simulator.

Both are bound by memory. The table also has the least that any kernel must load and store, with
each number read and written once.
"""

from dataclasses import astuple, dataclass
from typing import ClassVar

import torch

from torch_metal_attn import simulate
from torch_metal_attn.simulator import Counters

ROWS = (1, 4, 16)  # batch, heads, length
HEAD_DIMS = (64, 128)
SPLITS = (8, 32, 128)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class ElementCounts:
    """Counts of a kernel, in the order of the table's columns."""

    loads: float
    load_bytes: float
    needed_load_bytes: float
    stores: float
    store_bytes: float
    needed_store_bytes: float
    exps: float
    shuffles: float
    barriers: int

    HEADINGS: ClassVar = (
        *("loads", "(bytes)", "(needed)", "stores", "(bytes)", "(needed)"),
        *("exps", "shuffles", "barriers"),
    )

    def cells(self) -> list[str]:
        """The values, formatted."""
        return [f"{value:.4g}" for value in astuple(self)]


def per_element(
    counters: Counters, inputs: tuple[torch.Tensor, ...], results: tuple[torch.Tensor, ...]
) -> ElementCounts:
    """`counters` of a run from `inputs` to `results`, per element of the first result."""
    elements = results[0].numel()

    def size(tensors: tuple[torch.Tensor, ...]) -> float:
        return sum(t.numel() * t.element_size() for t in tensors) / elements

    return ElementCounts(
        loads=counters.loads["device"] / elements,
        load_bytes=counters.load_bytes["device"] / elements,
        needed_load_bytes=size(inputs),
        stores=counters.stores["device"] / elements,
        store_bytes=counters.store_bytes["device"] / elements,
        needed_store_bytes=size(results),
        exps=counters.exps / elements,
        shuffles=counters.shuffles / elements,
        barriers=counters.threadgroup_barriers,
    )


def state(head_dim: int, dtype: torch.dtype) -> ElementCounts:
    """Two states of ROWS."""
    inputs = 2 * (torch.zeros(*ROWS, head_dim, dtype=dtype), torch.zeros(ROWS))
    with simulate(check=True) as run:
        results = torch.ops.metal_attn.merge_state(*inputs)
    return per_element(run.counters["merge_state"], inputs, results)


def splits(head_dim: int, count: int, dtype: torch.dtype) -> ElementCounts:
    """ROWS of `count` splits each."""
    inputs = (torch.zeros(*ROWS, count, head_dim), torch.zeros(*ROWS, count))
    with simulate(check=True) as run:
        results = torch.ops.metal_attn.merge_splits(*inputs, out_dtype=dtype)
    return per_element(run.counters["merge_splits"], inputs, results)


def main() -> None:
    """Print the table, in Markdown."""
    print("| kernel | splits | head dim | dtype | " + " | ".join(ElementCounts.HEADINGS) + " |")
    print("| --- " * (4 + len(ElementCounts.HEADINGS)) + "|")
    for head_dim in HEAD_DIMS:
        for dtype in DTYPES:
            name = str(dtype).removeprefix("torch.")
            rows = [("merge_state", 2, state(head_dim, dtype))]
            rows += [("merge_splits", n, splits(head_dim, n, dtype)) for n in SPLITS]
            for kernel, count, counts in rows:
                cells = [kernel, str(count), str(head_dim), name, *counts.cells()]
                print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
