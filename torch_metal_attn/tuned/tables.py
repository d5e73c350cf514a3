"""Tables of tiles: a JSON file for each GPU, with the times that its tiles were chosen by."""

import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 3  # of the file

# A tile replaces the default one from this gain on, if it is also so many standard errors.
LEAST_GAIN = 0.02
LEAST_ERRORS = 2

_KEY = re.compile(r"\w+( [\w<>=]+)+", re.ASCII)
# Numbers of nine digits fit an int32, which the extension reads.
_TILE = re.compile(r"[A-Z_]+=\d{1,9}( [A-Z_]+=\d{1,9})*", re.ASCII)


class BadTable(ValueError):
    """A table that cannot be used here; the message says why."""


@dataclass(frozen=True)
class Machine:
    """What a table is for.

    Attributes: gpu: its name. cores: the GPU's, 0 if nobody knows: Macs with GPUs of one name have
        different numbers. system, torch: with their versions' first two numbers. package: this
        package's version.
    """

    gpu: str
    cores: int
    system: str
    torch: str
    package: str

    def differs(self, here: "Machine") -> str:
        """Why a table for this machine is none for the machine `here`; "" if it is one."""
        if self.gpu != here.gpu:
            return f"it was measured on {self.gpu}, and this is {here.gpu}"
        if self.cores != here.cores:
            return f"it was measured on {_cores(self.cores)}, and this GPU has {_cores(here.cores)}"
        for name, measured, own in (
            ("", self.system, here.system),
            ("", self.torch, here.torch),
            ("torch_metal_attn ", self.package, here.package),
        ):
            if measured != own:
                return f"it was measured with {name}{measured}, and this is {own}"
        return ""


def _cores(number: int) -> str:
    return f"{number or 'an unknown number of'} cores"


@dataclass(frozen=True)
class Again:
    """A tile timed a second time, in turn with the default one alone.

    Attributes: share: of the default tile's time, the mean of the rounds. error: its standard
        error.
    """

    share: float
    error: float

    @property
    def faster(self) -> bool:
        """Whether the gain is neither too small nor noise."""
        return self.share <= 1 - LEAST_GAIN and 1 - self.share > LEAST_ERRORS * self.error

    def __str__(self) -> str:
        return f"{self.share:.3f} +- {self.error:.3f}"


@dataclass(frozen=True)
class Timed:
    """The times of one shape.

    Attributes: shape: in words. default: the tile that would run without a table. seconds: a call,
        by tile; only those that ran and were right. left_out: why others were not timed. again: of
        the fastest tiles.
    """

    shape: str
    default: str
    seconds: dict[str, float]
    left_out: dict[str, str] = field(default_factory=dict)
    again: dict[str, Again] = field(default_factory=dict)

    def share(self, tile: str) -> float:
        """The tile's time, divided by the default one's, or by the longest if that has none."""
        if tile in self.again:
            return self.again[tile].share
        return self.seconds[tile] / self.seconds.get(self.default, max(self.seconds.values()))


@dataclass(frozen=True)
class Compared:
    """The time of one shape with the best tiles, and that of torch's attention.

    Attributes: shape: in words. kind: forward, training or decode. ours, torch: seconds.
    """

    shape: str
    kind: str
    ours: float
    torch: float


@dataclass(frozen=True)
class Row:
    """The tile for one key, and what it was chosen by. key: see csrc/tiles/tuned.h."""

    key: str
    tile: str
    timed: tuple[Timed, ...] = ()
    compared: tuple[Compared, ...] = ()

    def ratio(self, kind: str) -> float | None:
        """Torch's time divided by ours, over all shapes of a kind; None if none was compared."""
        found = [one.torch / one.ours for one in self.compared if one.kind == kind]
        return _mean(found) if found else None


def fastest(timed: Sequence[Timed]) -> str:
    """The tile with the shortest times relative to the default one's, over all shapes.

    The default one, the last shape's, unless a tile is faster also where it was timed again.
    """
    default = timed[-1].default
    common = [tile for tile in timed[0].seconds if all(tile in one.seconds for one in timed)]
    shares = {tile: _mean([one.share(tile) for one in timed]) for tile in common}
    order = sorted(shares, key=shares.__getitem__)
    if default not in shares:
        return order[0] if order else default
    for tile in order:
        again = [one.again[tile] for one in timed if tile in one.again]
        error = math.sqrt(sum(one.error**2 for one in again)) / len(timed)
        if again and Again(shares[tile] / shares[default], error).faster:
            return tile
    return default


def _mean(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


@dataclass
class Table:
    """All rows of a machine, by key. about: the machine in words, for people."""

    machine: Machine
    rows: dict[str, Row] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)

    def add(self, key: str, timed: Timed) -> Row:
        """Add the times of a shape, in place of older ones of the same, and choose the tile."""
        old = self.rows.get(key)
        others = [one for one in old.timed if one.shape != timed.shape] if old else []
        every = (*others, timed)
        self.rows[key] = Row(key, fastest(every), every, old.compared if old else ())
        return self.rows[key]

    def compare(self, key: str, compared: Compared) -> None:
        """Add a comparison to a row that is there, in place of an older one of the shape."""
        old = self.rows[key]
        same = (compared.shape, compared.kind)
        others = [one for one in old.compared if (one.shape, one.kind) != same]
        self.rows[key] = Row(key, old.tile, old.timed, (*others, compared))

    def write(self, path: Path) -> None:
        """Write the file in one step. Raises OSError."""
        data = {
            "format": FORMAT,
            **asdict(self.machine),
            "about": self.about,
            "rows": [asdict(row) for row in self.rows.values()],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            unfinished.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
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
        machine = Machine(**{name: data[name] for name in Machine.__dataclass_fields__})
        rows = [_row(row) for row in data["rows"]]
        table = Table(machine, {row.key: row for row in rows}, dict(data.get("about", {})))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadTable(f"it is damaged: {type(error).__name__}: {error}") from None
    if len(table.rows) != len(rows):
        raise BadTable("it is damaged: two rows have one key")
    return table


def _row(data: dict[str, Any]) -> Row:
    key, tile = data["key"], data["tile"]
    if not _KEY.fullmatch(key) or not _TILE.fullmatch(tile):
        raise ValueError(f"a row has the key {key!r} and the tile {tile!r}")
    timed = tuple(_timed(**one) for one in data["timed"])
    compared = tuple(Compared(**one) for one in data["compared"])
    again = [second for one in timed for second in one.again.values()]
    times = [seconds for one in timed for seconds in one.seconds.values()]
    times += [seconds for one in compared for seconds in (one.ours, one.torch)]
    times += [one.share for one in again]
    if not all(0 < seconds < math.inf for seconds in times):
        raise ValueError(f"a time of {key!r} is not above 0 and finite")
    if not all(one.error >= 0 for one in again):
        raise ValueError(f"an error of {key!r} is below 0")
    return Row(key, tile, timed, compared)


def _timed(again: dict[str, dict[str, float]], **times: Any) -> Timed:
    return Timed(**times, again={tile: Again(**one) for tile, one in again.items()})


def counted(number: int, what: str) -> str:
    """1 row, 2 rows."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def check_machine(table: Table, machine: Machine) -> None:
    """Raise BadTable if the table was measured on or with anything else than there is here."""
    why = table.machine.differs(machine)
    if why:
        raise BadTable(why)
