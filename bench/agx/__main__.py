"""Print a table of the default specialisations on Apple's G13, compiled by Mesa.

Registers have 32 bits; a thread has 128. "resident" is the number of SIMD groups that a core holds.
"cycles" is the model's time of a product of 8x8 matrices. "bytes a cycle" is the device memory that
the loop requests per cycle and core.
"""

import argparse
from collections.abc import Iterator
from typing import Any

from bench.front_end import Source, source_of
from bench.specialisations import Specialisation, specialisations
from bench.tables import print_table

from . import model
from .lens import Compiled, Failure, compile_all

HEADINGS = (
    *("kernel", "dtype", "D", "feature", "registers", "spills", "resident"),
    *("cycles", "share of the limit", "bytes a cycle", "loop bytes"),
)


def cells(one: Specialisation, result: Compiled | Failure) -> list[Any]:
    row = [one.kernel, one.dtype, one.head_dim, one.feature]
    if not isinstance(result, Compiled):
        return [*row, str(result).strip().split("\n")[-1][:60]]
    row += [f"{result.demand:g}", result.spills, result.resident]
    if result.main is None:
        return row
    cycles, share = model.cycles_a_product(result), model.share_of_limit(result)
    moved = f"{model.bytes_a_cycle(result):.1f}"
    return [*row, f"{cycles:.1f}", f"{100 * share:.0f} %", moved, result.main.code]


def rows(only: str, workers: int) -> Iterator[list[Any]]:
    """A row for each distinct specialisation whose name contains `only`."""
    distinct: dict[tuple[Any, ...], Specialisation] = {}
    for one in specialisations():
        if only in one.name:
            distinct.setdefault((one.kernel, *one.defines.items()), one)
    texts = (source_of(one.kernel, one.defines) for one in distinct.values())
    jobs = [
        Source(t, one.kernel, one.threads) for t, one in zip(texts, distinct.values(), strict=True)
    ]
    yield from map(cells, distinct.values(), compile_all(jobs, workers))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="only specialisations whose name has this text")
    parser.add_argument("--workers", type=int, default=1, help="processes (default: 1)")
    options = parser.parse_args()
    print_table(HEADINGS, rows(options.only, options.workers))
