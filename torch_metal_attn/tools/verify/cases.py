"""The cases of `verify`, by family."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch_metal_attn.runtime import tensor_tiles
from torch_metal_attn.testing import (
    Cascade,
    Copy,
    IndexScores,
    Merge,
    Rotation,
    Softmax,
    Step,
    Tables,
)
from torch_metal_attn.testing.case import Case
from torch_metal_attn.testing.features import CACHES, FEATURES, HALF_CACHES, attention
from torch_metal_attn.testing.tensors import DTYPES

Fields = dict[str, Any]


@dataclass(frozen=True)
class Listed:
    """A case, the family whose line of the report counts it, and its fields in words."""

    family: str
    case: Case
    words: str = "plain"

    @property
    def dtype(self) -> str:
        return self.case.dtype

    def __str__(self) -> str:
        return f"{self.family}: {self.words}"


def listed(family: str, make: Callable[..., Case], dtype: str, fields: Fields) -> Listed:
    """The case that `make` returns for the dtype and the fields."""
    words = ", ".join(f"{name} {_shown(x)}" for name, x in fields.items())
    return Listed(family, make(dtype=dtype, **fields), words or "plain")


def _shown(x: Any) -> str:
    if not isinstance(x, tuple):
        return str(x)
    nested = any(isinstance(y, tuple) for y in x)
    return (", " if nested else "x").join(map(_shown, x))


def every_dtype(family: str, make: Callable[..., Case], *variants: Fields) -> Iterator[Listed]:
    """One case per variant and dtype."""
    for fields, dtype in itertools.product(variants, DTYPES):
        yield listed(family, make, dtype, fields)


_FWD = partial(attention, call="flash_fwd")
_BWD = partial(attention, call="flash_fwd", backward=True)
_DECODE = partial(attention, call="flash_decode")
_VARLEN = partial(attention, call="flash_varlen_fwd")
_MERGE = partial(Merge, batch=2, heads=3, length=9, head_dim=64, empty=0.3)
_ROPE = partial(Rotation, batch=2, heads=4, kv_heads=2, length=9, head_dim=64)
_SOFTMAX = partial(Softmax, shape=(3, 5, 65))
_CACHE: Fields = {
    "kv_heads": 2,
    "head_dim": 64,
    "v_head_dim": 64,
    "lengths": (3, 17),
    "strict": True,
}
_APPEND = partial(Step, call="append_kv", heads=2, length=5, **_CACHE)
_STEP = partial(Step, call="decode_step", heads=8, causal=True, num_splits=1, **_CACHE)
_SHARED = partial(Cascade, kv_heads=2, head_dim=64, v_head_dim=64, causal=True, strict=True)
_INDEX = partial(IndexScores, heads=17, q_length=5, kv_length=65, head_dim=128, causal=True)
_COPY = partial(Copy, copies=((0, 5), (4, 1), (6, 2)))

# `verify` without --full.
QUICK: tuple[Listed, ...] = (
    *every_dtype(
        "flash_fwd",
        _FWD,
        {"kv_heads": 4, "q_length": 64, "kv_length": 64},
        {"q_length": 65, "kv_length": 65, "feature": "causal"},
        {"head_dim": 32, "kv_length": 97, "feature": "causal"},
        {"q_length": 1, "kv_length": 129, "head_dim": 128},
        {"head_dim": 256, "feature": "causal, top left"},
        {"q_length": 16, "kv_length": 7, "head_dim": 80, "feature": "rows without keys"},
        {"head_dim": 40, "feature": "window"},
        {"head_dim": 20, "feature": "all scores"},
        {"feature": "mask"},
        {"feature": "rotary"},
    ),
    *every_dtype("flash_bwd", _BWD, {"feature": "causal"}),
    *every_dtype(
        "flash_decode",
        _DECODE,
        {"q_length": 1, "kv_length": 300, "num_splits": 3},
        {"heads": 8, "kv_heads": 1, "q_length": 2, "num_splits": 1},
    ),
)

_HEAD_DIMS = (1, 7, 65, 96, 128, 256)
_MLA = {"head_dim": 576, "v_head_dim": 512, "kv_heads": 1}
_LATENT: Fields = {**_MLA, "values_in_keys": True}
_ROTARY: Fields = {"rotary_columns": 64}
_LATENT_STEP: Fields = {**_LATENT, **_ROTARY, "heads": 16, "rotary_last": True}
# Lengths 0 and 1, and others that no tile divides.
_LENGTHS = ((1, 1), (1, 257), (7, 31), (31, 7), (65, 1023), (0, 9), (9, 0))
_PACKED = {"packed": ((5, 70), (0, 9), (33, 33)), "causal": True}


def _features(names: tuple[str, ...] = tuple(FEATURES), **more: Any) -> list[Fields]:
    return [more | {"feature": name} for name in names]


def _sizes() -> tuple[list[Fields], list[Fields]]:
    head_dims: list[Fields] = [{"head_dim": d, "feature": "causal"} for d in _HEAD_DIMS]
    head_dims.append({"head_dim": 64, "v_head_dim": 40})
    return head_dims, [{"q_length": q, "kv_length": k} for q, k in _LENGTHS]


def _forwards() -> Iterator[Listed]:
    head_dims, lengths = _sizes()
    yield from every_dtype("flash_fwd: features", _FWD, *_features())
    yield from every_dtype("flash_fwd: head dims", _FWD, *head_dims, _MLA)
    yield from every_dtype("flash_fwd: lengths", _FWD, *lengths)
    yield from every_dtype(
        "flash_fwd: layouts and caches",
        _FWD,
        {"layout": "by token"},
        {"layout": "cut out of NaN"},
        {"layout": "cut out of NaN", "head_dim": 65},
        *({"cache": cache} for cache in CACHES),
    )
    for cache in HALF_CACHES:
        decode = {"cache": cache, "q_length": 1, "num_splits": 2}
        yield listed("flash_fwd: layouts and caches", _FWD, "float32", {"cache": cache})
        yield listed("flash_decode: caches", _DECODE, "float32", decode)
    # Keys and values past the lengths are NaN.
    unseen: Fields = {"feature": "lengths", "kv_length": 130}
    yield from every_dtype("NaN, seen and unseen", _FWD, {"poison": "nan in k"}, unseen)
    split: list[Fields] = [{"poison": "nan in k", "num_splits": 2}, unseen | {"num_splits": 2}]
    yield from every_dtype("NaN, seen and unseen: flash_decode", _DECODE, *split)
    window = {"packed": ((1, 1), (64, 3), (7, 0)), "window_size_left": 20, "head_dim": 128}
    yield from every_dtype("flash_varlen_fwd", _VARLEN, _PACKED, window)


def _other_tiles() -> Iterator[Listed]:
    """On GPUs with tensor tiles, the features again on the tiles that other cases do not use."""
    if not tensor_tiles.problem():
        for name, make in (("flash_fwd", _FWD), ("flash_bwd", _BWD)):
            for fields, dtype in itertools.product(_features(), DTYPES):
                tiles = "TF32" if dtype == "float32" else "8x8"
                family = f"{name} in TF32" if dtype == "float32" else f"{name} on 8x8 tiles"
                yield listed(family, partial(make, tiles=tiles), dtype, fields)


def _decodes() -> Iterator[Listed]:
    make = partial(_DECODE, q_length=1, kv_length=257)
    yield from every_dtype(
        "flash_decode: splits and heads",
        partial(_DECODE, kv_length=257),
        *({"q_length": 1, "num_splits": n} for n in (0, 1, 3, 64)),
        *(
            {"q_length": 1, "heads": h, "kv_heads": kv, "num_splits": 1}
            for h, kv in ((8, 8), (32, 1))
        ),
        {"q_length": 5, "feature": "causal", "num_splits": 2},
        {"q_length": 1, **_LATENT, "num_splits": 2},
        *({"q_length": 1, "head_dim": d, "num_splits": 2} for d in (7, 96, 128, 256)),
    )
    # A decode's keys are already rotated, and it has no dropout.
    names = tuple(n for n in FEATURES if "rotary" not in n and n not in ("plain", "dropout"))
    several = partial(_DECODE, q_length=3, kv_length=257, num_splits=2)
    yield from every_dtype("flash_decode: features", several, *_features(names))
    caches = ({"cache": cache, "num_splits": 2} for cache in CACHES)
    yield from every_dtype("flash_decode: caches", make, *caches)
    yield from every_dtype(
        "flash_decode: lists of keys",
        partial(several, listed=70, heads=8, kv_heads=2, list_dims="bh", batch=2),
        {},
        {"feature": "causal"},
        {"kv_block_size": 16, "q_block_size": 2, "listed": 9},
        _LATENT,
        *({"cache": cache} for cache in CACHES),
    )
    yield from every_dtype(
        "flash_decode: trees of new tokens",
        partial(several, tree="parents", tree_by_sequence=True, batch=2, q_length=9, heads=4),
        {},
        {"tree": "tree_mask"},
        {"tree": "tree_mask", "tree_by_sequence": False, "q_length": 64},
        {"window_size_left": 4},
        _LATENT,
        *({"cache": cache} for cache in CACHES),
    )
    yield from every_dtype(
        "flash_decode: packed queries",
        partial(several, q_lengths=(1, 0, 16, 70), spare_rows=2, heads=4, feature="causal"),
        {},
        {"feature": "lengths", "num_splits": 1},
        {"listed": 70, "list_dims": "h", "kv_heads": 2},
        {"tree": "parents", "q_lengths": (9, 0, 64)},
        {"tree": "tree_mask", "q_lengths": (9, 0, 64), "window_size_left": 4},
        _LATENT,
        *({"cache": cache} for cache in CACHES),
    )
    levels: Fields = {"shared": 6, "branched": 3, "own": (1, 9, 20, 5, 0)}
    yield from every_dtype(
        "flash_decode: shared pages",
        partial(_SHARED, heads=8, **levels),
        {},
        {"q_length": 9, "page": 5, "learnable_sink": "float32"},
        {"window_size_left": 30, "causal": False},
        {"format": "q8_0", "num_splits": 2},
        {"format": "q3_g32", "v_format": "q2_g64", "hadamard": 64},
        _LATENT | {"format": "q4_g64"},
    )
    # MLA's absorbed form.
    latents = partial(several, heads=16, feature="causal", **_LATENT)
    names = ("", "paged", "indexed", "q8_0", "paged q4_0", "paged fp8_e4m3", "paged q3_g64")
    yield from every_dtype("flash_decode: latents", latents, *({"cache": c} for c in names))
    yield from every_dtype(
        "index_scores",
        _INDEX,
        {},
        {"heads": 64, "q_length": 1},
        {"q_offset": 70, "head_dim": 65},
        {"causal": False, "softmax_scale": 0.3, "q_layout": ("order 021",)},
        {"weight_dtype": "bfloat16", "batch": 2},
    )


def _backwards() -> Iterator[Listed]:
    head_dims, lengths = _sizes()
    yield from every_dtype("flash_bwd: features", _BWD, *_features())
    yield from every_dtype("flash_bwd: head dims", _BWD, *head_dims)
    yield from every_dtype(
        "flash_bwd: lengths and layouts",
        _BWD,
        *lengths,
        {"through_lse": True, "feature": "rows without keys"},
        {"layout": "cut out of NaN"},
    )
    yield from every_dtype(
        "flash_bwd: lists of keys",
        partial(_DECODE, backward=True, q_length=9, kv_length=130, list_dims="bh", batch=2),
        {"listed": 40, "heads": 8, "kv_heads": 2},
        {"listed": 5, "kv_block_size": 16, "q_block_size": 4, "feature": "causal"},
        {"listed": 40, "feature": "lengths", "through_lse": True},
    )
    yield from every_dtype("flash_varlen_bwd", partial(_VARLEN, backward=True), _PACKED)


def _caches() -> Iterator[Listed]:
    formats = ("", "q8_0", "q4_0", "fp8_e4m3", "q3_g32")
    caches: list[Fields] = [{"format": f, "cache": c} for f in formats for c in ("", "paged")]
    caches.append({"format": "q4_g32", "v_format": "q2_g64", "cache": "paged"})
    caches.append({"format": "q4_0", "hadamard": 64, **_ROTARY})
    caches += [_ROTARY, _ROTARY | {"cache": "paged"}]
    yield from every_dtype("append_kv", _APPEND, *caches)
    yield from every_dtype(
        "decode_step",
        _STEP,
        *caches,
        _ROTARY | {"format": "q8_0", "num_splits": 3},
        {"length": 4, "q_length": 4, "num_splits": 2},
    )
    tree: Fields = {"tree": "parents", "length": 9, "q_length": 9}
    packed: Fields = {"packed": ((2, 5), (3, 3))}
    packed_tree: Fields = {"packed": ((5, 5), (9, 9)), "tree": "parents"}
    yield from every_dtype(
        "decode_step: trees",
        _STEP,
        *(tree | _ROTARY, tree, tree | {"tree": "tree_mask"}),
        *(packed_tree | fields for fields in caches),
    )
    recent: Fields = {"recent": 8, "format": "q4_0", "lengths": (3, 90), "capacity": 160}
    yield from every_dtype(
        "decode_step: recent rows",
        _STEP,
        recent,
        recent | {"hadamard": 64, "cache": "paged"} | _ROTARY,
        recent | {"format": "q3_g32", "cache": "paged"} | tree,
        recent | _LATENT_STEP | {"cache": "paged", "format": "q8_0"},
    )
    yield from every_dtype("decode_step: packed rows", _STEP, packed, packed | _ROTARY)
    latents = [{}, *({"cache": "paged", "format": f} for f in ("", "q8_0", "q4_0", "q4_g64"))]
    for name, make in (("append_kv", _APPEND), ("decode_step", _STEP)):
        yield from every_dtype(f"{name}: latents", partial(make, **_LATENT_STEP), *latents)
    for dtype in (*DTYPES, "int8", "uint8"):
        yield listed("copy_pages", _COPY, dtype, {"shape": (7, 2, 16, 64)})
    yield listed("copy_pages", _COPY, "float16", {"shape": (7, 3, 5, 7)})


def _elementwise() -> Iterator[Listed]:
    by_token = {"call": "rope_", "columns": 64, "layout": ("order 021",)}
    yield from every_dtype(
        "rope",
        _ROPE,
        {"columns": 64},
        {"columns": 64, "interleaved": True},
        {"columns": 14, "place": "offset"},
        {"columns": 64, "place": "positions of each", "conjugate": True},
        {"columns": 64, "head_dim": 65, "layout": ("padded 3",)},
        by_token,
    )
    yield from every_dtype("rope_tables", Tables, {}, {"head_dim": 14})
    yield from every_dtype(
        "softmax",
        _SOFTMAX,
        {},
        {"dim": 1, "hidden": 0.5},
        {"shape": (3, 4099), "hidden": 0.5},
        {"call": "softmax_"},
        {"shape": (0, 5)},
    )
    masked = partial(Softmax, call="apply_causal_mask_", shape=(2, 3, 33, 65))
    yield from every_dtype("apply_causal_mask_", masked, {}, {"q_offset": -7})
    yield from every_dtype(
        "merge",
        _MERGE,
        {},
        {"head_dim": 7},
        *({"call": "merge_state_", "masked": masked} for masked in (False, True)),
        {"call": "merge_splits", "splits": 40},
        {"call": "merge_splits", "splits": 3, "sink": "float32"},
    )


def _repeats() -> Iterator[Listed]:
    sizes = {"q_length": 70, "kv_length": 130}
    for family, threads in (("two runs, the same bits", 1), ("threads", 4)):
        again = partial(_BWD, threads=threads, **sizes)
        decode = partial(_DECODE, threads=threads, q_length=3, kv_length=130, num_splits=3)
        variants = _features(("causal",) if threads > 1 else ("causal", "all scores"))
        variants += [{"feature": "dropout", "head_dim": 96}] if threads == 1 else []
        yield from every_dtype(family, again, *variants)
        yield from every_dtype(f"{family}: flash_decode", decode, {})
    far = partial(_FWD, batch=1, heads=2, q_length=9, kv_length=40, k_layout=("far 1",))
    yield listed("offsets beyond 2**31", far, "float16", {})


def full() -> tuple[Listed, ...]:
    """All cases of `verify --full`, by family."""
    parts = (_forwards, _other_tiles, _decodes, _backwards, _caches, _elementwise, _repeats)
    return tuple(case for part in parts for case in part())
