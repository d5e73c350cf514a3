"""Files with tables of measured tiles, and the table that this process uses."""

import json
import math
import os
import re
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from torch_metal_attn.runtime import machine as machines
from torch_metal_attn.runtime import macos, mps
from torch_metal_attn.runtime.version import VERSION
from torch_metal_attn.simulator import cache
from torch_metal_attn.tuned import tiles
from torch_metal_attn.wording import count_text

SETTING = "TORCH_METAL_ATTN_TUNED"
OFF = "off"
DEFAULT, MEASURED = "default", "tuned on this machine"
FORMAT = 5  # version of the file format
LEAST_GAIN = 0.02  # smaller differences of times are noise

_KEY = re.compile(r"\w+( [\w<>=]+)+", re.ASCII)
# At most nine digits, so that each number fits the extension's int32.
_TILE = re.compile(r"[A-Z_]+=\d{1,9}( [A-Z_]+=\d{1,9})*", re.ASCII)


class BadTable(ValueError):
    """A table that cannot be used here; the message says why."""


class Machine(NamedTuple):
    """The machine of a table. Versions of macOS and torch are cut to their first two numbers."""

    gpu: str
    cores: str
    system: str
    torch: str
    package: str


@dataclass(frozen=True)
class Row:
    """The tile for a key. torch: torch's time divided by ours, by kind of shape."""

    tile: str
    torch: dict[str, float] = field(default_factory=dict)


@dataclass
class Table:
    machine: Machine
    rows: dict[str, Row] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Write the file atomically, with one row per line. Raises OSError."""
        rows = ",\n".join(json.dumps({"key": k} | asdict(row)) for k, row in self.rows.items())
        head = json.dumps({"format": FORMAT, "machine": self.machine._asdict()}, indent=1)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            unfinished.write_text(f'{head[:-2]},\n "rows": [\n{rows}\n]}}\n', encoding="utf-8")
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


def read(path: Path, machine: Machine) -> Table:
    """Read a file. Raises OSError, or BadTable if it is damaged or for another machine."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (RecursionError, ValueError) as error:
        raise BadTable(f"it is not JSON: {error}") from None
    version = data.get("format") if isinstance(data, dict) else None
    if version != FORMAT:
        raise BadTable(f"its format is {version!r}; this version reads {FORMAT}")
    try:
        measured = Machine(**data["machine"])
        rows = {row["key"]: Row(row["tile"], dict(row["torch"])) for row in data["rows"]}
        if len(rows) != len(data["rows"]):
            raise ValueError("two rows have the same key")
        for key, row in rows.items():
            if not (_KEY.fullmatch(key) and _TILE.fullmatch(row.tile)):
                raise ValueError(f"a row has the key {key!r} and the tile {row.tile!r}")
            if not all(0 < ratio < math.inf for ratio in row.torch.values()):
                raise ValueError(f"a time of {key!r} is not above 0 and finite")
    except (KeyError, TypeError, ValueError) as error:
        raise BadTable(f"it is damaged: {type(error).__name__}: {error}") from None
    for theirs, here in zip(measured, machine, strict=True):
        if theirs != here:
            raise BadTable(f"it was measured with {theirs}, and this is {here}")
    return Table(machine, rows)


@dataclass(frozen=True)
class Loaded:
    """The table in use. words: describes its source. ignored: why a table is ignored, or ""."""

    rows: dict[str, Row] = field(default_factory=dict)
    source: str = ""
    words: str = DEFAULT
    ignored: str = ""


_loaded = Loaded()


def loaded() -> Loaded:
    return _loaded


def this_machine() -> Machine:
    """The machine that tables must match; without a GPU it is the simulator."""
    name, cores = "the simulator", "unknown"
    if mps.available():
        if hasattr(torch.backends.mps, "get_name"):
            name = torch.backends.mps.get_name()
        else:
            name = machines.describe(torch.device("mps"))["chip"]
        if hasattr(torch.backends.mps, "get_core_count"):
            cores = str(torch.backends.mps.get_core_count())
    mac = macos.version()
    system = f"macOS {_minor(mac)}" if mac else machines.system()
    versions = (f"torch {_minor(torch.__version__)}", f"torch_metal_attn {VERSION}")
    return Machine(name, f"{cores} cores", system, *versions)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def path_of(machine: Machine) -> Path:
    """The path of the user's table for a machine. Raises CacheError without a home directory."""
    name = re.sub(r"[^a-z0-9]+", "-", f"{machine.gpu} {machine.cores}".lower()).strip("-")
    return cache.cache_dir() / "tuned" / f"{name}.json"


def load(machine: Machine) -> Loaded:
    """Read the table that TORCH_METAL_ATTN_TUNED names, or the one in the cache folder."""
    setting = os.environ.get(SETTING, "")
    if setting == OFF:
        return Loaded(words=f"{DEFAULT} ({SETTING}={OFF})")
    source = f"table of {SETTING}" if setting else MEASURED
    try:
        path = Path(setting) if setting else path_of(machine)
    except cache.CacheError:  # without a home directory there is no table
        return Loaded()
    try:
        rows = read(path, machine).rows
    except (BadTable, OSError) as error:
        if not setting and isinstance(error, FileNotFoundError):
            return Loaded()
        return Loaded(ignored=f"torch_metal_attn: the table of tiles {path} is ignored: {error}")
    return Loaded(rows, source, f"{source} ({count_text(len(rows), 'tile')})")


def install() -> None:
    """Read the table and pass it to the extension. Print a line if it is ignored."""
    global _loaded
    _loaded = load(this_machine())
    tiles.use(tiles.make((k, row.tile, _loaded.source) for k, row in _loaded.rows.items()))
    if _loaded.ignored:
        print(_loaded.ignored, file=sys.stderr)


def install_on_import() -> None:
    """Install the table if there is a GPU, or if the user names a table."""
    if mps.available() or os.environ.get(SETTING, OFF) != OFF:
        install()
