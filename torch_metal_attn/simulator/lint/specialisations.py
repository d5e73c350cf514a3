"""For each kernel family a few specialisations that between them reach every line of its text."""

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


def _flags(*names: str) -> _Defines:
    return dict.fromkeys(names, 1)


_ROTARY: _Defines = {
    **_flags("Q_ROTARY", "K_ROTARY"),
    "ROTARY_ELEMENT": "float",
    "ROTARY_DIM": 64,
    "ROTARY_INTERLEAVED": 0,
}
_VISIBILITY = _flags("BAND", "CHUNKED", "VARLEN", "SEQUSED_K", "LEFTPAD_K", "MASK")
_SCORES = _flags("SOFTCAP", "ALIBI", "SINK", "BIAS", "BIAS_PAIRS")
_EVERYTHING: _Defines = {
    **_VISIBILITY,
    **_SCORES,
    "MASK_PAIRS": 0,
    "BIAS_ELEMENT": "half",
    "SINK_ELEMENT": "bfloat",
    **_ROTARY,
}

SPECIALISATIONS: dict[str, list[dict[str, str]]] = {
    "flash_fwd": [
        _flash_fwd("half", 64),
        _flash_fwd("bfloat", 128, _EVERYTHING | {"HEAD_DIM_V": 65, "V_SLICE": 72, "WIDE_LOADS": 0}),
        _flash_fwd("half", 64, _ROTARY | {"WIDE_ROTARY": 1}),
        _flash_fwd("half", 64, _ROTARY | {"WIDE_ROTARY": 1, "ROTARY_INTERLEAVED": 1}),
        _flash_fwd(
            "float",
            512,
            {"V_SLICE": 256, "ROW_FRAGMENTS": 1, "BLOCK_K": 8, "Q_IN_REGISTERS": 0},
        ),
    ],
}
