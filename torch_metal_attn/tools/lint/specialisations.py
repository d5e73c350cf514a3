"""A few specialisations of each kernel family that together reach every line of its text."""

from collections.abc import Mapping

_Defines = dict[str, int | str]


def _flash_fwd(element: str, head_dim: int, features: _Defines | None = None) -> dict[str, str]:
    defines = {
        "HEAD_DIM_QK": head_dim,
        "HEAD_DIM_V": head_dim,
        "V_SLICE": head_dim,
        "ROW_FRAGMENTS": 2,
        "BLOCK_K": 16,
        "SIMDGROUPS": 4,
        "Q_IN_REGISTERS": 1,
        "WIDE_LOADS": 1,
    }
    return {"ELEMENT": element} | {
        name: str(value) for name, value in (defines | (features or {})).items()
    }


def _flash_bwd(
    element: str, head_dim: int, own: Mapping[str, int | str], features: _Defines | None = None
) -> dict[str, str]:
    defines = {
        "HEAD_DIM_QK": head_dim,
        "HEAD_DIM_V": head_dim,
        "ROW_FRAGMENTS": 1,
        "SIMDGROUPS": 4,
        "ROWS_IN_REGISTERS": 1,
        "WIDE_LOADS": 1,
    }
    return {"ELEMENT": element} | {
        name: str(value) for name, value in {**defines, **own, **(features or {})}.items()
    }


def _flags(*names: str) -> _Defines:
    return dict.fromkeys(names, 1)


_ROTARY: _Defines = {
    **_flags("Q_ROTARY", "K_ROTARY"),
    "ROTARY_ELEMENT": "float",
    "ROTARY_DIM": 64,
    "ROTARY_INTERLEAVED": 0,
}
_ROTATED_ON_THE_WAY: _Defines = {
    **_flags("LEFTPAD_K", "Q_ROTARY"),
    "ROTARY_ELEMENT": "float",
    "ROTARY_DIM": 64,
    "ROTARY_INTERLEAVED": 0,
    "VECTOR": 4,
    "HEADS": 8,
}
_VISIBILITY = _flags("BAND", "CHUNKED", "VARLEN", "SEQUSED_K", "LEFTPAD_K", "MASK")
_LISTED_MASK = _flags("MASK", "MASK_PAIRS", "MASK_BLOCKS")
_SCORES = _flags("SOFTCAP", "ALIBI", "SINK", "BIAS", "BIAS_PAIRS")
_EVERYTHING: _Defines = {
    **_VISIBILITY,
    **_SCORES,
    "MASK_PAIRS": 0,
    "BIAS_ELEMENT": "half",
    "SINK_ELEMENT": "bfloat",
    **_ROTARY,
    **_flags("DROPOUT"),
}


# With texts as torch_metal_attn/flex writes them, which call everything that they may call.
_FLEX: _Defines = {
    **_flags("FLEX", "FLEX_FULL_BLOCKS"),
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
_FLEX_ORDERED = _FLEX | _flags("FLEX_ORDER")
_FLEX_GRADIENTS = _FLEX_ORDERED | {"FLEX_SLOPE": "return precise::tanh(score);"}
_FLEX_SHARE = _FLEX | {
    "FLEX_SHARE": "return precise::tanh(score);",
    "FLEX_PLACE": "return flex_index(key, params.capture_sizes[0], impossible);",
}


def _quantised(kv_format: int) -> _Defines:
    return {"KV_FORMAT": kv_format} | _flags("K_SCALE", "V_SCALE")


# Features that flash_decode does not have.
_NOT_DECODED = ("VARLEN", "K_ROTARY", "DROPOUT")


def _flash_decode(element: str, head_dim: int, features: _Defines | None = None) -> dict[str, str]:
    defines = {
        "HEAD_DIM_QK": head_dim,
        "HEAD_DIM_V": head_dim,
        "ROW_FRAGMENTS": 1,
        "KEY_FRAGMENTS": 2,
        "KEY_SIMDGROUPS": 4,
        "COLUMN_SIMDGROUPS": 1,
        "WIDE_LOADS": 1,
    }
    return {"ELEMENT": element} | {
        name: str(value) for name, value in (defines | (features or {})).items()
    }


def _bias(queries_shared: int, keys_shared: int, **own: int) -> _Defines:
    defines: _Defines = {
        "BLOCK_K": 16,
        "DBIAS_ELEMENT": "float",
        "DBIAS_PAIRS": 0,
        "QUERIES_SHARED": queries_shared,
        "KEYS_SHARED": keys_shared,
    }
    return defines | own


def _rope(
    element: str, table_element: str, row_element: str = "", features: _Defines | None = None
) -> dict[str, str]:
    defines: _Defines = {
        "ELEMENT": element,
        "TABLE_ELEMENT": table_element,
        "ROW_ELEMENT": row_element or "int",
        "VECTOR": 4,
        "HEADS": 8,
        "INTERLEAVED": 0,
        "IN_PLACE": 0,
        "HAS_ROWS": int(row_element != ""),
        "ROWS_ARE_POSITIONS": int(row_element != ""),
    }
    return {name: str(value) for name, value in (defines | (features or {})).items()}


def _append_kv(element: str, features: _Defines) -> dict[str, str]:
    defines: _Defines = {
        "HEAD_DIM_QK": 64,
        "HEAD_DIM_V": 64,
        "WIDE_LOADS": 1,
        "WIDE_STORES": 1,
        "CACHE_SEQLENS": 1,
        "VECTOR": 1,
        "HEADS": 1,
    }
    return {"ELEMENT": element} | {name: str(value) for name, value in (defines | features).items()}


def _softmax(element: str, row_simdgroups: int, wide_loads: int) -> dict[str, str]:
    return {
        "ELEMENT": element,
        "ROW_SIMDGROUPS": str(row_simdgroups),
        "THREADGROUP_ROWS": "8" if row_simdgroups == 1 else "1",
        "WIDE_LOADS": str(wide_loads),
    }


def _merge(element: str, wide_loads: int, **sink: str) -> dict[str, str]:
    return {"ELEMENT": element, "WIDE_LOADS": str(wide_loads)} | sink


SPECIALISATIONS: dict[str, list[dict[str, str]]] = {
    "flash_fwd": [
        _flash_fwd("half", 64),
        _flash_fwd("bfloat", 128, _EVERYTHING | {"HEAD_DIM_V": 65, "V_SLICE": 72, "WIDE_LOADS": 0}),
        _flash_fwd("half", 64, _ROTARY | {"WIDE_ROTARY": 1}),
        _flash_fwd("half", 64, _ROTARY | {"WIDE_ROTARY": 1, "ROTARY_INTERLEAVED": 1}),
        _flash_fwd("half", 64, _ROTARY | _VISIBILITY | {"MASK_PAIRS": 1, "PAGE_SIZE": 24}),
        _flash_fwd("half", 64, _flags("VARLEN", "CACHE_BATCH_IDX")),
        _flash_fwd("half", 64, _LISTED_MASK),
        _flash_fwd("half", 64, _flags("BAND") | {"KV_STAGED": 0, "PAGE_SIZE": 16}),
        _flash_fwd("half", 64, _quantised(1) | {"PAGE_SIZE": 16}),
        _flash_fwd("bfloat", 64, _quantised(2)),
        _flash_fwd("float", 100, _quantised(3) | {"V_SLICE": 104, "WIDE_LOADS": 0}),
        _flash_fwd("float", 64, {"KV_FORMAT": 3}),
        _flash_fwd("float", 64, {"KV_ELEMENT": "half"}),
        _flash_fwd("half", 64, _FLEX_ORDERED),
        _flash_fwd(
            "float",
            512,
            {"V_SLICE": 256, "ROW_FRAGMENTS": 1, "BLOCK_K": 8, "Q_IN_REGISTERS": 0, "ROW_PAIRS": 1},
        ),
    ],
    "flash_fwd_tensor": [
        _flash_fwd("half", 64, {"BLOCK_K": 32}),
        _flash_fwd(
            "bfloat",
            136,
            _EVERYTHING
            | {"BLOCK_K": 32, "HEAD_DIM_V": 65, "V_SLICE": 32, "WIDE_LOADS": 0}
            | {"Q_IN_REGISTERS": 0, "ROTARY_DIM": 64, "DROPOUT": 1},
        ),
        _flash_fwd("half", 64, _quantised(1) | {"BLOCK_K": 32, "PAGE_SIZE": 16}),
        _flash_fwd("half", 64, _FLEX_ORDERED | {"BLOCK_K": 32}),
        _flash_fwd("float", 64, {"BLOCK_K": 32, "KV_ELEMENT": "half"}),
        _flash_fwd("float", 64, _quantised(3) | {"BLOCK_K": 32}),
    ],
    "flash_decode": [
        _flash_decode("half", 64),
        _flash_decode("half", 64, _FLEX),
        _flash_decode(
            "half",
            100,
            _flags("SPLIT", "V_FIRST") | {"KEY_FRAGMENTS": 1, "VECTOR_ROWS": 2, "KEY_LANES": 8},
        ),
        _flash_decode(
            "float",
            576,
            _flags("SPLIT", "V_IN_K")
            | {"HEAD_DIM_V": 512, "ROW_FRAGMENTS": 4, "KEY_FRAGMENTS": 1}
            | {"KEY_SIMDGROUPS": 1, "COLUMN_SIMDGROUPS": 18, "KV_ELEMENT": "half"},
        ),
        _flash_decode(
            "bfloat",
            100,
            {name: value for name, value in _EVERYTHING.items() if name not in _NOT_DECODED}
            | {"WIDE_LOADS": 0, "PAGE_SIZE": 24, "KV_FORMAT": 1, "V_FIRST": 1},
        ),
    ],
    "flash_bwd_delta": [
        {"ELEMENT": "half", "HEAD_DIM_V": "64", "SIMDGROUPS": "4", "DLSE": "1"},
    ],
    "flash_bwd_sum": [{"ELEMENT": "half", "HEAD_DIM": "64", "SIMDGROUPS": "4"}],
    "flash_bwd_dq": [
        _flash_bwd("half", 64, {"BLOCK_K": 32, "DQ_SLICE": 64}, _LISTED_MASK),
        _flash_bwd("half", 64, {"BLOCK_K": 32, "DQ_SLICE": 64}, _FLEX_GRADIENTS),
        _flash_bwd(
            *("float", 64),
            _flags("EXACT_DELTA", "NORMALISED") | {"BLOCK_K": 16, "DQ_SLICE": 64},
        ),
        _flash_bwd(
            *("bfloat", 100),
            _flags("EXACT_DELTA", "NORMALISED", "DLSE")
            | {"BLOCK_K": 16, "DQ_SLICE": 56, "ROWS_IN_REGISTERS": 0},
            _EVERYTHING | {"ROTARY_DIM": 32, "WIDE_LOADS": 0},
        ),
    ],
    "flash_bwd_dkv": [
        _flash_bwd(
            *("half", 64),
            {"BLOCK_Q": 32, "DK_SLICE": 64, "DV_SLICE": 64, "SLICES": 1},
            _LISTED_MASK,
        ),
        _flash_bwd(
            *("half", 64),
            {"BLOCK_Q": 32, "DK_SLICE": 64, "DV_SLICE": 64, "SLICES": 1} | {"COLUMN_SIMDGROUPS": 2},
            _FLEX_GRADIENTS,
        ),
        _flash_bwd(
            *("float", 64),
            {"BLOCK_Q": 8, "DK_SLICE": 64, "DV_SLICE": 64, "SLICES": 1, "NORMALISED": 1},
        ),
        _flash_bwd(
            *("bfloat", 100),
            {"BLOCK_Q": 16, "DK_SLICE": 56, "DV_SLICE": 56, "SLICES": 2, "ROWS_IN_REGISTERS": 0}
            | {"HEAD_SPLITS": 2},
            _EVERYTHING | {"ROTARY_DIM": 32, "WIDE_LOADS": 0},
        ),
    ],
    "flash_bwd_dq_tensor": [
        _flash_bwd("half", 64, {"ROW_FRAGMENTS": 2, "BLOCK_K": 32, "DQ_SLICE": 64}, _LISTED_MASK),
        _flash_bwd(
            *("float", 64),
            _flags("EXACT_DELTA", "NORMALISED")
            | {"ROW_FRAGMENTS": 2, "BLOCK_K": 32, "DQ_SLICE": 64},
        ),
        _flash_bwd(
            *("bfloat", 136),
            _flags("EXACT_DELTA", "NORMALISED", "DLSE")
            | {
                "ROW_FRAGMENTS": 2,
                "BLOCK_K": 32,
                "DQ_SLICE": 128,
                "ROWS_IN_REGISTERS": 0,
                "COLUMN_SIMDGROUPS": 2,
            },
            _EVERYTHING | {"WIDE_LOADS": 0},
        ),
    ],
    "flash_bwd_dkv_tensor": [
        _flash_bwd(
            *("half", 64),
            {"ROW_FRAGMENTS": 2, "BLOCK_Q": 32, "DK_SLICE": 64, "DV_SLICE": 64, "SLICES": 1},
            _LISTED_MASK,
        ),
        _flash_bwd(
            *("float", 64),
            {
                "ROW_FRAGMENTS": 2,
                "BLOCK_Q": 32,
                "DK_SLICE": 64,
                "DV_SLICE": 64,
                "SLICES": 1,
                "NORMALISED": 1,
            }
            | {"COLUMN_SIMDGROUPS": 2},
        ),
        _flash_bwd(
            *("bfloat", 136),
            {
                "ROW_FRAGMENTS": 2,
                "BLOCK_Q": 32,
                "DK_SLICE": 128,
                "DV_SLICE": 128,
                "SLICES": 2,
                "HEAD_SPLITS": 2,
            }
            | {"ROWS_IN_REGISTERS": 0, "COLUMN_SIMDGROUPS": 2},
            _EVERYTHING | {"WIDE_LOADS": 0},
        ),
    ],
    "flash_bwd_bias": [
        _flash_bwd("half", 64, _bias(0, 0, DBIAS_PAIRS=1)),
        _flash_bwd("half", 64, _bias(0, 0)),
        _flash_bwd("float", 64, _bias(0, 1, WIDE_LOADS=0, NORMALISED=1)),
        _flash_bwd("half", 64, _bias(1, 1, SLOPES=1), _flags("ALIBI")),
        _flash_bwd(
            *("bfloat", 100),
            _bias(1, 0, ROWS_IN_REGISTERS=0),
            _EVERYTHING | {"ROTARY_DIM": 32, "WIDE_LOADS": 0},
        ),
    ],
    "flash_bwd_captures": [
        _flash_bwd("half", 64, {"BLOCK_K": 32}, _FLEX_SHARE),
        _flash_bwd(
            *("float", 64),
            _flags("NORMALISED", "QUERIES_OWNED", "PLACES_DIFFER") | {"BLOCK_K": 16},
            _FLEX_SHARE,
        ),
    ],
    "mask_blocks": [{"WORD": "uint2"}, {"WORD": "uchar"}],
    "merge": [
        _merge("half", 1),
        _merge("bfloat", 1, SINK="1", SINK_ELEMENT="half"),
        _merge("float", 0, SINK="1", SINK_ELEMENT="float"),
    ],
    "copy_pages": [{"WORD": "uint4", "INDEX": "int"}, {"WORD": "uchar", "INDEX": "long"}],
    "append_kv": [
        _append_kv("half", {"CACHE_BATCH_IDX": 1}),
        _append_kv("bfloat", {"KV_FORMAT": 1, **_flags("K_SCALE", "V_SCALE"), "PAGE_SIZE": 16}),
        _append_kv("half", {"KV_FORMAT": 2, **_flags("K_SCALE", "V_SCALE"), "WIDE_STORES": 0}),
        _append_kv("float", {"KV_FORMAT": 3, **_flags("K_SCALE"), "HEAD_DIM_QK": 33}),
        _append_kv("float", {"KV_ELEMENT": "bfloat"}),
        _append_kv("half", {"NEW_K_ROTARY": 1, **_ROTATED_ON_THE_WAY}),
        _append_kv("bfloat", {"NEW_K_ROTARY": 1, "WIDE_ROTARY": 1, **_ROTATED_ON_THE_WAY}),
    ],
    "rope": [
        _rope("half", "float"),
        _rope("bfloat", "bfloat", "long", {"VECTOR": 2, "INTERLEAVED": 1, "IN_PLACE": 1}),
        _rope("float", "half", "int", {"VECTOR": 1, "HEADS": 1, "ROWS_ARE_POSITIONS": 0}),
    ],
    "rope_tables": [
        {"TABLE_ELEMENT": "float", "POSITION_ELEMENT": "long"},
        {"TABLE_ELEMENT": "bfloat", "POSITION_ELEMENT": "float"},
    ],
    "probe": [{}],
    "probe_tensor": [{"FLOAT32": "0"}, {"FLOAT32": "1"}],
    "softmax": [_softmax("half", 1, 1), _softmax("bfloat", 8, 0), _softmax("float", 32, 1)],
}
