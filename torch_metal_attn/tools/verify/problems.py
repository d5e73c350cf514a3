"""Problems of attention for the self-test: sizes, features, layouts and caches."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.quantisation import FORMATS, dequantise, quantise
from torch_metal_attn.testing.judge import ints, normal


@dataclass(frozen=True)
class Sizes:
    """Sizes of q (B, Hq, Lq, D), k (B, Hkv, Lk, D) and v (B, Hkv, Lk, Dv)."""

    batch: int
    heads: int
    kv_heads: int
    q_length: int
    kv_length: int
    head_dim: int
    v_head_dim: int

    def operands(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Normally distributed q, k and v, on the CPU."""
        return (
            normal(self.batch, self.heads, self.q_length, self.head_dim, seed=1, dtype=dtype),
            normal(self.batch, self.kv_heads, self.kv_length, self.head_dim, seed=2, dtype=dtype),
            normal(self.batch, self.kv_heads, self.kv_length, self.v_head_dim, seed=3, dtype=dtype),
        )


def rotary(s: Sizes, interleaved: bool, sides: str = "qk") -> dict[str, Any]:
    """Tables for half of the head dim, or for one pair of columns."""
    options: dict[str, Any] = {"rotary_interleaved": interleaved}
    for seed, (side, length) in enumerate((("q", s.q_length), ("k", s.kv_length))):
        if side in sides:
            angles = 3 * normal(length, max(s.head_dim // 4, 1), seed=20 + seed)
            options |= {f"{side}_rotary_cos": angles.cos(), f"{side}_rotary_sin": angles.sin()}
    return options


def _mask(s: Sizes, *, dtype: torch.dtype = torch.bool) -> Tensor:
    """Masks out four of ten keys, and all keys of one query."""
    visible = normal(s.batch, s.heads, s.q_length, s.kv_length, seed=5) > -0.25
    visible[:, :, s.q_length // 2] = False
    if dtype == torch.bool:
        return visible
    return normal(*visible.shape, seed=6, dtype=dtype).masked_fill(~visible, -math.inf)


def _lengths(s: Sizes) -> dict[str, Any]:
    used = [max(s.kv_length - 9 * b, 0) for b in range(s.batch)]
    return {"seqused_k": ints(*used), "leftpad_k": ints(*(n // 4 for n in used))}


def _sinks(s: Sizes) -> dict[str, Any]:
    return {"learnable_sink": torch.linspace(-2, 3, s.heads)}


def _slopes(s: Sizes) -> dict[str, Any]:
    return {"alibi_slopes": torch.linspace(0.05, 0.5, s.heads)}


def _bias(s: Sizes) -> dict[str, Any]:
    return {"attn_bias": normal(s.heads, s.q_length, s.kv_length, seed=7)}


# Options of flash_fwd by the feature that they show.
FEATURES: dict[str, Callable[[Sizes], dict[str, Any]]] = {
    "plain": lambda s: {},
    "scale": lambda s: {"softmax_scale": 0.3},
    "causal": lambda s: {"causal": True},
    "causal, top left": lambda s: {"causal": True, "q_offset": 0},
    "rows without keys": lambda s: {"causal": True, "q_offset": -(s.q_length // 2)},
    "window": lambda s: {
        "window_size_left": s.kv_length // 4,
        "window_size_right": s.kv_length // 5,
    },
    "causal window": lambda s: {"causal": True, "window_size_left": 9},
    "chunks": lambda s: {"attention_chunk": 16, "causal": True},
    "lengths": lambda s: _lengths(s) | {"causal": True},
    "mask": lambda s: {"attn_mask": _mask(s)},
    "mask of keys": lambda s: {"attn_mask": _mask(s)[:, :1, :1]},
    "additive mask": lambda s: {"attn_mask": _mask(s, dtype=torch.float32)},
    "bias": _bias,
    "softcap": lambda s: {"softcap": 2.0, "softmax_scale": 0.5},
    "ALiBi": _slopes,
    "sinks": _sinks,
    "rotary": lambda s: rotary(s, False),
    "rotary, interleaved": lambda s: rotary(s, True),
    "dropout": lambda s: {"dropout_p": 0.3, "rng_state": torch.tensor([1234567, 89])},
    "all scores": lambda s: (
        {"causal": True, "window_size_left": 40, "softcap": 5.0}
        | _lengths(s)
        | _bias(s)
        | _slopes(s)
        | _sinks(s)
    ),
}


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values as "contiguous", "by token" ((B, L, H, D) in memory) or "cut out of NaN"."""
    if layout == "contiguous":
        return x
    if layout == "by token":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout != "cut out of NaN":
        raise ValueError(f"layout is {layout!r}")
    whole = torch.nn.functional.pad(x, (3, 5, 1, 2, 1, 0), value=math.nan)
    return whole[:, 1:, 1:-2, 3:-5]


CACHES = ("paged", "indexed", *FORMATS, *(f"paged {format}" for format in FORMATS))
# Of float32 queries only.
HALF_CACHES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Cached:
    """Keys and values as an op takes them, and the values that they stand for.

    Attributes: k, v: a cache. options: where and how it holds them. exact_k, exact_v: (B, Hkv, Lk,
        D) for the reference.
    """

    k: Tensor
    v: Tensor
    options: dict[str, Any]
    exact_k: Tensor
    exact_v: Tensor


def cached(k: Tensor, v: Tensor, cache: str) -> Cached:
    """k and v (B, Hkv, Lk, D) in a cache: "" or one of CACHES and HALF_CACHES."""
    if cache not in ("", *CACHES, *HALF_CACHES):
        raise ValueError(f"cache is {cache!r}; it can be {', '.join((*CACHES, *HALF_CACHES))}")
    if cache in HALF_CACHES:
        k, v = (x.to(HALF_CACHES[cache]) for x in (k, v))
    format = cache.removeprefix("paged").strip()
    options: dict[str, Any] = {}
    stored, exact = {"k": k, "v": v}, {"k": k, "v": v}
    if format in FORMATS:
        by_head = torch.linspace(0.02, 0.03, k.shape[1]) if format == "fp8_e4m3" else None
        for name, x in (("k", k), ("v", v)):
            stored[name], options[f"{name}_scale"] = quantise(x, format, by_head)
            if format == "fp8_e4m3":  # as bytes, which every device has
                stored[name] = stored[name].view(torch.uint8)
            scale = options[f"{name}_scale"]
            exact[name] = dequantise(stored[name], scale, torch.float32)
    rows = {name: x for name, x in options.items() if x.dim() > 2}
    if cache.startswith("paged"):
        blocks = -(-k.shape[2] // _PAGE)
        count = k.shape[0] * blocks + 2
        numbers = torch.randperm(count, generator=torch.Generator().manual_seed(0))
        table = numbers[: k.shape[0] * blocks].view(k.shape[0], blocks).int()
        for tensors in (stored, rows):
            tensors |= {name: _in_pages(x, table, count) for name, x in tensors.items()}
        options |= rows | {"block_table": table, "seqused_k": ints(*[k.shape[2]] * k.shape[0])}
    if cache == "indexed":
        places = torch.arange(k.shape[0]).flip(0)
        stored = {name: x[places] for name, x in stored.items()}
        options["cache_batch_idx"] = places.int()
    return Cached(stored["k"], stored["v"], options, exact["k"], exact["v"])


_PAGE = 16


def _in_pages(x: Tensor, table: Tensor, count: int) -> Tensor:
    """(B, H, L, D) in pages (count, H, page, D). All bits are 1 in pages that belong to nobody."""
    pages = torch.full((count, x.shape[1], _PAGE, x.shape[3]), -1, dtype=torch.int8)
    pages = pages.repeat_interleave(x.itemsize, -1).view(x.dtype)
    for b, owned in enumerate(table.tolist()):
        for i, page in enumerate(owned):
            rows = x[b, :, i * _PAGE : (i + 1) * _PAGE]
            pages[page, :, : rows.shape[1]] = rows
    return pages
