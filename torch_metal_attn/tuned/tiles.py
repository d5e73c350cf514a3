"""Passes tables of tiles to the extension, whose launches look up their tiles."""

import ctypes
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch_metal_attn.runtime import extension

FORCED = "forced"  # the source of tiles in `forced`
# The extension's table in which launches look up tiles, or None.
_in_use: ctypes.c_void_p | None = None


def make(
    rows: Iterable[tuple[str, str, str]], library: ctypes.CDLL | None = None
) -> ctypes.c_void_p | None:
    """Make a table for `use` from rows of key, tile and source, or None if there are no rows.

    Raises ValueError if a row has another form.
    """
    library = library or extension.load()
    text = "\n".join("\t".join(row) for row in rows)
    if not text:
        return None
    library.metal_attn_make_tiles.restype = ctypes.c_void_p
    address = library.metal_attn_make_tiles(text.encode())
    if address is None:
        raise ValueError(f"each row must be a key, a tile and a source; got {text!r}")
    return ctypes.c_void_p(address)


def use(table: ctypes.c_void_p | None, library: ctypes.CDLL | None = None) -> None:
    """Let all later launches, in every thread, look up their tiles in `table`."""
    global _in_use
    (library or extension.load()).metal_attn_use_tiles(table)
    _in_use = table


@contextmanager
def forced(tiles: Mapping[str, str]) -> Iterator[None]:
    """A context in which kernels have these tiles, by name, and all others the default tile."""
    before = _in_use
    use(make((kernel, tile, FORCED) for kernel, tile in tiles.items()))
    try:
        yield
    finally:
        use(before)
