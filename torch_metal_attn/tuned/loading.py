"""Which table of tiles is used: the user's own, the package's, or none."""

import os
import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from torch_metal_attn.runtime import machine as machines
from torch_metal_attn.runtime import macos, mps
from torch_metal_attn.runtime.version import VERSION
from torch_metal_attn.simulator import cache
from torch_metal_attn.tuned import tables, tiles
from torch_metal_attn.tuned.tables import BadTable, Machine
from torch_metal_attn.wording import count_text

SETTING = "TORCH_METAL_ATTN_TUNED"
OFF = "off"
FOLDER = Path(__file__).parent  # tables of the package

RECKONED = "default"
OWN = "tuned on this machine"


@dataclass(frozen=True)
class Loaded:
    """The tables that are used.

    Attributes: tiles, sources: by key. ratios: torch's time divided by ours, by key and kind of
        shape. words: where they come from. ignored: a line for each table that is not used, with
        the reason.
    """

    tiles: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    ratios: dict[tuple[str, str], float] = field(default_factory=dict)
    words: str = RECKONED
    ignored: tuple[str, ...] = ()


_loaded = Loaded()


def loaded() -> Loaded:
    """What is used now."""
    return _loaded


def this_machine() -> Machine:
    """What a table must be for to be used here. Without a GPU it is for the simulator."""
    name, cores = "the simulator", ""
    if mps.available():
        if hasattr(torch.backends.mps, "get_name"):
            name = torch.backends.mps.get_name()
        else:
            name = machines.describe(torch.device("mps"))["chip"]
        if hasattr(torch.backends.mps, "get_core_count"):
            cores = str(torch.backends.mps.get_core_count())
    mac = macos.version()
    # The last numbers change monthly, and the Metal compiler hardly ever with them.
    system = f"macOS {_minor(mac)}" if mac else machines.system()
    with_torch = f"torch {_minor(torch.__version__)}"
    return Machine(
        name, f"{cores or 'unknown'} cores", system, with_torch, f"torch_metal_attn {VERSION}"
    )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def path_of(machine: Machine) -> Path:
    """The user's table for a GPU. Raises CacheError for a user without a home."""
    return cache.cache_dir() / "tuned" / file_name(machine)


def file_name(machine: Machine) -> str:
    """The name of a table for a GPU."""
    words = f"{machine.gpu} {machine.cores}".lower()
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-") + ".json"


def load(machine: Machine) -> Loaded:
    """Read the tables by their precedence.

    TORCH_METAL_ATTN_TUNED=off: none. TORCH_METAL_ATTN_TUNED=FILE: that one. Otherwise the user's
    own, and for keys that it lacks the package's for this GPU.
    """
    setting = os.environ.get(SETTING, "")
    if setting == OFF:
        return Loaded(words=f"{RECKONED} ({SETTING}={OFF})")
    packaged = f"table for {machine.gpu}"
    if setting:
        places = [(Path(setting), f"table of {SETTING}")]
    else:
        places = [(FOLDER / file_name(machine), packaged)]
        try:
            places.insert(0, (path_of(machine), OWN))
        except cache.CacheError:  # a user without a home has no table
            pass
    found = Loaded()
    words, ignored = [], []
    for path, source in places:
        try:
            table = tables.read(path)
            if why := table.machine.differs(machine):
                if source == packaged:  # of which the user need not hear at each start
                    words.append(f"no {source}: {why}")
                    continue
                raise BadTable(why)
        except (BadTable, OSError) as error:
            if setting or not isinstance(error, FileNotFoundError):
                ignored.append(f"torch_metal_attn: the table of tiles {path} is ignored: {error}")
            continue
        new = {key: tile for key, tile in table.tiles().items() if key not in found.tiles}
        found.tiles.update(new)
        found.sources.update(dict.fromkeys(new, source))
        found.ratios.update({of: one for of, one in table.ratios().items() if of[0] in new})
        words += [f"{source} ({count_text(len(new), 'tile')})"] if new else []
    words = words if found.tiles else [RECKONED, *words]
    return replace(found, words=", ".join(words), ignored=tuple(ignored))


def install() -> Loaded:
    """Read the tables, give them to the extension, and print a line for each that is ignored."""
    global _loaded
    _loaded = load(this_machine())
    tiles.use(tiles.make((k, tile, _loaded.sources[k]) for k, tile in _loaded.tiles.items()))
    for line in _loaded.ignored:
        print(line, file=sys.stderr)
    return _loaded


def install_on_import() -> None:
    """`install` where there is a GPU, or a table was asked for: it reads files."""
    if mps.available() or os.environ.get(SETTING, OFF) != OFF:
        install()
