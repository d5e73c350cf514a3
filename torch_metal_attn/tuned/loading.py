"""Which table of tiles is used: the user's own, the package's, or none."""

import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

from torch_metal_attn.runtime import machine as machines
from torch_metal_attn.runtime import macos, mps
from torch_metal_attn.runtime.version import VERSION
from torch_metal_attn.simulator import cache
from torch_metal_attn.tuned import tables, tiles
from torch_metal_attn.tuned.tables import BadTable, Machine, Row

SETTING = "TORCH_METAL_ATTN_TUNED"
OFF = "off"
FOLDER = Path(__file__).parent  # tables of the package

RECKONED = "default"
OWN = "tuned on this machine"


@dataclass(frozen=True)
class Loaded:
    """The rows that are used.

    Attributes: rows, sources: by key. words: where they come from. ignored: a line for each table
        that is not used, with the reason.
    """

    rows: dict[str, Row] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    words: str = RECKONED
    ignored: tuple[str, ...] = ()


_loaded = Loaded()


def loaded() -> Loaded:
    """What is used now."""
    return _loaded


def this_machine() -> Machine:
    """What a table must be for to be used here. Without a GPU it is for the simulator."""
    name, cores = "the simulator", 0
    if mps.available():
        if hasattr(torch.backends.mps, "get_name"):
            name = torch.backends.mps.get_name()
        else:
            name = machines.describe(torch.device("mps"))["chip"]
        if hasattr(torch.backends.mps, "get_core_count"):
            cores = torch.backends.mps.get_core_count()
    mac = macos.version()
    # The last numbers change monthly, and the Metal compiler hardly ever with them.
    system = f"macOS {_minor(mac)}" if mac else machines.system()
    with_torch = f"torch {_minor(torch.__version__)}"
    return Machine(name, cores, system, with_torch, VERSION)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def path_of(machine: Machine) -> Path:
    """The user's table for a GPU. Raises CacheError for a user without a home."""
    return cache.cache_dir() / "tuned" / _file_name(machine)


def _file_name(machine: Machine) -> str:
    words = machine.gpu + (f" {machine.cores} cores" if machine.cores else "")
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-") + ".json"


def load(machine: Machine) -> Loaded:
    """Read the tables by their precedence.

    TORCH_METAL_ATTN_TUNED=off: none. TORCH_METAL_ATTN_TUNED=FILE: that one. Otherwise the user's
    own, and for keys that it lacks the package's for this GPU.
    """
    setting = os.environ.get(SETTING, "")
    if setting == OFF:
        return Loaded(words=f"{RECKONED} ({SETTING}={OFF})")
    if setting:
        found: list[tuple[Path, str, bool]] = [(Path(setting), f"table of {SETTING}", True)]
    else:
        own = [(_own_path(machine), OWN, True)]
        packaged = (FOLDER / _file_name(machine), f"table for {machine.gpu}", False)
        found = [(path, source, users) for path, source, users in [*own, packaged] if path]
    rows: dict[str, Row] = {}
    sources: dict[str, str] = {}
    counts: list[str] = []
    ignored: list[str] = []
    for path, source, users in found:
        try:
            table = tables.read(path)
            why = table.machine.differs(machine)
            if why and users:
                raise BadTable(why)
            if why:  # of which the user need not hear at each start
                counts.append(f"no {source}: {why}")
                continue
        except FileNotFoundError as error:
            if setting:
                ignored.append(_line(path, str(error)))
            continue
        except (BadTable, OSError) as error:
            ignored.append(_line(path, str(error)))
            continue
        new = [key for key in table.rows if key not in rows]
        rows |= {key: table.rows[key] for key in new}
        sources |= dict.fromkeys(new, source)
        counts += [f"{source} ({tables.counted(len(new), 'row')})"] if new else []
    if not rows:
        counts.insert(0, RECKONED)
    return Loaded(rows, sources, ", ".join(counts), tuple(ignored))


def _own_path(machine: Machine) -> Path | None:
    try:
        return path_of(machine)
    except cache.CacheError:  # a user without a home has no table
        return None


def _line(path: Path, why: str) -> str:
    return f"torch_metal_attn: the table of tiles {path} is ignored: {why}"


def install() -> Loaded:
    """Read the tables, give them to the extension, and print a line for each that is ignored."""
    global _loaded
    _loaded = load(this_machine())
    tiles.use(tiles.make((k, r.tile, _loaded.sources[k]) for k, r in _loaded.rows.items()))
    for line in _loaded.ignored:
        print(line, file=sys.stderr)
    return _loaded


def install_on_import() -> None:
    """`install` where there is a GPU, or a table was asked for: it reads files."""
    if mps.available() or os.environ.get(SETTING, OFF) != OFF:
        install()
