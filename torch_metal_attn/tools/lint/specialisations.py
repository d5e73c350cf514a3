"""A few specialisations of each kernel family that together reach every line of its text."""

import re
from collections.abc import Callable, Mapping
from functools import partial

from torch_metal_attn.runtime import shaders

_Defines = dict[str, int | str]


def _on(*names: str) -> _Defines:
    return dict.fromkeys(names, 1)


def _features(first: str, last: str) -> list[str]:
    """Those of shaders/features.h from the first to the last, so that new ones are linted too."""
    # The text has features.h inside.
    names = re.findall(r"^FEATURE\((\w+)\)", shaders.source("flash_fwd"), re.M)
    return names[names.index(first) : names.index(last) + 1]


_ROTARY: _Defines = {
    **_on("Q_ROTARY", "K_ROTARY"),
    "ROTARY_ELEMENT": "float",
    "ROTARY_DIM": 64,
    "ROTARY_INTERLEAVED": 0,
}
# Keys that are rotated before they are written.
_NEW_ROTARY: _Defines = {
    **{name: value for name, value in _ROTARY.items() if name != "K_ROTARY"},
    **_on("LEFTPAD_K", "NEW_K_ROTARY"),
    "VECTOR": 4,
    "HEADS": 8,
}
_VISIBILITY = _on(*(n for n in _features("VARLEN", "MASK") if n != "CACHE_BATCH_IDX"))
_LISTED_MASK = _on("MASK", "MASK_PAIRS", "MASK_BLOCKS")
_EVERYTHING: _Defines = {
    **_VISIBILITY,
    **_on(*_features("SOFTCAP", "DROPOUT")),
    "MASK_PAIRS": 0,
    "BIAS_ELEMENT": "half",
    "SINK_ELEMENT": "bfloat",
    **_ROTARY,
}
# Without what flash_decode does not have.
_DECODED = {n: x for n, x in _EVERYTHING.items() if n not in ("VARLEN", "K_ROTARY", "DROPOUT")}


# With texts as torch_metal_attn/flex writes them, which call everything that they may call.
_FLEX: _Defines = {
    **_on("FLEX", "FLEX_FULL_BLOCKS"),
    "FLEX_CAPTURES(X)": "X(const device int*, capture_0, 4)",
    "FLEX_SCORE": (
        "const int t0 = inputs.capture_0[flex_index(key, params.capture_sizes[0], impossible) * "
        "params.capture_strides[0]]; const int t1 = flex_floor_divide(t0, 7, impossible); "
        "const int64_t t2 = flex_truncating_divide(int64_t(t1), flex_long(score), impossible); "
        "const int t3 = flex_remainder(flex_int(score), 3, impossible); "
        "const int t4 = flex_truncating_remainder(t3, 2, impossible); "
        "const float t5 = flex_max(flex_min(score, float(t2)), flex_sign(score)); "
        "const float t6 = flex_remainder(t5, 2.0f, impossible) + float(t4); "
        "const float t7 = flex_truncating_remainder(t6, 3.0f, impossible); "
        "const float t8 = flex_floor_divide(t7, 0.5f, impossible); "
        "return flex_truncating_divide(t8, 0.25f, impossible);"
    ),
    "FLEX_MASK": "const bool t0 = query >= key; return t0 && batch == head;",
    "FLEX_Q_BLOCK": 128,
    "FLEX_KV_BLOCK": 128,
}
_FLEX_ORDERED = _FLEX | _on("FLEX_ORDER")
_FLEX_GRADIENTS = _FLEX_ORDERED | {"FLEX_SLOPE": "return precise::tanh(score);"}
_FLEX_SHARE = _FLEX | {
    "FLEX_SHARE": "return precise::tanh(score);",
    "FLEX_PLACE": "return flex_index(key, params.capture_sizes[0], impossible);",
}


def _quantised(kv_format: int) -> _Defines:
    return {"KV_FORMAT": kv_format} | _on("K_SCALE", "V_SCALE")


def _strings(*defines: Mapping[str, int | str]) -> dict[str, str]:
    """All of them; of those with one name the last."""
    return {name: str(value) for some in defines for name, value in some.items()}


def _attention(
    own: _Defines, slices: tuple[str, ...], element: str, head_dim: int, *features: _Defines
) -> dict[str, str]:
    """A kernel of attention. slices: its defines that are the head dim unless features differ."""
    dims = dict.fromkeys(("HEAD_DIM_QK", "HEAD_DIM_V", *slices), head_dim)
    return _strings({"ELEMENT": element, "WIDE_LOADS": 1}, dims, own, *features)


_Make = Callable[..., dict[str, str]]
_FWD: _Defines = {"ROW_FRAGMENTS": 2, "SIMDGROUPS": 4, "Q_IN_REGISTERS": 1}
_BWD: _Defines = {"ROW_FRAGMENTS": 1, "SIMDGROUPS": 4, "ROWS_IN_REGISTERS": 1}
_TENSOR: _Defines = {"ROW_FRAGMENTS": 2}
_DECODE: _Defines = {"ROW_FRAGMENTS": 1, "KEY_FRAGMENTS": 2, "KEY_SIMDGROUPS": 4}
_flash_fwd: _Make = partial(_attention, _FWD | {"BLOCK_K": 16}, ("V_SLICE",))
_flash_fwd_tensor: _Make = partial(_attention, _FWD | {"BLOCK_K": 32}, ("V_SLICE",))
_flash_decode: _Make = partial(_attention, _DECODE | {"COLUMN_SIMDGROUPS": 1}, ())
_dq: _Make = partial(_attention, _BWD | {"BLOCK_K": 32}, ("DQ_SLICE",))
_dkv: _Make = partial(_attention, _BWD | {"BLOCK_Q": 32, "SLICES": 1}, ("DK_SLICE", "DV_SLICE"))
_captures: _Make = partial(_attention, _BWD | {"BLOCK_K": 32}, ())
_BIAS: _Defines = {"BLOCK_K": 16, "DBIAS_ELEMENT": "float", "DBIAS_PAIRS": 0}
_bias: _Make = partial(_attention, _BWD | _BIAS, ())
_NO_ROWS: _Defines = {"HAS_ROWS": 0, "ROWS_ARE_POSITIONS": 0}
_rope: _Make = partial(
    _strings, {"VECTOR": 4, "HEADS": 8, "INTERLEAVED": 0, "IN_PLACE": 0, "ROW_ELEMENT": "int"}
)
_append_kv: _Make = partial(
    _attention,
    _on("WIDE_STORES", "CACHE_SEQLENS", "VECTOR", "HEADS"),
    (),
)


def _softmax(element: str, row_simdgroups: int, wide_loads: int) -> dict[str, str]:
    rows = 8 if row_simdgroups == 1 else 1
    row = {"ROW_SIMDGROUPS": row_simdgroups, "THREADGROUP_ROWS": rows}
    return _strings({"ELEMENT": element, "WIDE_LOADS": wide_loads}, row)


SPECIALISATIONS: dict[str, list[dict[str, str]]] = {
    "flash_fwd": [
        _flash_fwd("half", 64),
        _flash_fwd("bfloat", 128, _EVERYTHING, {"HEAD_DIM_V": 65, "V_SLICE": 72, "WIDE_LOADS": 0}),
        _flash_fwd("half", 64, _ROTARY, {"WIDE_ROTARY": 1}),
        _flash_fwd("half", 64, _ROTARY, {"WIDE_ROTARY": 1, "ROTARY_INTERLEAVED": 1}),
        _flash_fwd("half", 64, _ROTARY, _VISIBILITY, {"MASK_PAIRS": 1, "PAGE_SIZE": 24}),
        _flash_fwd("half", 64, _on("VARLEN", "CACHE_BATCH_IDX")),
        _flash_fwd("half", 64, _LISTED_MASK),
        _flash_fwd("half", 64, _on("BAND"), {"KV_STAGED": 0, "PAGE_SIZE": 16}),
        _flash_fwd("half", 64, _quantised(1), {"PAGE_SIZE": 16}),
        _flash_fwd("bfloat", 64, _quantised(2)),
        _flash_fwd("float", 100, _quantised(3), {"V_SLICE": 104, "WIDE_LOADS": 0}),
        _flash_fwd("float", 64, {"KV_FORMAT": 3}),
        _flash_fwd("float", 64, {"KV_ELEMENT": "half"}),
        _flash_fwd("half", 64, _FLEX_ORDERED),
        _flash_fwd(
            *("float", 512),
            {"V_SLICE": 256, "ROW_FRAGMENTS": 1, "BLOCK_K": 8, "Q_IN_REGISTERS": 0, "ROW_PAIRS": 1},
        ),
    ],
    "flash_fwd_tensor": [
        _flash_fwd_tensor("half", 64),
        _flash_fwd_tensor(
            *("bfloat", 136, _EVERYTHING),
            {"HEAD_DIM_V": 65, "V_SLICE": 32, "WIDE_LOADS": 0, "Q_IN_REGISTERS": 0},
        ),
        _flash_fwd_tensor("half", 64, _quantised(1), {"PAGE_SIZE": 16}),
        _flash_fwd_tensor("half", 64, _FLEX_ORDERED),
        _flash_fwd_tensor("float", 64, {"KV_ELEMENT": "half"}),
        _flash_fwd_tensor("float", 64, _quantised(3)),
    ],
    "flash_decode": [
        _flash_decode("half", 64),
        _flash_decode("half", 64, _FLEX),
        _flash_decode("half", 64, _on("PACKED_Q", "SINK"), {"SINK_ELEMENT": "half"}),
        _flash_decode("half", 64, _on("PACKED_Q", "TREE_PARENTS", "BAND")),
        _flash_decode("half", 64, _on("TREE_MASK"), _DECODED),
        _flash_decode(
            *("half", 100, _on("SPLIT")),
            {"KEY_FRAGMENTS": 1, "VECTOR_ROWS": 2, "KEY_LANES": 8},
        ),
        _flash_decode(
            *("float", 576, _on("SPLIT", "V_IN_K")),
            {"HEAD_DIM_V": 512, "ROW_FRAGMENTS": 4, "KEY_FRAGMENTS": 1, "KV_ELEMENT": "half"},
            {"KEY_SIMDGROUPS": 1, "COLUMN_SIMDGROUPS": 18},
        ),
        _flash_decode(
            *("bfloat", 100, _DECODED),
            {"WIDE_LOADS": 0, "PAGE_SIZE": 24, "KV_FORMAT": 1},
        ),
        _flash_decode("half", 64, _on("BAND", "SPLIT"), {"INDEX_BLOCK": 1, "PAGE_SIZE": 16}),
        _flash_decode(
            *("half", 64, {"INDEX_BLOCK": 5, "KEY_FRAGMENTS": 1}),
            {"VECTOR_ROWS": 2, "KEY_LANES": 8},
        ),
        _flash_decode(
            *("half", 64, _quantised(2), {"KEY_FRAGMENTS": 1}),
            {"HADAMARD": 32, "VECTOR_ROWS": 2, "KEY_LANES": 8},
        ),
        _flash_decode(
            *("half", 128, _quantised(1), {"HADAMARD": 64}),
            {"KEY_SIMDGROUPS": 1, "COLUMN_SIMDGROUPS": 2},
        ),
    ],
    "flash_bwd_delta": [
        {"ELEMENT": "half", "HEAD_DIM_V": "64", "SIMDGROUPS": "4", "DLSE": "1"},
    ],
    "flash_bwd_sum": [{"ELEMENT": "half", "HEAD_DIM": "64", "SIMDGROUPS": "4"}],
    "flash_bwd_dq": [
        _dq("half", 64, _LISTED_MASK),
        _dq("half", 64, _FLEX_GRADIENTS),
        _dq("float", 64, _on("EXACT_DELTA", "NORMALISED"), {"BLOCK_K": 16}),
        _dq(
            *("bfloat", 100, _on("EXACT_DELTA", "NORMALISED", "DLSE"), _EVERYTHING),
            {"BLOCK_K": 16, "DQ_SLICE": 56, "ROWS_IN_REGISTERS": 0},
            {"ROTARY_DIM": 32, "WIDE_LOADS": 0},
        ),
    ],
    "flash_bwd_dkv": [
        _dkv("half", 64, _LISTED_MASK),
        _dkv("half", 64, _FLEX_GRADIENTS, {"COLUMN_SIMDGROUPS": 2}),
        _dkv("float", 64, {"BLOCK_Q": 8, "NORMALISED": 1}),
        _dkv(
            *("bfloat", 100, _EVERYTHING),
            {"BLOCK_Q": 16, "DK_SLICE": 56, "DV_SLICE": 56, "SLICES": 2, "ROWS_IN_REGISTERS": 0},
            {"HEAD_SPLITS": 2, "ROTARY_DIM": 32, "WIDE_LOADS": 0},
        ),
    ],
    "flash_bwd_dq_tensor": [
        _dq("half", 64, _TENSOR, _LISTED_MASK),
        _dq("float", 64, _TENSOR, _on("EXACT_DELTA", "NORMALISED")),
        _dq(
            *("bfloat", 136, _TENSOR, _on("EXACT_DELTA", "NORMALISED", "DLSE"), _EVERYTHING),
            {"DQ_SLICE": 128, "ROWS_IN_REGISTERS": 0, "COLUMN_SIMDGROUPS": 2, "WIDE_LOADS": 0},
        ),
    ],
    "flash_bwd_dkv_tensor": [
        _dkv("half", 64, _TENSOR, _LISTED_MASK),
        _dkv("float", 64, _TENSOR, {"NORMALISED": 1, "COLUMN_SIMDGROUPS": 2}),
        _dkv(
            *("bfloat", 136, _TENSOR, _EVERYTHING),
            {"DK_SLICE": 128, "DV_SLICE": 128, "SLICES": 2, "HEAD_SPLITS": 2},
            {"ROWS_IN_REGISTERS": 0, "COLUMN_SIMDGROUPS": 2, "WIDE_LOADS": 0},
        ),
    ],
    "flash_bwd_bias": [
        _bias("half", 64, {"QUERIES_SHARED": 0, "KEYS_SHARED": 0, "DBIAS_PAIRS": 1}),
        _bias("half", 64, {"QUERIES_SHARED": 0, "KEYS_SHARED": 0}),
        _bias(
            *("float", 64),
            {"QUERIES_SHARED": 0, "KEYS_SHARED": 1, "WIDE_LOADS": 0, "NORMALISED": 1},
        ),
        _bias("half", 64, _on("QUERIES_SHARED", "KEYS_SHARED", "SLOPES", "ALIBI")),
        _bias(
            *("bfloat", 100, _EVERYTHING),
            {"QUERIES_SHARED": 1, "KEYS_SHARED": 0, "ROWS_IN_REGISTERS": 0},
            {"ROTARY_DIM": 32, "WIDE_LOADS": 0},
        ),
    ],
    "flash_bwd_captures": [
        _captures("half", 64, _FLEX_SHARE),
        _captures(
            *("float", 64, _FLEX_SHARE),
            _on("NORMALISED", "QUERIES_OWNED", "PLACES_DIFFER") | {"BLOCK_K": 16},
        ),
    ],
    "mask_blocks": [{"WORD": "uint2"}, {"WORD": "uchar"}],
    "merge": [
        _strings({"ELEMENT": "half", "WIDE_LOADS": 1}),
        _strings({"ELEMENT": "bfloat", "WIDE_LOADS": 1, "SINK": 1, "SINK_ELEMENT": "half"}),
        _strings({"ELEMENT": "float", "WIDE_LOADS": 0, "SINK": 1, "SINK_ELEMENT": "float"}),
    ],
    "index_scores": [
        _strings(
            {"ELEMENT": "half", "WEIGHT_ELEMENT": "float", "HEAD_DIM": 128, "BLOCK_K": 32},
            {"SIMDGROUPS": 4, "WIDE_LOADS": 1, "ROW_PAIRS": 1, "CAUSAL": 1},
        ),
        _strings(
            {"ELEMENT": "bfloat", "WEIGHT_ELEMENT": "bfloat", "HEAD_DIM": 33, "BLOCK_K": 32},
            {"SIMDGROUPS": 1, "WIDE_LOADS": 0, "ROW_PAIRS": 0},
        ),
    ],
    "copy_pages": [{"WORD": "uint4", "INDEX": "int"}, {"WORD": "uchar", "INDEX": "long"}],
    "append_kv": [
        _append_kv("half", 64, {"CACHE_BATCH_IDX": 1}),
        _append_kv("bfloat", 64, _quantised(1), {"PAGE_SIZE": 16}),
        _append_kv("half", 64, _quantised(2), {"WIDE_STORES": 0}),
        _append_kv("float", 64, {"KV_FORMAT": 3, "K_SCALE": 1, "HEAD_DIM_QK": 33}),
        _append_kv("half", 64, _quantised(2), {"HADAMARD": 64}),
        _append_kv("float", 64, {"KV_ELEMENT": "bfloat"}),
        _append_kv("half", 64, _NEW_ROTARY),
        _append_kv("bfloat", 64, _NEW_ROTARY, {"WIDE_ROTARY": 1}),
        _append_kv("half", 128, _NEW_ROTARY, {"ROTARY_FIRST": 64, "HEAD_DIM_V": 64, "V_IN_K": 1}),
    ],
    "rope": [
        _rope({"ELEMENT": "half", "TABLE_ELEMENT": "float"}, _NO_ROWS),
        _rope(
            {"ELEMENT": "bfloat", "TABLE_ELEMENT": "bfloat", "ROW_ELEMENT": "long", "VECTOR": 2},
            _on("HAS_ROWS", "ROWS_ARE_POSITIONS", "INTERLEAVED", "IN_PLACE"),
        ),
        _rope(
            {"ELEMENT": "float", "TABLE_ELEMENT": "half", "VECTOR": 1, "HEADS": 1},
            {"HAS_ROWS": 1, "ROWS_ARE_POSITIONS": 0},
        ),
    ],
    "rope_tables": [
        {"TABLE_ELEMENT": "float", "POSITION_ELEMENT": "long"},
        {"TABLE_ELEMENT": "bfloat", "POSITION_ELEMENT": "float"},
    ],
    "probe": [{}],
    "probe_tensor": [{"FLOAT32": "0"}, {"FLOAT32": "1"}],
    "softmax": [_softmax("half", 1, 1), _softmax("bfloat", 8, 0), _softmax("float", 32, 1)],
}
