"""`python -m torch_metal_attn tune`: measure tiles on this machine, and keep the fastest."""

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from torch_metal_attn.runtime import machine as machines
from torch_metal_attn.runtime import mps
from torch_metal_attn.runtime.version import open_an_issue
from torch_metal_attn.tools import text_table
from torch_metal_attn.tools.bench.shapes import KINDS, BadShape, Shape
from torch_metal_attn.tools.bench.timing import Timer, timer_of
from torch_metal_attn.tools.progress import Progress
from torch_metal_attn.tools.tune.measure import WRONG, kernels_of, measure
from torch_metal_attn.tools.tune.shapes import COMMON, add_arguments, chosen
from torch_metal_attn.tuned import loading, tables, tiles
from torch_metal_attn.tuned.tables import TORCH, BadTable, Machine, Row, Table
from torch_metal_attn.wording import count_text

DEVICE = torch.device("mps")
_ROUNDS = 15


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `tune`."""
    add_arguments(parser)
    parser.add_argument(
        "--minutes", type=float, metavar="N", help="begin no shape after N minutes (default: all)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=_ROUNDS,
        metavar="N",
        help=f"samples of each time (default: {_ROUNDS})",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the table there, and not where the package finds it by itself",
    )


def tune(options: argparse.Namespace) -> bool:
    """Measure the chosen shapes, or those of common models, and write a table of the fastest tiles.

    Returns False without a GPU, or if a tile's result was wrong. The table is written after each
    kernel, so an interrupt keeps what was measured. Raises BadShape, OSError or CacheError.
    """
    if options.rounds < 1:
        raise BadShape(f"--rounds is {options.rounds}; it must be above 0")
    if options.minutes is not None and not 0 < options.minutes < math.inf:
        raise BadShape(f"--minutes is {options.minutes}; it must be above 0 and finite")
    if options.dtype is not None and options.model is None:
        raise BadShape("--dtype is for --model: a file of --shapes has the dtypes")
    problem = mps.problem()
    if problem:
        print(
            f"tune measures an Apple GPU, and mps cannot be used here: {problem}", file=sys.stderr
        )
        return False
    machine = loading.this_machine()
    shapes = chosen(options) or COMMON
    with tiles.forced({}):
        for shape in shapes:
            kernels_of(shape, DEVICE)  # refused before anything is measured
    path = options.out or loading.path_of(machine)
    table = _table_at(path, machine)
    table.about = machines.describe(DEVICE)
    table.write(path)  # fails now if the path is wrong, not after an hour
    print(f"Tiles on {table.about['chip']}, {count_text(len(shapes), 'shape')}", flush=True)
    run = _Run(path, table, timer_of(DEVICE), options.rounds)
    try:
        run.measure(shapes, options.minutes)
    finally:
        print()
        print("\n".join(report(table, [*run.keys], len(shapes) - run.done)) + "\n")
        if run.wrong:
            print(
                f"A tile gave a wrong result and was left out. Please {open_an_issue()} with this "
                "report and with that of `python -m torch_metal_attn verify --full`."
            )
        print(f"{count_text(len(table.tiles()), 'tile')} in {path}", flush=True)
        loading.install()
    return not run.wrong


def _table_at(path: Path, machine: Machine) -> Table:
    """The table that is there, to be added to, or a new one."""
    try:
        table = tables.read(path)
        if why := table.machine.differs(machine):
            raise BadTable(why)
    except FileNotFoundError:
        return Table(machine)
    except BadTable as error:
        print(f"{path} is replaced: {error}", file=sys.stderr)
        return Table(machine)
    return table


class _Run:
    """One run of the command.

    Attributes: done: shapes that are. keys: those that were measured. wrong: whether a tile was.
    """

    def __init__(self, path: Path, table: Table, timer: Timer, rounds: int) -> None:
        self.done, self.wrong = 0, False
        self.keys: dict[str, None] = {}
        self._path, self._table, self._timer, self._rounds = path, table, timer, rounds

    def measure(self, shapes: Sequence[Shape], minutes: float | None) -> None:
        """Measure each shape that begins in time."""
        ends = None if minutes is None else time.monotonic() + 60 * minutes
        with Progress(len(shapes), ends=ends) as progress:
            for shape in shapes:
                if ends is not None and time.monotonic() >= ends:
                    break
                progress.step("", str(shape))
                progress.say("\n".join(self._lines(shape)))
                self.done += 1
                if DEVICE.type == "mps":  # leave no memory of this shape to the next
                    torch.mps.empty_cache()

    def _lines(self, shape: Shape) -> Iterator[str]:
        """Measure a shape; a line for each tile, and one for torch."""
        yield f"\n{shape}"
        try:
            for name, rows in measure(shape, DEVICE, self._timer, self._rounds):
                key = rows[0].key
                self._table.add(rows)
                self._table.write(self._path)
                self.keys[key] = None
                self.wrong |= any(row.note.startswith(WRONG) for row in rows)
                chosen = self._table.tiles().get(key)
                yield f"  {name}"
                yield from (f"    {_line(row, chosen)}" for row in rows)
        except RuntimeError as error:
            yield f"  not measured: {str(error).splitlines()[0]}"


def _line(row: Row, chosen: str | None) -> str:
    if row.seconds is None:
        return f"{row.tile:<78} left out: {row.note}"
    notes = ["default"] if row.default else []
    if row.error is not None:
        notes.append(f"again {row.share:.3f} +- {row.error:.3f} of the default tile's time")
    notes += [f"{row.share:.2f} of our time"] if row.tile == TORCH else []
    notes += ["chosen"] if row.tile == chosen else []
    notes += [row.note] if row.note else []
    time = f"{row.seconds * 1e3:.3f} ms"
    return f"{row.tile:<78} {time:>12}  {', '.join(notes)}".rstrip()


def report(table: Table, keys: Sequence[str], left: int) -> Iterator[str]:
    """The report for an issue in Markdown: the machine, and each key's tile with its gain.

    left: shapes that were not measured.
    """
    yield from ("# torch_metal_attn: tune", "")
    yield from (*text_table.markdown(("", ""), table.about.items()), "")
    if left:
        yield from (f"Not measured: {count_text(left, 'shape')}.", "")
    yield from ("Times are relative to the default tile's, and torch's to ours.", "")
    cells = []
    tiles, ratios = table.tiles(), table.ratios()
    for key in keys:
        tile = tiles.get(key, "-")
        own = [row for row in table.rows if row.key == key and row.tile != TORCH]
        shares = [row.share for row in own if row.tile == tile]
        own_ratios = ((kind, ratios.get((key, kind))) for kind in KINDS)
        torchs = ", ".join(f"{kind} {x:.2f}" for kind, x in own_ratios if x is not None)
        cells.append((key, tile, f"{min(shares):.2f}" if shares else "-", torchs or "-"))
        cells += [("", row.tile, "left out", row.note) for row in own if row.seconds is None]
    headings = ("kernel, dtype, head dims, features, lengths", "tile", "time", "torch")
    yield from text_table.markdown(headings, cells, numbers=(2,))
