"""What merge_state and merge_splits do per element of out, counted by the simulator.

Both are bound by memory. The table also has the least that any kernel must load and store.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from bench.tables import Traffic, headings, print_table, traffic
from torch_metal_attn import simulate

ROWS = (1, 4, 16)  # batch, heads, length
HEAD_DIMS = (64, 128)
SPLITS = (8, 32, 128)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
COLUMNS = (
    *("loads", "load_bytes", "least_load_bytes", "stores", "store_bytes", "least_store_bytes"),
    *("exps", "shuffles", "barriers"),
)


def _counts(kernel: str, *inputs: torch.Tensor, **options: Any) -> Traffic:
    with simulate(check=True) as run:
        results = getattr(torch.ops.metal_attn, kernel)(*inputs, **options)
    elements = results[0].numel()
    read, written = (sum(t.nbytes for t in some) / elements for some in (inputs, results))
    return traffic(run, kernel, elements, (read, written))


def state(head_dim: int, dtype: torch.dtype) -> Traffic:
    """Two states of ROWS."""
    one = (torch.zeros(*ROWS, head_dim, dtype=dtype), torch.zeros(ROWS))
    return _counts("merge_state", *one, *one)


def splits(head_dim: int, count: int, dtype: torch.dtype) -> Traffic:
    """ROWS of `count` splits each."""
    inputs = (torch.zeros(*ROWS, count, head_dim), torch.zeros(*ROWS, count))
    return _counts("merge_splits", *inputs, out_dtype=dtype)


def rows() -> Iterator[list[Any]]:
    """Each kernel, number of splits, head dim and dtype."""
    for head_dim, dtype in product(HEAD_DIMS, DTYPES):
        yield ["merge_state", 2, head_dim, dtype, *state(head_dim, dtype).cells(COLUMNS)]
        for n in SPLITS:
            yield ["merge_splits", n, head_dim, dtype, *splits(head_dim, n, dtype).cells(COLUMNS)]


if __name__ == "__main__":
    print_table(["kernel", "splits", "head dim", "dtype", *headings(COLUMNS)], rows())
