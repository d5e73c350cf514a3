"""Writes csrc/tiles/table.inc: the best tile of each class of problems (`choose.py`).

Needs the driver of bench/agx/setup.sh. An interrupted run continues from its stored results.
"""

import argparse
import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

from torch_metal_attn.simulator.cache import default_dir

from . import lens
from .candidates import COLUMNS, DTYPES, LOADS, NAMES, Class, Tile, classes, knobs
from .choose import Candidate, choose, measured

TABLE = Path(__file__).parents[2] / "csrc" / "tiles" / "table.inc"
HEAD = """\
// The default tiles, which csrc/tiles/table.h reads. Written by `python -m bench.agx.table`: change
// its candidates or its ranking, not the rows. Their checksum: {checksum}
#pragma once

// A row has its conditions, the REGISTERS that a thread of M1 needs at most for the widest of such
// problems (0: not measured), and the tile. The conditions are the BITS of an element, the largest
// number of COLUMNS of q, k and v, for a decode the largest number of QUERIES that share a KV head,
// the heaviest LOAD of features, and the first GPU FAMILY. `Never`: for `tune`, no default tile.
"""
# K and V are read directly from device memory, as by metal-flash-attention from M3 on, with 16 rows
# per threadgroup (AttentionDescriptor+Parameters.swift at 5b07c27). MLX stages them on M3 too, and
# reaches 88 to 97 % of an M3 Ultra's matrix peak. So only `tune` tries these tiles.
UNSTAGED = ((256, 32, 4, 1, 1, 0), (256, 16, 4, 1, 1, 0))
# For problems that no other tile divides, or where others need too much threadgroup memory.
SMALLEST: Mapping[str, tuple[Tile, ...]] = {
    "FLASH_FWD": ((256, 8, 4, 1, 0, 1),),
    "FLASH_BWD_DQ": ((576, 8, 1, 4, 1, 0, 0), (144, 8, 1, 4, 1, 0, 0)),
    "FLASH_BWD_DKV": tuple((columns, 8, 1, 4, 1, 0, 0) for columns in (144, 40, 8)),
    "FLASH_BWD_BIAS": ((576, 8, 1, 4, 1, 0, 0),),
    "FLASH_DECODE": (),
}

# Rows for M5's matrix units, which Mesa does not compile for. They need at most 168 registers by an
# estimate. Fields: bits, the largest number of columns, then V_SLICE and Q_IN_REGISTERS of the
# forward, or SLICE, COLUMN_SIMDGROUPS and ROWS_IN_REGISTERS of a gradient.
TENSOR_FORWARD = (
    *((16, 96, 256, 1), (16, 160, 256, 0), (16, 576, 160, 0)),
    *((32, 64, 256, 1), (32, 576, 128, 0)),
)
TENSOR_DQ = (
    *((16, 64, 576, 1, 1), (16, 160, 576, 1, 0), (16, 576, 320, 2, 0)),
    *((32, 32, 576, 1, 1), (32, 128, 576, 1, 0), (32, 576, 256, 2, 0)),
)
TENSOR_DKV = (
    *((16, 32, 576, 1, 1), (16, 64, 576, 1, 0), (16, 576, 128, 2, 0)),
    *((32, 32, 576, 1, 1), (32, 576, 64, 2, 0)),
)


class Row(NamedTuple):
    bits: int
    columns: int
    queries: int
    load: str
    family: str
    registers: float
    tile: Tile

    def holds(self, bits: int, columns: int, queries: int, load: str) -> bool:
        """True if the row applies to such a problem on M1. Rows with the load Never do not."""
        wide = self.columns >= columns and self.queries >= queries
        loads = LOADS[LOADS.index(load) :] if load in LOADS else ()
        return self.bits == bits and wide and self.load in loads


def rows_of(macro: str, chosen: Iterable[Candidate], smallest: Iterable[Candidate]) -> list[Row]:
    """A kernel's rows, without redundant rows."""
    rows = []
    for bits in DTYPES:
        # The unstaged rows come first, because `tune` tries a limited number.
        unstaged = UNSTAGED if macro == "FLASH_FWD" else ()
        rows += [Row(bits, 256, 0, "Never", "M3", 0.0, tile) for tile in unstaged]
        for candidate in (*chosen, *smallest):
            if (candidate.problems.macro, candidate.problems.bits) == (macro, bits):
                registers = candidate.registers if candidate.results else 0.0
                rows.append(Row(*candidate.problems[1:5], "M1", registers, candidate.tile))
    return merged(macro, rows)


def tensor_rows() -> dict[str, list[Row]]:
    def row(bits: int, columns: int, *tile: int) -> Row:
        return Row(bits, columns, 0, "Rotary", "M1", 0.0, tile)

    def gradients(group: Iterable[tuple[int, ...]]) -> list[Row]:
        return [
            row(bits, columns, slice_, 32, 2, 4, shared, held, 0)
            for bits, columns, slice_, shared, held in group
        ]

    return {
        "FLASH_FWD_TENSOR": [
            row(bits, columns, v_slice, 32, 4, 1, held, 1)
            for bits, columns, v_slice, held in TENSOR_FORWARD
        ],
        "FLASH_BWD_DQ_TENSOR": gradients(TENSOR_DQ),
        "FLASH_BWD_DKV_TENSOR": gradients(TENSOR_DKV),
    }


def merged(macro: str, rows: Sequence[Row]) -> list[Row]:
    """The rows that are needed so that each problem tries the same tiles in the same order."""
    widths = {row.columns for row in rows}
    problems = [*product({row.bits for row in rows}, widths, {row.queries for row in rows}, LOADS)]

    def tiles_by_problem(rows: Iterable[Row]) -> list[list[Tile]]:
        tiles_of_problems = []
        for problem in problems:
            tiles: list[Tile] = []
            for row in rows:
                if row.holds(*problem) and not (tiles and _always_runs(macro, problem, tiles[-1])):
                    tiles += [row.tile] if row.tile not in tiles else []
            tiles_of_problems.append(tiles)
        return tiles_of_problems

    wanted, kept = tiles_by_problem(rows), [*rows]
    for length in range(len(rows), 0, -1):
        for first in range(len(rows) - length, -1, -1):
            left_out, rest = kept[first : first + length], kept[:first] + kept[first + length :]
            if all(row.load in LOADS for row in left_out) and tiles_by_problem(rest) == wanted:
                kept = rest

    def most(row: Row) -> float:
        group = [one for one in rows if one.tile == row.tile and row.holds(*one[:4])]
        return max([row.registers, *(one.registers for one in group if one not in kept)])

    return [row._replace(registers=most(row)) for row in kept]


def _always_runs(macro: str, problem: tuple[int, int, int, str], tile: Tile) -> bool:
    """True if every problem of a class can run a tile that the compiled problem can run."""
    named = dict(zip(knobs(macro), tile, strict=True))
    alone = named.get("COLUMN_SIMDGROUPS") == 1 and problem[1] < max(COLUMNS)
    return alone or macro == "FLASH_DECODE"


def text_of(macro: str, rows: Sequence[Row]) -> str:
    cells = [
        [
            *(str(bits), str(columns), *([str(queries)] if queries else []), load, family),
            *(f"{registers:g}", *map(str, tile)),
        ]
        for bits, columns, queries, load, family, registers, tile in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (", ".join(map(str.rjust, row, widths)) for row in cells)
    head = f"// {' '.join(knobs(macro))}\n#define {macro}_ROWS(ROW)"
    return " \\\n".join([head, *(f"  ROW({line})" for line in lines)]) + "\n"


def table(rows: Mapping[str, Sequence[Row]]) -> str:
    lists = "\n".join(text_of(macro, group) for macro, group in rows.items())
    return f"{HEAD.format(checksum=checksum(lists))}\n{lists}"


def checksum(lists: str) -> str:
    """A checksum of the rows' text, which shows that this program wrote them."""
    return hashlib.sha256(lists.encode()).hexdigest()[:16]


LIST = re.compile(r"^#define (FLASH_\w+)_ROWS\(ROW\) \\\n((?:  ROW.*\n)+)", re.M)


def read_rows(text: str) -> dict[str, list[Row]]:
    rows: dict[str, list[Row]] = {}
    for macro, lines in LIST.findall(text):
        group = rows[macro] = []
        for line in re.findall(r"ROW\((.*)\)", lines):
            cells = [cell.strip() for cell in line.split(",")]
            queries = int(cells.pop(2)) if macro == "FLASH_DECODE" else 0
            bits, columns, load, family, registers, *tile = cells
            numbers = tuple(int(n) for n in tile)
            conditions = int(bits), int(columns), queries, load, family
            group.append(Row(*conditions, float(registers), numbers))
    return rows


def main() -> None:
    """Write the table, and print the classes for which no tile fits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--store", type=Path, default=default_dir() / "agx" / "tiles")
    parser.add_argument("--out", type=Path, default=TABLE)
    options = parser.parse_args()
    compile_ = partial(lens.compile_all, workers=options.workers, store=options.store)
    rows = {}
    for macro in NAMES:
        chosen = choose(list(classes(macro)), compile_)
        widest = (Class(macro, bits, 576, 0, "Rotary", ragged=True) for bits in DTYPES)
        smallest = [c for one in widest for c in measured(one, SMALLEST[macro], compile_)]
        rows[macro] = rows_of(macro, chosen.values(), smallest)
        print(text_of(macro, rows[macro]), flush=True)
        for one, choice in chosen.items():
            if not choice.fits:
                print(*one, f"{choice.registers:g} registers")
    options.out.write_text(table(rows | tensor_rows()))


if __name__ == "__main__":
    main()
