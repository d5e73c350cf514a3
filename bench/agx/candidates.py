"""The classes of problems with a row in the table of tiles, and the candidate tiles of each."""

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

# {bits of an element: dtypes}. A row is for all dtypes of one size.
DTYPES = {16: (torch.float16, torch.bfloat16), 32: (torch.float32,)}
# The widest problem of each class is compiled, but v has at most 512 columns. Wider decodes are
# compiled as MLA: separate values needed no more registers.
COLUMNS = (64, 96, 128, 192, 256, 576)
MOST_COLUMNS = 512
QUERIES = (2, 8, 16, 32)
GRADIENT_BLOCKS = (8, 16, 32)
# A class is compiled without and with each feature of a list. The first needs most registers.
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
KERNELS = ("flash_fwd", "flash_bwd_dq", "flash_bwd_dkv", "flash_bwd_bias", "flash_decode")
NAMES = {name.upper(): name for name in KERNELS}
KNOBS = Path(__file__).parents[2] / "csrc" / "tiles" / "knobs.h"

Tile = tuple[int, ...]


@cache
def knobs(macro: str) -> dict[str, Sequence[int]]:
    """The values of each knob of a kernel, by name, from csrc/tiles/knobs.h."""
    name = re.sub("(_DQ|_DKV|_BIAS)?(_TENSOR)?$", "", macro) + "_KNOBS"
    definition = re.search(rf"#define {name}\(X\)((?:.*\\\n)*.*)", KNOBS.read_text())
    assert definition is not None
    entries = re.findall(r"X\((\w+), \w+, (\d+), (\d+), (\d+)\)", definition[1])
    limits = {name: (int(low), int(high) + 1, int(step)) for name, low, high, step in entries}
    powers = [1 << n for n in range(8)]
    return {
        name: range(low, end, step) if step else [n for n in powers if low <= n < end]
        for name, (low, end, step) in limits.items()
    }


class Class(NamedTuple):
    """Problems that share a row. ragged: SIMD groups cannot divide the head dim evenly."""

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
    """The classes of a kernel, in the order of their rows."""
    for bits in DTYPES:
        if macro == "FLASH_DECODE":
            widths = sorted({*COLUMNS, MOST_COLUMNS})
            for queries, load, columns in product(QUERIES, ("Light", "Rotary"), widths):
                yield Class(macro, bits, columns, queries, load, ragged=False)
        elif macro == "FLASH_BWD_BIAS":
            for columns in COLUMNS:
                yield Class(macro, bits, columns, 0, "Rotary", ragged=False)
        else:
            # A ragged class comes after the regular class of its load, because its tile is slower.
            for columns, load, ragged in product(COLUMNS, LOADS, (False, True)):
                if not ragged or (columns > 64 and load != "Light"):
                    yield Class(macro, bits, columns, 0, load, ragged)


def candidates(problems: Class) -> Iterator[Tile]:
    """Tiles of different kinds; some of them cannot run."""
    shares = (1,) if problems.ragged or problems.columns <= 64 else (1, 2)
    columns, wide = problems.columns, problems.columns > 256
    allowed = knobs(problems.macro)
    if problems.macro == "FLASH_FWD":
        slices: tuple[int, ...] = (256, 128) if columns > 128 and problems.ragged else (256,)
        in_registers = (1, 0) if columns > 128 else (1,)
        # With blocks of 16, a float32 row of 179,592 keys had 2.5 times torch's error.
        blocks = (32,) if problems.bits == 32 and problems.columns <= 64 else allowed["BLOCK_K"]
        for tile in product(slices, blocks, (4, 8), shares, in_registers):
            yield *tile, 1
    elif problems.macro == "FLASH_DECODE":
        spans, fragments = -(-problems.head_dim // 32), -(-problems.queries // 8)
        # More than two fragments may need too many registers. Narrow rows in 16 bits still have
        # them, so that a threadgroup reads a shared prefix once for up to 6 times as many rows.
        fewer = fragments > 2 and (problems.bits == 32 or problems.columns > 192)
        rows = (fragments, 2) if fewer else (fragments,)
        # Four spans are a whole row of up to 128 columns. Then SIMD groups have different keys.
        whole = [4] if spans <= 4 else []
        parts = {-(-spans // n): n for n in (8, 4, 3, 2, 1) if n < spans}
        spans_of_a_group = [*parts.values(), *whole]
        for row_fragments, keys, share, vectors in product(
            rows, (1, 2, 4), spans_of_a_group, (0, 2)
        ):
            if not vectors or (problems.queries <= vectors and share in whole):
                yield row_fragments, keys, share, vectors
    elif problems.macro == "FLASH_BWD_BIAS":
        for row_fragments, block, rows_held in product((1, 2), GRADIENT_BLOCKS, (1, 0)):
            yield 576, block, row_fragments, 4, 1, rows_held, 0
    else:
        dkv = problems.macro == "FLASH_BWD_DKV"
        slices = (1, 2, 4) if problems.columns > 128 else (1, 2)
        slices = (2, 4, 9) if wide else (1,) if problems.columns <= 64 else slices
        cuts = [576 if n == 1 else 8 * -(-problems.columns // (8 * n)) for n in slices]
        groups = [(1, simdgroups, shared) for simdgroups in (4, 8) for shared in shares]
        if dkv and not problems.ragged:
            groups += [(2, 4, 2), (2, 4, 4), (4, 4, 4), (2, 8, 4), (1, 4, 4)]
        places = ((1, 0), (0, 1), (0, 0))
        for cut, block, group, place in product(cuts, GRADIENT_BLOCKS, groups, places):
            # Four SIMD groups that share rows need four parts of the scores.
            if group[2] < 4 or group[0] * block >= 32:
                yield cut, block, *group, *place


def specialisation(problems: Class, dtype: torch.dtype, feature: str, tile: Tile) -> Source | None:
    """The tile's specialisation for the class's problem with a feature; None if it cannot run."""
    knob_values, kernel = problems.named(tile), NAMES[problems.macro]
    if problems.macro == "FLASH_BWD_BIAS":
        return _bias_gradient(problems, dtype, feature, knob_values)
    options = specialisations.ALL_FEATURES[feature]
    if problems.macro == "FLASH_FWD":
        slices = -(-problems.head_dim // knob_values["V_SLICE"])
        knob_values["V_SLICE"] = 8 * -(-problems.head_dim // (8 * slices))
    text = " ".join(f"{name}={n}" for name, n in knob_values.items())
    with tiles.forced({kernel: text}):
        if problems.macro == "FLASH_DECODE":
            heads = specialisations.HEADS // problems.queries
            compiled = [specialisations.decoding(dtype, problems.head_dim, heads, feature, options)]
        else:
            compiled = [*specialisations.attention(dtype, problems.head_dim, feature, options)]
    forced = (x for x in compiled if x.kernel == kernel and x.choice == tiles.FORCED)
    return next((Source(source_of(kernel, x.defines), kernel, x.threads) for x in forced), None)


def _bias_gradient(
    problems: Class, dtype: torch.dtype, feature: str, knob_values: Mapping[str, int]
) -> Source | None:
    """The specialisation of a bias's gradient, whose tile a table of `tune` cannot force."""
    sizes = (specialisations.LENGTH, problems.head_dim)
    q = torch.empty(1, specialisations.HEADS, *sizes, dtype=dtype)
    lse = torch.empty(q.shape[:-1])
    options: dict[str, object] = {}
    for name in feature.split(" and ", maxsplit=1):
        options |= specialisations.ALL_FEATURES[name](*sizes, dtype)
    op = torch.ops.metal_attn_explain.flash_bwd_bias
    arguments = {"q": q, "k": q, "v": q, "softmax_lse": lse, "delta": lse, "normalisers": lse}
    try:
        explained = extension.launches(op(q, **arguments, **options))[-1]
    except ValueError:
        return None  # no tile fits in threadgroup memory
    defines = {name: n for name, n in knob_values.items() if name in explained["defines"]}
    defines["BLOCK_K"] = knob_values["BLOCK"]
    text = source_of("flash_bwd_bias", explained["defines"] | defines)
    return Source(text, "flash_bwd_bias", 32 * knob_values["SIMDGROUPS"])
