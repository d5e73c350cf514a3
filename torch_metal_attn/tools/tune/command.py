"""`python -m torch_metal_attn tune`: measure tiles on this machine, and keep the fastest."""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from torch_metal_attn.runtime import machine as machines
from torch_metal_attn.runtime import mps
from torch_metal_attn.runtime.version import open_an_issue
from torch_metal_attn.tools.bench.shapes import BadShape, Shape
from torch_metal_attn.tools.bench.timing import Timer, timer_of
from torch_metal_attn.tools.progress import Progress
from torch_metal_attn.tools.tune import report
from torch_metal_attn.tools.tune.measure import Tried, kernels_of, measure
from torch_metal_attn.tools.tune.shapes import COMMON, add_arguments, chosen
from torch_metal_attn.tuned import loading, tables, tiles
from torch_metal_attn.tuned.tables import BadTable, Machine, Table

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
    _check_options(options)
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
    run = _Run(path, _table_at(path, machine), DEVICE, timer_of(DEVICE), options.rounds)
    run.table.about = machines.describe(DEVICE)
    try:
        run.measure(shapes, options.minutes)
    finally:
        run.conclude(len(shapes))
    return not run.wrong


def _check_options(options: argparse.Namespace) -> None:
    if options.rounds < 1:
        raise BadShape(f"--rounds is {options.rounds}; it must be above 0")
    if options.minutes is not None and not 0 < options.minutes < math.inf:
        raise BadShape(f"--minutes is {options.minutes}; it must be above 0 and finite")
    if options.dtype is not None and options.model is None:
        raise BadShape("--dtype is for --model: a file of --shapes has the dtypes")


def _table_at(path: Path, machine: Machine) -> Table:
    """The table that is there, to be added to, or a new one."""
    try:
        table = tables.read(path)
        tables.check_machine(table, machine)
    except FileNotFoundError:
        return Table(machine)
    except BadTable as error:
        print(f"{path} is replaced: {error}", file=sys.stderr)
        return Table(machine)
    return table


class _Run:
    """One run of the command. wrong: whether a tile's result was."""

    def __init__(
        self, path: Path, table: Table, device: torch.device, timer: Timer, rounds: int
    ) -> None:
        self.table, self.wrong = table, False
        self._path, self._device, self._timer, self._rounds = path, device, timer, rounds
        self._done = 0
        self._ran: dict[str, None] = {}

    def measure(self, shapes: Sequence[Shape], minutes: float | None) -> None:
        """Measure each shape that begins in time."""
        self._keep()  # fails now if the path is wrong, not after an hour
        print(
            f"Tiles on {self.table.about['chip']}, {tables.counted(len(shapes), 'shape')}",
            flush=True,
        )
        start = time.monotonic()
        ends = None if minutes is None else start + 60 * minutes
        with Progress(len(shapes), ends=ends) as progress:
            for shape in shapes:
                if ends is not None and time.monotonic() >= ends:
                    break
                progress.step("", str(shape))
                progress.say("\n".join(self._shape(shape)))
                self._done += 1
                if self._device.type == "mps":  # leave no memory of this shape to the next
                    torch.mps.empty_cache()

    def _shape(self, shape: Shape) -> list[str]:
        lines = [f"\n{shape}"]
        try:
            for found in measure(shape, self._device, self._timer, self._rounds):
                tile = ""
                if isinstance(found, Tried):
                    self.wrong |= any(trial.wrong for trial in found.trials)
                    if found.timed is not None:
                        tile = self.table.add(found.key, found.timed).tile
                        self._ran[found.key] = None
                elif found.compared is not None and found.key in self.table.rows:
                    self.table.compare(found.key, found.compared)
                self._keep()
                lines += report.lines_of(found, tile)
        except RuntimeError as error:
            lines.append(f"  not measured: {str(error).splitlines()[0]}")
        return lines

    def _keep(self) -> None:
        self.table.write(self._path)

    def conclude(self, shapes: int) -> None:
        """Print the report, and use the new table in this process if it is the package's own."""
        print()
        print(report.markdown(self.table, list(self._ran), shapes - self._done))
        if self.wrong:
            print(
                f"A tile gave a wrong result and was left out. Please {open_an_issue()} with this "
                "report and with that of `python -m torch_metal_attn verify --full`."
            )
        rows = tables.counted(len(self.table.rows), "row")
        print(f"{rows} in {self._path}", flush=True)
        loading.install()
