"""Compiles candidates for the default tiles, and writes the best ones to csrc/tiles/table.inc.

With --measure it keeps the tiles that are there, and writes only the registers that each needs.
Needs the driver that bench/agx/setup.sh builds. What was compiled is kept in a folder, so that a
run that was ended goes on where it was.
"""

import argparse
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

from bench import specialisations
from bench.front_end import source_of
from torch_metal_attn.simulator.cache import default_dir
from torch_metal_attn.tools.tune import tiles

from . import lens, model

TABLE = Path(__file__).parents[2] / "csrc" / "tiles" / "table.inc"
ELEMENTS = {"Half": torch.float16, "Bfloat": torch.bfloat16, "Float": torch.float32}
# The widest problem of each class is compiled, but no v has more than 512 columns.
COLUMNS = (64, 96, 128, 192, 256, 576)
MOST_COLUMNS = 512
QUERIES = (2, 8, 16, 32)
HEADS = 32  # of bench.specialisations
# What a class is compiled with: the features that need the most registers.
LIGHT = ("causal", "bool mask", "ALiBi")
HEAVY = ("dropout", "rotary of q and k", "bias")
HEAVY_FORWARD = (*HEAVY, "q8_0 cache")
HEAVY_DECODE = ("bias", "pages of 16", "q8_0 cache")
# The lens may be off by 10 registers, so a tile that needs more is at risk.
MOST_REGISTERS = 118  # of 128
# A tile with this many SIMD groups of a core and this many cycles a product at most is taken before
# a faster one that has fewer: the model of time knows little of what else they hide.
RESIDENT = {"FLASH_FWD": 16, "FLASH_BWD_DQ": 12, "FLASH_BWD_DKV": 12}
RESIDENT_NARROW = 24  # of a forward of up to 64 columns
CYCLES = {"FLASH_FWD": 23.0, "FLASH_BWD_DQ": 24.0, "FLASH_BWD_DKV": 24.0}
MORE_CYCLES = 1.5  # of bfloat16, which is converted
BYTES = 16  # a cycle and core that a decode aims at: M1 to M2 Ultra have 7 to 10
ALIKE = 1.01  # times within 1 %: then more SIMD groups are better
AT_ONCE = 3  # tiles of a class that are compiled with all of its features at a time
ROUNDS = 5
UNKNOWN = 999.0  # registers of what does not compile

HEAD = """\
// The default tiles, read as csrc/tiles/table.h says. `python -m bench.agx.table` proposes tiles,
// and with --measure it writes the registers of those that are here.
//
// A row has its conditions, the REGISTERS that a thread of M1 needs at most for the widest of such
// problems (0: not measured), and the tile. The conditions are the ELEMENT, the most COLUMNS of a
// row of q, k or v, of a decode the most QUERIES that share a KV head, the heaviest LOAD of
// features, and the first GPU FAMILY. V_SLICE is the most columns of a slice, and SPANS are the
// most spans of 32 columns that a SIMD group of a decode owns. A row of `Never` is one that `tune`
// tries and no default tile.
//
"""

Tile = dict[str, int]


class Kernel(NamedTuple):
    """What the rows of a kernel are. fallbacks: rows for what no measured tile divides."""

    name: str
    knobs: tuple[str, ...]
    fallbacks: tuple[tuple[int, str, str, tuple[int, ...]], ...]


BACKWARD = (
    *("SLICES", "BLOCK", "ROW_FRAGMENTS", "SIMDGROUPS", "COLUMN_SIMDGROUPS"),
    *("ROWS_IN_REGISTERS", "ROWS_IN_THREADGROUP"),
)
FORWARD = (
    *("V_SLICE", "BLOCK_K", "SIMDGROUPS", "COLUMN_SIMDGROUPS"),
    *("Q_IN_REGISTERS", "KV_STAGED"),
)
DECODE = ("ROW_FRAGMENTS", "KEY_FRAGMENTS", "KEY_SIMDGROUPS", "SPANS", "VECTOR_ROWS")
# K and V read straight from device memory, as metal-flash-attention reads them from M3 on, with 16
# rows a threadgroup (AttentionDescriptor+Parameters.swift at 5b07c27). MLX stages them there too,
# and reaches 88 to 97 % of an M3 Ultra's matrix peak. So it is `tune` that decides.
UNSTAGED = (
    (256, "Never", "M3", (256, 32, 4, 1, 1, 0)),
    (256, "Never", "M3", (256, 16, 4, 1, 1, 0)),
)
KERNELS = {
    "FLASH_FWD": Kernel(
        "flash_fwd",
        FORWARD,
        (*UNSTAGED, (576, "Heavy", "M1", (256, 8, 4, 1, 0, 1))),
    ),
    "FLASH_BWD_DQ": Kernel(
        "flash_bwd_dq",
        BACKWARD,
        tuple((576, "Heavy", "M1", (slices, 8, 1, 4, 1, 0, 0)) for slices in (1, 4)),
    ),
    "FLASH_BWD_DKV": Kernel(
        "flash_bwd_dkv",
        BACKWARD,
        tuple((576, "Heavy", "M1", (slices, 8, 1, 4, 1, 0, 0)) for slices in (4, 16, 72)),
    ),
    "FLASH_BWD_BIAS": Kernel(
        "flash_bwd_bias",
        ("ROW_FRAGMENTS", "BLOCK_K", "SIMDGROUPS", "ROWS_IN_REGISTERS"),
        (
            (64, "Heavy", "M1", (2, 32, 4, 1)),
            (128, "Heavy", "M1", (1, 16, 4, 0)),
            (576, "Heavy", "M1", (1, 8, 4, 0)),
        ),
    ),
    "FLASH_DECODE": Kernel("flash_decode", DECODE, ()),
}


class Class(NamedTuple):
    """Problems that have one row. ragged: head dims that SIMD groups cannot divide."""

    macro: str
    element: str
    columns: int
    queries: int
    load: str
    ragged: bool

    @property
    def head_dim(self) -> int:
        return min(self.columns, MOST_COLUMNS) - (8 if self.ragged else 0)

    @property
    def features(self) -> tuple[str, ...]:
        if self.load == "Light":
            return LIGHT
        if self.ragged:  # quantised rows are whole spans
            return HEAVY
        special = {"FLASH_FWD": HEAVY_FORWARD, "FLASH_DECODE": HEAVY_DECODE}
        return special.get(self.macro, HEAVY)


def classes(macros: Iterable[str]) -> Iterator[Class]:
    """All classes, in the order of their rows."""
    for macro in macros:
        decode = macro == "FLASH_DECODE"
        every = (ELEMENTS, QUERIES if decode else (0,), COLUMNS)
        for element, queries, columns in product(*every):
            for load in ("Light", "Heavy"):
                yield Class(macro, element, columns, queries, load, ragged=False)
            if not decode and (columns > 64 or macro == "FLASH_BWD_DKV"):
                yield Class(macro, element, columns, queries, "Heavy", ragged=True)


def candidates(one: Class) -> Iterator[Tile]:
    """Tiles that differ in kind; some of them cannot run."""
    shares = (1,) if one.ragged or one.columns <= 64 else (1, 2)
    # Rows that are read again save no registers, as the loads are moved out of the loop, but where
    # there is no room for them at all.
    wide = one.columns > 256
    places = ((1, 0), (0, 1), (0, 0)) if wide else ((1, 0), (0, 1))
    if one.macro == "FLASH_FWD":
        held_or_not = (1, 0) if wide else (1,)
        every = product((8, 16, 24, 32), (4, 8), shares, held_or_not)
        for block, simdgroups, shared, held in every:
            values = (256, block, simdgroups, shared, held, 1)
            yield dict(zip(FORWARD, values, strict=True))
    elif one.macro == "FLASH_DECODE":
        spans = -(-one.head_dim // 32)
        fragments = -(-one.queries // 8)
        own = sorted({min(n, spans) for n in (1, 2, 3, 4, 8, spans)})
        for keys, share, vectors in product((1, 2, 4), own, (0, 1)):
            if not vectors or (one.queries <= 2 and share == spans):
                own_keys = 4 if share == spans else 1
                decode = (fragments, keys, own_keys, share, 2 * vectors)
                yield dict(zip(DECODE, decode, strict=True))
    else:
        dkv = one.macro == "FLASH_BWD_DKV"
        slices = (1,) if one.columns <= 128 else (1, 2) if one.columns <= 256 else (2, 3, 4, 8)
        groups = [(1, 4, n) for n in shares] + [(1, 8, n) for n in shares]
        if dkv and not one.ragged:
            groups += [(2, 4, 2), (2, 4, 4), (4, 4, 4), (2, 8, 4), (1, 4, 4)]
        for cut, block, group, place in product(slices, (8, 16, 24, 32), groups, places):
            # Four SIMD groups that share rows have as many parts of the scores.
            if group[2] == 4 and (block == 24 or group[0] * block < 32):
                continue
            yield dict(zip(BACKWARD, (cut, block, *group, *place), strict=True))


def specialisation(one: Class, feature: str, tile: Tile) -> lens.Job | None:
    """What the tile makes of the class's problem with a feature; None if it cannot run."""
    given, kernel = dict(tile), KERNELS[one.macro].name
    dtype, options = ELEMENTS[one.element], specialisations.ALL_FEATURES[feature]
    if one.macro == "FLASH_FWD":
        slices = -(-one.head_dim // given["V_SLICE"])
        given["V_SLICE"] = 8 * -(-one.head_dim // (8 * slices))
    if one.macro == "FLASH_DECODE":
        given["COLUMN_SIMDGROUPS"] = -(-one.head_dim // (32 * given.pop("SPANS")))
        given |= {"KEY_SIMDGROUPS": 1} if given["COLUMN_SIMDGROUPS"] > 1 else {}
        given = {name: n for name, n in given.items() if n or name != "VECTOR_ROWS"}
    text = " ".join(f"{name}={n}" for name, n in given.items())
    with tiles.forced({kernel: text}):
        if one.macro == "FLASH_DECODE":
            kv_heads = HEADS // one.queries
            every = iter(
                [specialisations.decoding(dtype, one.head_dim, kv_heads, feature, options)]
            )
        else:
            every = specialisations.attention(dtype, one.head_dim, feature, options)
        found = next((x for x in every if x.kernel == kernel), None)
    if found is None or not _has(found.defines, given):
        return None
    return lens.Job(kernel, found.defines, found.threads)


def _has(defines: Mapping[str, object], tile: Tile) -> bool:
    """Whether the tile was taken, not refused."""
    absent = {"COLUMN_SIMDGROUPS": 1, "KV_STAGED": 1}
    names = {"BLOCK": "BLOCK_Q" if "BLOCK_Q" in defines else "BLOCK_K"}
    return all(
        int(str(defines.get(names.get(name, name), absent.get(name, 0)))) == number
        for name, number in tile.items()
        if name != "SLICES"
    ) and int(str(defines.get("SLICES", tile.get("SLICES", 1)))) == tile.get("SLICES", 1)


@dataclass(frozen=True)
class Figures:
    """What counts of a compiled kernel, by the model of time; no cycles if it did not compile."""

    registers: float = 0.0
    spills: int = 0
    resident: int = 0
    cycles: float = 0.0  # a product
    bytes: float = 0.0  # of device memory a cycle and core

    @property
    def fits(self) -> bool:
        return self.cycles > 0 and self.spills == 0 and self.registers <= MOST_REGISTERS


class Store:
    """Compiled figures by text, kept in a folder."""

    def __init__(self, folder: Path, workers: int) -> None:
        self._folder, self._workers = folder, workers
        self._driver = hashlib.sha256(lens.DRIVER.read_bytes()).hexdigest()
        folder.mkdir(parents=True, exist_ok=True)

    def figures(self, jobs: Sequence[lens.Job]) -> list[Figures]:
        """Of each job; those that are not in the folder are compiled in parallel."""
        with ProcessPoolExecutor(self._workers) as pool:
            return list(pool.map(self._one, jobs, chunksize=4))

    def _one(self, job: lens.Job) -> Figures:
        text = source_of(job.kernel, job.defines)
        key = f"{self._driver} {job.kernel} {job.threads}\n{text}".encode()
        path = self._folder / hashlib.sha256(key).hexdigest()
        if path.exists():
            return Figures(**json.loads(path.read_text()))
        try:
            found = job.compiled()
        except ValueError as error:  # what the lens does not know
            print(job.kernel, error, flush=True)
            found = None
        figures = Figures()
        if isinstance(found, lens.Compiled) and found.main:
            figures = Figures(
                *(found.demand, found.spills, found.resident),
                *(model.cycles_a_product(found), model.bytes_a_cycle(found)),
            )
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(figures.__dict__))
        unfinished.replace(path)
        return figures


def rank(one: Class, tile: Tile, figures: Figures) -> tuple[bool, bool, float, float]:
    """Tiles in the order in which they are better; those that spill by their registers."""
    if not figures.fits:
        return True, True, figures.registers or UNKNOWN, 0
    if one.macro == "FLASH_DECODE":
        # Memory is the limit: more than it gives is of no use, but fewer registers are.
        return False, figures.bytes < BYTES, -min(figures.bytes, BYTES), figures.registers
    wanted = RESIDENT_NARROW if one.macro == "FLASH_FWD" and one.columns <= 64 else 0
    most = CYCLES[one.macro] + (MORE_CYCLES if one.element == "Bfloat" else 0.0)
    aim = figures.resident >= (wanted or RESIDENT[one.macro]) and figures.cycles <= most
    cycles = figures.cycles
    if "SLICES" in tile:
        # Each slice computes the scores again, and the gradients of the weights.
        own = 1 if one.macro == "FLASH_BWD_DQ" else 2
        cycles *= (2 * tile["SLICES"] + own) / (2 + own)
    return False, not aim, round(math.log(cycles, ALIKE)), -figures.resident


class Choice(NamedTuple):
    """The best tile of a class, and the most registers that it needs with any of its features."""

    tile: Tile
    registers: float
    fits: bool


def choose(every: Sequence[Class], store: Store) -> dict[Class, Choice]:
    """The fastest tile of each class that fits with all of its features.

    Where none does, that which needs the fewest registers.
    """
    order = _ordered(every, store)
    found: dict[Class, Choice] = {}
    for number in range(ROUNDS):
        open_ = [one for one in every if one not in found or not found[one].fits]
        tried = [
            (one, tile)
            for one in open_
            for tile in order[one][number * AT_ONCE : (number + 1) * AT_ONCE]
        ]
        jobs = [
            (one, tile, f, specialisation(one, f, tile))
            for one, tile in tried
            for f in one.features
        ]
        compiled = store.figures([job for *_, job in jobs if job is not None])
        figures = iter(compiled)
        by_tile: dict[tuple[Class, tuple[int, ...]], list[Figures]] = {}
        for one, tile, _, job in jobs:
            if job is not None:
                by_tile.setdefault((one, tuple(tile.values())), []).append(next(figures))
        for one, tile in tried:
            of_features = by_tile.get((one, tuple(tile.values())), [])
            of_features = [figures for figures in of_features if figures.cycles]
            if not of_features:
                continue
            registers = max(f.registers for f in of_features)
            choice = Choice(tile, registers, all(f.fits for f in of_features))
            before = found.get(one)
            if before is None or (
                not before.fits and (choice.fits or registers < before.registers)
            ):
                found[one] = choice
    return found


def _ordered(every: Sequence[Class], store: Store) -> dict[Class, list[Tile]]:
    """Tiles of each class by their time with its first light feature; those that spill come last.

    Heavy features have the order of the light ones.
    """
    light = {one: one if one.ragged else one._replace(load="Light") for one in every}
    jobs = [
        (one, tile, job)
        for one in dict.fromkeys(light.values())
        for tile in candidates(one)
        if (job := specialisation(one, LIGHT[0], tile)) is not None
    ]
    print(f"{len(every)} classes, {len(jobs)} candidates", flush=True)
    ranked: dict[Class, list[tuple[tuple[bool, bool, float, float], int, Tile]]] = {}
    for (one, tile, _), figures in zip(jobs, store.figures([job for *_, job in jobs]), strict=True):
        own = ranked.setdefault(one, [])
        own.append((rank(one, tile, figures), len(own), tile))
    # Of a class that no candidate can run there is no row.
    return {one: [tile for *_, tile in sorted(ranked.get(light[one], ()))] for one in every}


Row = tuple[str, int, int, str, str, float, tuple[int, ...]]


def rows_of(macro: str, chosen: Mapping[Class, Choice]) -> list[Row]:
    """A kernel's rows: alike neighbours are one row, for the widest of them."""
    rows: list[Row] = []
    for element in ELEMENTS:
        own: list[Row] = []
        for one, choice in chosen.items():
            if (one.macro, one.element) == (macro, element):
                tile = tuple(choice.tile.values())
                own.append(
                    (element, one.columns, one.queries, one.load, "M1", choice.registers, tile)
                )
        own += [
            (element, columns, 0, load, family, 0.0, tile)
            for columns, load, family, tile in KERNELS[macro].fallbacks
        ]
        rows += _merged(own)
    return rows


def _merged(rows: Iterable[Row]) -> list[Row]:
    """Without a row that an earlier one makes useless, or that says what the next one says."""
    kept: list[Row] = []
    for row in rows:
        element, columns, queries, load, family, registers, tile = row
        if any(r[6] == tile and _covers(r, row) for r in kept):
            continue
        while kept and kept[-1][6] == tile and _covers(row, kept[-1]):
            registers = max(registers, kept.pop()[5])
        kept.append((element, columns, queries, load, family, registers, tile))
    return kept


def _covers(wide: Row, narrow: Row) -> bool:
    loads = ("Light", "Heavy")
    return (
        {wide[3], narrow[3]} <= set(loads)
        and wide[1] >= narrow[1]
        and wide[2] >= narrow[2]
        and loads.index(wide[3]) >= loads.index(narrow[3])
    )


def text_of(macro: str, rows: Sequence[Row]) -> str:
    """The rows as C++, in columns."""
    cells = [
        [
            *(element, str(columns), *([str(queries)] if queries else []), load, family),
            *(f"{registers:g}", *map(str, tile)),
        ]
        for element, columns, queries, load, family, registers, tile in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (", ".join(map(str.rjust, row, widths)) for row in cells)
    return "".join(f"{macro}({line})\n" for line in lines)


def table(rows: Mapping[str, Sequence[Row]]) -> str:
    """The whole file."""
    names = "".join(f"// {macro}: {' '.join(k.knobs)}\n" for macro, k in KERNELS.items())
    defaults = "".join(f"#ifndef {macro}\n#define {macro}(...)\n#endif\n" for macro in KERNELS)
    parts = "\n".join(text_of(macro, own) for macro, own in rows.items())
    undefined = "".join(f"#undef {macro}\n" for macro in KERNELS)
    return f"{HEAD}{names}\n{defaults}\n{parts}\n{undefined}"


ROW = re.compile(r"^(?P<macro>FLASH_\w+)\((?P<cells>.*)\)$", re.M)


def read_rows(text: str) -> dict[str, list[Row]]:
    """The rows of a table, by kernel."""
    rows: dict[str, list[Row]] = {macro: [] for macro in KERNELS}
    for found in ROW.finditer(text):
        macro, cells = found["macro"], [cell.strip() for cell in found["cells"].split(",")]
        element, columns = cells[0], int(cells[1])
        queries = int(cells[2]) if macro == "FLASH_DECODE" else 0
        load, family, registers, *tile = cells[3 if queries else 2 :]
        own = (element, columns, queries, load, family, float(registers), tuple(map(int, tile)))
        rows[macro].append(own)
    return rows


def measured(macro: str, rows: Sequence[Row], store: Store) -> list[Row]:
    """The rows with the most registers that their tiles need; 0 of what is not measured."""
    jobs: list[list[lens.Job]] = []
    for element, columns, queries, load, _, _, values in rows:
        tile = dict(zip(KERNELS[macro].knobs, values, strict=True))
        of_row: list[lens.Job] = []
        for ragged in (False, True):
            one = Class(macro, element, columns, queries, load, ragged)
            features = LIGHT if load == "Light" else (*LIGHT, *one.features)
            if load != "Never" and macro != "FLASH_BWD_BIAS" and not of_row:
                every = (specialisation(one, feature, tile) for feature in features)
                of_row = [job for job in every if job is not None]
        jobs.append(of_row)
    figures = iter(store.figures([job for of_row in jobs for job in of_row]))
    found = []
    for row, of_row in zip(rows, jobs, strict=True):
        registers = [next(figures).registers for _ in of_row]
        most = max(registers, default=0.0) if all(registers) else 0.0
        found.append((*row[:5], most, row[6]))
    return found


def main() -> None:
    """Write the table, and print the classes of which no tile fits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--cache", type=Path, default=default_dir() / "agx" / "tiles")
    parser.add_argument("--out", type=Path, default=TABLE)
    parser.add_argument("--measure", action="store_true", help="keep the tiles, write registers")
    given = parser.parse_args()
    store = Store(given.cache, given.workers)
    if given.measure:
        rows = {m: measured(m, own, store) for m, own in read_rows(TABLE.read_text()).items()}
        given.out.write_text(table(rows))
        return
    every = [macro for macro in KERNELS if macro != "FLASH_BWD_BIAS"]
    chosen = choose(list(classes(every)), store)
    given.out.write_text(table({macro: rows_of(macro, chosen) for macro in KERNELS}))
    for one, choice in chosen.items():
        if not choice.fits:
            print(*one, f"{choice.registers:g} registers")


if __name__ == "__main__":
    main()
