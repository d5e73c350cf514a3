"""Writes csrc/tiles/table.inc: the best tile of each class of problems (`choose.py`).

Needs the driver that bench/agx/setup.sh builds. What was compiled is kept in a folder, so that a
run that was ended goes on where it was.
"""

import argparse
import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from torch_metal_attn.simulator.cache import default_dir

from . import lens
from .candidates import DTYPES, LOADS, NAMES, Class, Tile, classes, knobs
from .choose import Candidate, choose, measured

TABLE = Path(__file__).parents[2] / "csrc" / "tiles" / "table.inc"
HEAD = """\
// The default tiles, read as csrc/tiles/table.h says. Written by `python -m bench.agx.table`:
// change what it tries or how it ranks that, not the rows. Their checksum: {checksum}
#pragma once

// A row has its conditions, the REGISTERS that a thread of M1 needs at most for the widest of such
// problems (0: not measured), and the tile. The conditions are the BITS of an element, the most
// COLUMNS of a row of q, k or v, of a decode the most QUERIES that share a KV head, the heaviest
// LOAD of features, and the first GPU FAMILY. A row of `Never` is one that `tune` tries and no
// default tile.
"""
# K and V read straight from device memory, as metal-flash-attention reads them from M3 on, with 16
# rows a threadgroup (AttentionDescriptor+Parameters.swift at 5b07c27). MLX stages them there too,
# and reaches 88 to 97 % of an M3 Ultra's matrix peak. So it is `tune` that decides.
UNSTAGED = ((256, 32, 4, 1, 1, 0), (256, 16, 4, 1, 1, 0))
# For what no other tile divides or has threadgroup memory for.
SMALLEST: Mapping[str, tuple[Tile, ...]] = {
    "FLASH_FWD": ((256, 8, 4, 1, 0, 1),),
    "FLASH_BWD_DQ": ((1, 8, 1, 4, 1, 0, 0), (4, 8, 1, 4, 1, 0, 0)),
    "FLASH_BWD_DKV": tuple((slices, 8, 1, 4, 1, 0, 0) for slices in (4, 16, 72)),
    "FLASH_BWD_BIAS": ((1, 8, 1, 4, 1, 0, 0),),
    "FLASH_DECODE": (),
}

# Of M5's matrix units, for which there is no such compiler: by judgement of the registers that a
# thread may have where they are a part of the cache, at most 168 by an estimate. Bits, the most
# columns, and of the forward V_SLICE and Q_IN_REGISTERS, of the others SLICES, COLUMN_SIMDGROUPS
# and ROWS_IN_REGISTERS.
TENSOR_FORWARD: tuple[tuple[int, ...], ...] = (
    (16, 96, 256, 1),
    (16, 160, 256, 0),
    (16, 576, 160, 0),
)
TENSOR_FORWARD += ((32, 64, 256, 1), (32, 576, 128, 0))
TENSOR_DQ: tuple[tuple[int, ...], ...] = (
    (16, 64, 1, 1, 1),
    (16, 160, 1, 1, 0),
    (16, 320, 1, 2, 0),
    (16, 576, 2, 2, 0),
)
TENSOR_DQ += ((32, 32, 1, 1, 1), (32, 128, 1, 1, 0), (32, 256, 1, 2, 0), (32, 512, 2, 2, 0))
TENSOR_DQ += ((32, 576, 3, 2, 0),)
TENSOR_DKV: tuple[tuple[int, ...], ...] = (
    (16, 32, 1, 1, 1),
    (16, 64, 1, 1, 0),
    (32, 32, 1, 1, 1),
    (32, 64, 1, 2, 0),
)
TENSOR_DKV += tuple((16, 128 * slices, slices, 2, 0) for slices in (1, 2, 3, 4))
TENSOR_DKV += ((16, 576, 5, 2, 0), *((32, 64 * slices, slices, 2, 0) for slices in range(2, 10)))

# Bits, columns, queries, load, family, registers and tile.
Row = tuple[int, int, int, str, str, float, Tile]


def rows_of(macro: str, chosen: Iterable[Candidate], smallest: Iterable[Candidate]) -> list[Row]:
    """A kernel's rows: alike neighbours are one row, for the widest of them."""
    rows: list[Row] = []
    for bits in DTYPES:
        # First, as `tune` tries only so many.
        unstaged = UNSTAGED if macro == "FLASH_FWD" else ()
        own: list[Row] = [(bits, 256, 0, "Never", "M3", 0.0, tile) for tile in unstaged]
        own += [_row(c) for c in chosen if (c.one.macro, c.one.bits) == (macro, bits)]
        own += [_row(c) for c in smallest if c.one[:2] == (macro, bits)]
        rows += _merged(own)
    return rows


def tensor_rows() -> dict[str, list[Row]]:
    """By kernel."""
    forward: list[Row] = [
        (bits, columns, 0, "Rotary", "M1", 0.0, (v_slice, 32, 4, 1, held, 1))
        for bits, columns, v_slice, held in TENSOR_FORWARD
    ]
    rows = {"FLASH_FWD_TENSOR": forward}
    for macro, gradients in (
        ("FLASH_BWD_DQ_TENSOR", TENSOR_DQ),
        ("FLASH_BWD_DKV_TENSOR", TENSOR_DKV),
    ):
        rows[macro] = [
            (bits, columns, 0, "Rotary", "M1", 0.0, (slices, 32, 2, 4, shared, held, 0))
            for bits, columns, slices, shared, held in gradients
        ]
    return rows


def _row(candidate: Candidate) -> Row:
    one = candidate.one
    registers = candidate.registers if candidate.found else 0.0
    return one.bits, one.columns, one.queries, one.load, "M1", registers, candidate.tile


def _merged(rows: Iterable[Row]) -> list[Row]:
    """Without a row that an earlier one makes useless, or that says what the next one says."""
    kept: list[Row] = []
    for row in rows:
        bits, columns, queries, load, family, registers, tile = row
        if any(r[6] == tile and _covers(r, row) for r in kept):
            continue
        while kept and kept[-1][6] == tile and _covers(row, kept[-1]):
            registers = max(registers, kept.pop()[5])
        kept.append((bits, columns, queries, load, family, registers, tile))
    return kept


def _covers(wide: Row, narrow: Row) -> bool:
    return (
        {wide[3], narrow[3]} <= set(LOADS)
        and wide[1] >= narrow[1]
        and wide[2] >= narrow[2]
        and LOADS.index(wide[3]) >= LOADS.index(narrow[3])
    )


def text_of(macro: str, rows: Sequence[Row]) -> str:
    """The rows as a macro of C++, in columns."""
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
    """The whole file."""
    lists = "\n".join(text_of(macro, own) for macro, own in rows.items())
    return f"{HEAD.format(checksum=checksum(lists))}\n{lists}"


def checksum(lists: str) -> str:
    """Of the rows as they stand in the file: others were not written by this program."""
    return hashlib.sha256(lists.encode()).hexdigest()[:16]


# The rows of a kernel in the table's text.
LIST = re.compile(r"^#define (FLASH_\w+)_ROWS\(ROW\) \\\n((?:  ROW.*\n)+)", re.M)


def read_rows(text: str) -> dict[str, list[Row]]:
    """The rows of a table, by kernel."""
    found: dict[str, list[Row]] = {}
    for macro, lines in LIST.findall(text):
        own = found[macro] = []
        for line in re.findall(r"ROW\((.*)\)", lines):
            cells = [cell.strip() for cell in line.split(",")]
            queries = int(cells.pop(2)) if macro == "FLASH_DECODE" else 0
            bits, columns, load, family, registers, *tile = cells
            numbers = tuple(int(n) for n in tile)
            own.append((int(bits), int(columns), queries, load, family, float(registers), numbers))
    return found


def main() -> None:
    """Write the table, and print the classes of which no tile fits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--store", type=Path, default=default_dir() / "agx" / "tiles")
    parser.add_argument("--out", type=Path, default=TABLE)
    given = parser.parse_args()
    compile_ = partial(lens.compile_all, workers=given.workers, store=given.store)
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
    given.out.write_text(table(rows | tensor_rows()))


if __name__ == "__main__":
    main()
