"""For each kernel family a few specialisations that between them reach every line of its text."""


def _flash_fwd(element: str, head_dim: int, **features: int) -> dict[str, str]:
    defines = {
        "HEAD_DIM_QK": head_dim,
        "HEAD_DIM_V": head_dim,
        "ROW_FRAGMENTS": 2,
        "BLOCK_K": 16,
        "SIMDGROUPS": 4,
        "Q_IN_REGISTERS": 1,
        "CAUSAL": 0,
        "WIDE_LOADS": 1,
    }
    return {"ELEMENT": element} | {name: str(n) for name, n in (defines | features).items()}


SPECIALISATIONS: dict[str, list[dict[str, str]]] = {
    "flash_fwd": [
        _flash_fwd("half", 64),
        _flash_fwd("bfloat", 128, HEAD_DIM_V=64, CAUSAL=1, WIDE_LOADS=0),
        _flash_fwd("float", 256, ROW_FRAGMENTS=1, BLOCK_K=8, CAUSAL=1, Q_IN_REGISTERS=0),
    ],
}
