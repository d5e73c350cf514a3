"""Hands tiles to the extension, whose launches look them up."""

import ctypes
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch_metal_attn.runtime import extension

FORCED = "forced"  # the source of a tile in `forced`
# The table that launches look tiles up in, which the extension made, or None.
_in_use: ctypes.c_void_p | None = None


def make(
    rows: Iterable[tuple[str, str, str]], library: ctypes.CDLL | None = None
) -> ctypes.c_void_p | None:
    """A table for `use`, or None. A kernel's name alone is the key of all its launches."""
    library = library or extension.load()
    text = "\n".join("\t".join(row) for row in rows)
    if not text:
        return None
    library.metal_attn_make_tiles.restype = ctypes.c_void_p
    address = library.metal_attn_make_tiles(text.encode())
    if address is None:
        raise ValueError(f"these are no rows of key, tile and source: {text!r}")
    return ctypes.c_void_p(address)


def use(table: ctypes.c_void_p | None, library: ctypes.CDLL | None = None) -> None:
    """Let every launch that begins from now on, in all threads, look its tile up in `table`."""
    global _in_use
    (library or extension.load()).metal_attn_use_tiles(table)
    _in_use = table


@contextmanager
def forced(tiles: Mapping[str, str]) -> Iterator[None]:
    """A context in which these kernels, by name, have these tiles, and all others the default."""
    before = _in_use
    use(make((kernel, tile, FORCED) for kernel, tile in tiles.items()))
    try:
        yield
    finally:
        use(before)
