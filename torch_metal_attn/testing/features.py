"""Makes cases of attention from names of features, caches and layouts."""

from collections.abc import Callable
from typing import Any

from torch_metal_attn.quantisation import FORMATS
from torch_metal_attn.testing.attention import Attention
from torch_metal_attn.testing.case import with_metadata
from torch_metal_attn.testing.tensors import Layout

# Grouped heads, several sequences, and lengths that no tile divides.
_SIZES = {"batch": 2, "heads": 4, "kv_heads": 2, "q_length": 33, "kv_length": 65, "head_dim": 64}


def _lengths(c: Attention) -> dict[str, Any]:
    used = tuple(max(c.kv_length - 9 * b, 0) for b in range(c.batch))
    return {"seqused_k": used, "leftpad_k": tuple(n // 4 for n in used), "causal": True}


def _rotary(c: Attention) -> dict[str, Any]:
    return {"rotary": "qk", "rotary_columns": 2 * max(c.head_dim // 4, 1)}


def _option(name: str, value: Any) -> Callable[[Attention], dict[str, Any]]:
    return lambda c: {name: value, "softmax_scale": 0.5}


# The score options that are numbers.
ALL_OPTIONS = with_metadata(Attention, "feature")

# For each feature's name, the fields of a case, which may depend on the sizes of the case.
FEATURES: dict[str, Callable[[Attention], dict[str, Any]]] = {
    "plain": lambda c: {},
    "scale": lambda c: {"softmax_scale": 0.3},
    "causal": lambda c: {"causal": True},
    "causal, top left": lambda c: {"causal": True, "q_offset": 0},
    "rows without keys": lambda c: {"causal": True, "q_offset": -(c.q_length // 2)},
    "window": lambda c: {
        "window_size_left": c.kv_length // 4,
        "window_size_right": c.kv_length // 5,
    },
    "causal window": lambda c: {"causal": True, "window_size_left": 9},
    "chunks": lambda c: {"attention_chunk": 16, "causal": True},
    "lengths": _lengths,
    "mask": lambda c: {"attn_mask": "bool bhqk"},
    "mask of keys": lambda c: {"attn_mask": "bool bk"},
    "additive mask": lambda c: {"attn_mask": "float32 bhqk"},
    "bias": lambda c: {"attn_bias": "float32 hqk"},
    **{name: _option(name, value) for name, value in ALL_OPTIONS.items()},
    "ALiBi": lambda c: {"alibi_slopes": "h"},
    "sinks": lambda c: {"learnable_sink": "float32"},
    "rotary": _rotary,
    "rotary, interleaved": lambda c: _rotary(c) | {"rotary_interleaved": True},
    "dropout": lambda c: {"dropout_p": 0.3},
    "all scores": lambda c: (
        {"window_size_left": 40, **ALL_OPTIONS, "attn_bias": "float32 hqk"}
        | {"alibi_slopes": "h", "learnable_sink": "float32"}
        | _lengths(c)
    ),
}
_LAYOUTS: dict[str, Layout] = {
    "contiguous": (),
    "by token": ("order 021",),  # (B, L, H, D) in memory
    "cut out of NaN": ("padded 3",),
}
# For float32 queries only.
HALF_CACHES = ("float16", "bfloat16")
_PAGED = ("q8_0", "q4_0", "fp8_e4m3", "q3_g64")
CACHES = ("paged", "indexed", *FORMATS, *(f"paged {format}" for format in _PAGED))


def _cache_fields(cache: str) -> dict[str, str]:
    """The fields for "", or for one of CACHES and HALF_CACHES."""
    if cache in HALF_CACHES:
        return {"cache_dtype": cache}
    where = next((way for way in ("paged", "indexed") if cache.startswith(way)), "")
    return {"cache": where, "format": cache.removeprefix(where).strip()}


def attention(
    feature: str = "plain", cache: str = "", layout: str = "contiguous", **fields: Any
) -> Attention:
    """A case of a feature at odd sizes, judged by the policy. fields: more of `Attention`'s."""
    values = _SIZES | fields
    words = _LAYOUTS[layout]
    values = {"v_head_dim": values["head_dim"], "q_layout": words, "v_layout": words} | values
    values = {"k_layout": words, "strict": True, **_cache_fields(cache)} | values
    if values.get("packed"):
        values |= dict.fromkeys(("batch", "q_length", "kv_length"), 1)
    if values.get("q_lengths"):
        values |= {"batch": len(values["q_lengths"]), "q_length": 1}
    sizes = Attention(**values)
    return Attention(**(values | FEATURES[feature](sizes)))
