"""The classes of problems that have a row in the table of tiles, and the tiles that are tried."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

from bench import specialisations
from bench.front_end import Source, source_of
from torch_metal_attn.runtime import extension
from torch_metal_attn.tuned import tiles

# A row is for all dtypes of a number of bits.
DTYPES = {16: (torch.float16, torch.bfloat16), 32: (torch.float32,)}
# The widest problem of each class is compiled, but no v has more than 512 columns. Decodes of more
# are compiled as those of latents: with values of their own they needed no more registers.
COLUMNS = (64, 96, 128, 192, 256, 576)
MOST_COLUMNS = 512
QUERIES = (2, 8, 16, 32)
BLOCKS = (8, 16, 32)  # of a gradient
HEADS = 32  # of bench.specialisations
# Features that a class is compiled with: none, the one with the most registers, and others.
LIGHT = ("chunk", "ALiBi")
LIGHT_DECODE = ("packed queries", "trees", *LIGHT)
HEAVY = {
    "FLASH_FWD": ("dropout", "pages of 16", "bias"),
    "FLASH_BWD_DQ": ("dropout", "bias"),
    "FLASH_BWD_DKV": ("dropout", "bias"),
    "FLASH_DECODE": (
        *("packed queries in pages", "trees in pages", "lists of keys in pages", "bias"),
        "rotated q8_0 cache",
    ),
}
ROTARY = ("none", "rotary of q and k")
LOADS = ("Light", "Heavy", "Rotary")
BIAS = ("bias", "bias and dropout", "bias and rotary of q and k")
NAMES = {
    "FLASH_FWD": "flash_fwd",
    "FLASH_BWD_DQ": "flash_bwd_dq",
    "FLASH_BWD_DKV": "flash_bwd_dkv",
    "FLASH_BWD_BIAS": "flash_bwd_bias",
    "FLASH_DECODE": "flash_decode",
}
LISTS = Path(__file__).parents[2] / "csrc" / "tiles" / "knobs.h"

Tile = tuple[int, ...]


@cache
def knobs(macro: str) -> dict[str, Sequence[int]]:
    """The values of each knob of a kernel, by name, from csrc/tiles/knobs.h."""
    name = re.sub("(_DQ|_DKV|_BIAS)?(_TENSOR)?$", "", macro) + "_KNOBS"
    of_kernel = re.search(rf"#define {name}\(X\)((?:.*\\\n)*.*)", LISTS.read_text())
    assert of_kernel is not None
    every = re.findall(r"X\((\w+), \w+, (\d+), (\d+), (\d+)\)", of_kernel[1])
    limits = {name: (int(low), int(high) + 1, int(step)) for name, low, high, step in every}
    powers = [1 << n for n in range(8)]
    return {
        name: range(low, end, step) if step else [n for n in powers if low <= n < end]
        for name, (low, end, step) in limits.items()
    }


class Class(NamedTuple):
    """Problems that have one row. ragged: with head dims that SIMD groups cannot divide."""

    macro: str
    bits: int
    columns: int
    queries: int
    load: str
    ragged: bool

    @property
    def head_dim(self) -> int:
        if self.macro == "FLASH_DECODE":
            return self.columns
        return min(self.columns, MOST_COLUMNS) - (8 if self.ragged else 0)

    @property
    def features(self) -> tuple[str, ...]:
        if self.macro == "FLASH_BWD_BIAS":
            return BIAS
        decode = self.macro == "FLASH_DECODE"
        if self.load == "Light":
            return ("none", *(LIGHT_DECODE if decode else LIGHT))
        # A decode rotates its queries once.
        return ("none", *HEAVY[self.macro]) if self.load == "Heavy" or decode else ROTARY

    def named(self, tile: Tile) -> dict[str, int]:
        return dict(zip(knobs(self.macro), tile, strict=True))


def classes(macro: str) -> Iterator[Class]:
    """Those of a kernel, in the order of their rows."""
    for bits in DTYPES:
        if macro == "FLASH_DECODE":
            widths = sorted({*COLUMNS, MOST_COLUMNS})
            for queries, load, columns in product(QUERIES, ("Light", "Rotary"), widths):
                yield Class(macro, bits, columns, queries, load, ragged=False)
        elif macro == "FLASH_BWD_BIAS":
            for columns in COLUMNS:
                yield Class(macro, bits, columns, 0, "Rotary", ragged=False)
        else:
            # Ragged ones behind the others of their load: a row for more takes longer.
            for columns, load, ragged in product(COLUMNS, LOADS, (False, True)):
                if not ragged or (columns > 64 and load != "Light"):
                    yield Class(macro, bits, columns, 0, load, ragged)


def candidates(one: Class) -> Iterator[Tile]:
    """Tiles that differ in kind; some of them cannot run."""
    shares = (1,) if one.ragged or one.columns <= 64 else (1, 2)
    wide = one.columns > 256
    allowed = knobs(one.macro)
    if one.macro == "FLASH_FWD":
        slices: tuple[int, ...] = (256, 128) if one.columns > 128 and one.ragged else (256,)
        held = (1, 0) if one.columns > 128 else (1,)
        # With 16 keys a float32 row of 179,592 keys had 2.5 times the error of torch's.
        blocks = (32,) if one.bits == 32 and one.columns <= 64 else allowed["BLOCK_K"]
        for cut, block, simdgroups, shared, q in product(slices, blocks, (4, 8), shares, held):
            yield cut, block, simdgroups, shared, q, 1
    elif one.macro == "FLASH_DECODE":
        spans, fragments = -(-one.head_dim // 32), -(-one.queries // 8)
        # For more than 16 queries registers may be too few. Narrow rows in 16 bits are kept even
        # so: a threadgroup has up to 6 times as many, which then read a shared prefix together.
        fewer = fragments > 2 and (one.bits == 32 or one.columns > 192)
        rows = (fragments, 2) if fewer else (fragments,)
        # Four spans are a whole row of up to 128 columns. The SIMD groups then have other keys.
        whole = [4] if spans <= 4 else []
        parts = {-(-spans // n): n for n in (8, 4, 3, 2, 1) if n < spans}
        spans_of_a_group = [*parts.values(), *whole]
        for row_fragments, keys, share, vectors in product(
            rows, (1, 2, 4), spans_of_a_group, (0, 2)
        ):
            if not vectors or (one.queries <= vectors and share in whole):
                yield row_fragments, keys, share, vectors
    elif one.macro == "FLASH_BWD_BIAS":
        for row_fragments, block, in_registers in product((1, 2), BLOCKS, (1, 0)):
            yield 576, block, row_fragments, 4, 1, in_registers, 0
    else:
        dkv = one.macro == "FLASH_BWD_DKV"
        slices = (1, 2, 4) if one.columns > 128 else (1, 2)
        slices = (2, 4, 9) if wide else (1,) if one.columns <= 64 else slices
        cuts = [576 if n == 1 else 8 * -(-one.columns // (8 * n)) for n in slices]
        groups = [(1, simdgroups, shared) for simdgroups in (4, 8) for shared in shares]
        if dkv and not one.ragged:
            groups += [(2, 4, 2), (2, 4, 4), (4, 4, 4), (2, 8, 4), (1, 4, 4)]
        places = ((1, 0), (0, 1), (0, 0))
        for cut, block, group, place in product(cuts, BLOCKS, groups, places):
            # Four SIMD groups that share rows have as many parts of the scores.
            if group[2] < 4 or group[0] * block >= 32:
                yield cut, block, *group, *place


def specialisation(one: Class, dtype: torch.dtype, feature: str, tile: Tile) -> Source | None:
    """The tile's specialisation for the class's problem with a feature; None if it cannot run."""
    knob_values, kernel = one.named(tile), NAMES[one.macro]
    if one.macro == "FLASH_BWD_BIAS":
        return _of_bias(one, dtype, feature, knob_values)
    options = specialisations.ALL_FEATURES[feature]
    if one.macro == "FLASH_FWD":
        slices = -(-one.head_dim // knob_values["V_SLICE"])
        knob_values["V_SLICE"] = 8 * -(-one.head_dim // (8 * slices))
    text = " ".join(f"{name}={n}" for name, n in knob_values.items())
    with tiles.forced({kernel: text}):
        if one.macro == "FLASH_DECODE":
            heads = HEADS // one.queries
            every = [specialisations.decoding(dtype, one.head_dim, heads, feature, options)]
        else:
            every = [*specialisations.attention(dtype, one.head_dim, feature, options)]
    taken = (x for x in every if x.kernel == kernel and x.choice == tiles.FORCED)
    return next((Source(source_of(kernel, x.defines), kernel, x.threads) for x in taken), None)


def _of_bias(
    one: Class, dtype: torch.dtype, feature: str, knob_values: Mapping[str, int]
) -> Source | None:
    """The specialisation of a bias's gradient, whose tiles no table of `tune` has."""
    q = torch.empty(1, HEADS, specialisations.LENGTH, one.head_dim, dtype=dtype)
    lse = torch.empty(q.shape[:-1])
    options: dict[str, object] = {}
    for name in feature.split(" and ", maxsplit=1):
        options |= specialisations.ALL_FEATURES[name](specialisations.LENGTH, one.head_dim, dtype)
    op = torch.ops.metal_attn_explain.flash_bwd_bias
    given_to = {"q": q, "k": q, "v": q, "softmax_lse": lse, "delta": lse, "normalisers": lse}
    try:
        explained = extension.launches(op(q, **given_to, **options))[-1]
    except ValueError:
        return None  # no tile fits in threadgroup memory
    shown = {name: n for name, n in knob_values.items() if name in explained["defines"]}
    shown["BLOCK_K"] = knob_values["BLOCK"]
    text = source_of("flash_bwd_bias", explained["defines"] | shown)
    return Source(text, "flash_bwd_bias", 32 * knob_values["SIMDGROUPS"])
