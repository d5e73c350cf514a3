"""Tables of tiles: a JSON file for each GPU, whose rows are times of tiles."""

import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

FORMAT = 4  # of the file
TORCH = "torch"  # in place of a tile

# A tile replaces the default one from this gain on, if it is also so many standard errors.
LEAST_GAIN = 0.02
LEAST_ERRORS = 2

_KEY = re.compile(r"\w+( [\w<>=]+)+", re.ASCII)
# Numbers of nine digits fit an int32, which the extension reads.
_TILE = re.compile(rf"[A-Z_]+=\d{{1,9}}( [A-Z_]+=\d{{1,9}})*|{TORCH}", re.ASCII)


class BadTable(ValueError):
    """A table that cannot be used here; the message says why."""


class Machine(NamedTuple):
    """The Macs that a table is for, in words. Those with GPUs of one name differ in their cores.

    Systems and torch have the first two numbers of their versions.
    """

    gpu: str
    cores: str
    system: str
    torch: str
    package: str

    def differs(self, here: "Machine") -> str:
        """Why a table for this machine is none for the machine `here`; "" if it is one."""
        differences = (
            f"it was measured with {measured}, and this is {own}"
            for measured, own in zip(self, here, strict=True)
            if measured != own
        )
        return next(differences, "")


@dataclass(frozen=True)
class Row:
    """One shape's measurement of one tile of a kernel, or of torch's attention.

    Attributes: key: of the kernel's problem, see csrc/tiles/tuned.h; torch's is the forward's.
        shape: in words, its kind first. tile: its knobs, or TORCH. seconds: the median of a call;
        None if it was left out. share: of the default tile's time; torch's of ours. error: the
        standard error of a share that was timed again, in turn with the default tile alone.
        default: whether the tile is the default one. note: why it was left out, or of its pipeline.
    """

    key: str
    shape: str
    tile: str
    seconds: float | None = None
    share: float = 1.0
    error: float | None = None
    default: bool = False
    note: str = ""

    def __post_init__(self) -> None:
        if not (_KEY.fullmatch(self.key) and _TILE.fullmatch(self.tile) and self.shape.split()):
            raise ValueError(f"a row has the key {self.key!r} and the tile {self.tile!r}")
        seconds = 1.0 if self.seconds is None else self.seconds
        if not all(0 < time < math.inf for time in (self.share, seconds)):
            raise ValueError(f"a time of {self.key!r} is not above 0 and finite")
        if self.error is not None and not self.error >= 0:
            raise ValueError(f"an error of {self.key!r} is below 0")


def is_faster(share: float, error: float) -> bool:
    """Whether a gain is neither too small nor noise."""
    return share <= 1 - LEAST_GAIN and 1 - share > LEAST_ERRORS * error


def fastest(rows: Sequence[Row]) -> str | None:
    """The tile with the shortest times relative to the default one's, over all shapes of a key.

    rows: those of tiles. The default one, the last shape's, unless a tile is faster also where it
    was timed again. None if no tile ran for all shapes.
    """
    shapes = {row.shape for row in rows}
    default = next(row.tile for row in reversed(rows) if row.default)
    timed: dict[str, list[Row]] = {}
    for row in rows:
        if row.seconds is not None:
            timed.setdefault(row.tile, []).append(row)
    shares = {tile: _mean(row.share for row in own) for tile, own in timed.items()}
    order = sorted((t for t in shares if len(timed[t]) == len(shapes)), key=shares.__getitem__)
    if default not in order:
        return order[0] if order else None
    for tile in order:
        errors = [row.error for row in timed[tile] if row.error is not None]
        share = shares[tile] / shares[default]
        if errors and is_faster(share, math.hypot(*errors) / len(shapes)):
            return tile
    return default


def _mean(values: Iterable[float]) -> float:
    """The geometric mean."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))


@dataclass
class Table:
    """All rows of a machine. about: the machine in words, for people."""

    machine: Machine
    rows: list[Row] = field(default_factory=list)
    about: dict[str, str] = field(default_factory=dict)

    def add(self, rows: Sequence[Row]) -> None:
        """Add the rows of a shape and key, in place of older ones: of tiles, or of torch."""
        new = {(row.key, row.shape, row.tile == TORCH) for row in rows}
        self.rows = [r for r in self.rows if (r.key, r.shape, r.tile == TORCH) not in new]
        self.rows += rows

    def tiles(self) -> dict[str, str]:
        """The tile for each key."""
        by_key: dict[str, list[Row]] = {}
        for row in self.rows:
            if row.tile != TORCH:
                by_key.setdefault(row.key, []).append(row)
        chosen = {key: fastest(rows) for key, rows in by_key.items()}
        return {key: tile for key, tile in chosen.items() if tile is not None}

    def ratios(self) -> dict[tuple[str, str], float]:
        """Torch's time divided by ours, over all compared shapes, by key and kind."""
        shares: dict[tuple[str, str], list[float]] = {}
        for row in self.rows:
            if row.tile == TORCH and row.seconds is not None:
                shares.setdefault((row.key, row.shape.split()[0]), []).append(row.share)
        return {of: _mean(found) for of, found in shares.items()}

    def write(self, path: Path) -> None:
        """Write the file in one step, each row in a line. Raises OSError."""
        rows = ",\n".join(json.dumps(asdict(row)) for row in self.rows)
        head = {"format": FORMAT, "machine": self.machine._asdict(), "about": self.about}
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            text = f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n{rows}\n]}}\n'
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


def read(path: Path) -> Table:
    """The table in a file, for whatever machine. Raises BadTable, or OSError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (RecursionError, ValueError) as error:
        raise BadTable(f"it is not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else None
        raise BadTable(f"its format is {found!r}; this version reads {FORMAT}")
    try:
        rows = [Row(**row) for row in data["rows"]]
        table = Table(Machine(**data["machine"]), rows, dict(data["about"]))
        table.tiles()
    except (AttributeError, KeyError, StopIteration, TypeError, ValueError) as error:
        raise BadTable(f"it is damaged: {type(error).__name__}: {error}") from None
    if len({(row.key, row.shape, row.tile) for row in rows}) != len(rows):
        raise BadTable("it is damaged: two rows are of one key, shape and tile")
    return table
