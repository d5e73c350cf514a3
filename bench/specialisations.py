"""The default specialisations of the attention kernels on M1."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from bench.features import OF_LENGTHS
from torch_metal_attn.quantisation import quantise
from torch_metal_attn.runtime import extension
from torch_metal_attn.tools.explain.ops import backward_launches

HEAD_DIMS = (32, 64, 80, 96, 128, 192, 256, 512)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Features other than causality are compiled for these head dims only.
FEATURE_HEAD_DIMS = (64, 128)
# The number of columns of MLA's keys, and how many of them are also the values.
LATENT, LATENT_VALUES = 576, 512
DECODED_SIZES = ((64, 32), (128, 32), (128, 1), (512, 1), (LATENT, 1))  # head dims, KV heads
FEATURE_DTYPE = torch.float16
LENGTH, HEADS = 64, 32
FEATURES = {name: partial(options, LENGTH) for name, options in OF_LENGTHS.items()}
KV_HEADS = (32, 2, 1)

Options = Callable[[int, int, torch.dtype], dict[str, Any]]


@dataclass(frozen=True)
class Specialisation:
    """A kernel as the op would launch it."""

    kernel: str
    dtype: torch.dtype
    head_dim: int
    feature: str
    defines: dict[str, Any]
    threads: int
    choice: str = ""  # how its tile was chosen

    @property
    def name(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.kernel} {dtype} D{self.head_dim} {self.feature}"


def _operands(head_dim: int, dtype: torch.dtype, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.empty(1, HEADS, LENGTH, head_dim, dtype=dtype)
    k, v = (torch.empty(1, kv_heads, LENGTH, head_dim, dtype=dtype) for _ in "kv")
    return q, k, v


def _chosen(
    kernel: str, dtype: torch.dtype, head_dim: int, feature: str, explained: dict[str, Any]
) -> Specialisation:
    return Specialisation(
        *(kernel, dtype, head_dim, feature),
        *(explained["defines"], explained["threads"][0], explained["choice"]),
    )


def attention(
    dtype: torch.dtype, head_dim: int, feature: str, options: Options
) -> Iterator[Specialisation]:
    """flash_fwd, and the kernels of the gradients if the feature supports them."""
    q, k, v = _operands(head_dim, dtype, HEADS)
    arguments = options(LENGTH, head_dim, dtype)
    k, v = arguments.pop("k", k), arguments.pop("v", v)
    explained = extension.launches(torch.ops.metal_attn_explain.flash_fwd(q, k, v, **arguments))[-1]
    yield _chosen("flash_fwd", dtype, head_dim, feature, explained)
    if feature not in CACHES:
        try:
            launches = backward_launches("flash_fwd", {"q": q, "k": k, "v": v} | arguments)
        except ValueError:
            return  # no tile fits in threadgroup memory
        for launch in launches:
            if launch["kernel"] in ("flash_bwd_dq", "flash_bwd_dkv"):
                yield _chosen(launch["kernel"], dtype, head_dim, feature, launch)


def decoding(
    dtype: torch.dtype, head_dim: int, kv_heads: int, feature: str, options: Options
) -> Specialisation:
    """flash_decode for one query of each of 32 heads."""
    q, k, v = _operands(head_dim, dtype, kv_heads)
    arguments = options(LENGTH, head_dim, dtype)
    q = arguments.pop("q", q[:, :, :1])
    k, v = (arguments.pop(name, x)[:, :kv_heads] for name, x in (("k", k), ("v", v)))
    arguments |= {
        name: arguments[name][:, :kv_heads] for name in ("k_scale", "v_scale") if name in arguments
    }
    if head_dim == LATENT:
        v = _values_of(k)
        arguments |= {"v_scale": _values_of(arguments["k_scale"])} if "k_scale" in arguments else {}
    for name in ("q_rotary_cos", "q_rotary_sin", "attn_mask", "attn_bias"):
        if name in arguments:
            arguments[name] = arguments[name][:1]
    packed = torch.ops.metal_attn_explain.flash_decode(q, k, v, num_splits=1, **arguments)
    (explained,) = extension.launches(packed)
    feature = f"{kv_heads} KV heads, {feature}"
    return _chosen("flash_decode", dtype, head_dim, feature, explained)


def _values_of(latents: Tensor) -> Tensor:
    return latents[..., : latents.shape[-1] * LATENT_VALUES // LATENT]


def _in_pages(options: Options, length: int, head_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    return _pages(length, head_dim, dtype) | options(length, head_dim, dtype)


def _quantised(k_format: str, v_format: str = "") -> Options:
    def options(length: int, head_dim: int, dtype: torch.dtype) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        for side, format in (("k", k_format), ("v", v_format or k_format)):
            rows = torch.ones(1, HEADS, length, head_dim)
            arguments[side], scale = quantise(rows, format)
            arguments |= {} if scale is None else {f"{side}_scale": scale}
        return arguments

    return options


def _pages(length: int, head_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    pages = torch.empty(length // 16, HEADS, 16, head_dim, dtype=dtype)
    table = torch.arange(length // 16).int()[None]
    return {
        "k": pages,
        "v": pages.clone(),  # if v shared k's memory, another tile would be chosen
        "block_table": table,
        "seqused_k": torch.tensor([length]).int(),
    }


def _packed(_: int, head_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    ends = torch.tensor([0, 1]).int()
    q = torch.empty(1, HEADS, head_dim, dtype=dtype)
    return {"q": q, "cu_seqlens_q": ends, "max_seqlen_q": 1}


# Kernels for groups of 32 columns differ from those for groups of 64 only by a constant.
KV_FORMATS = ("q8_0", "q4_0", "fp8_e4m3", "q2_g64", "q3_g64", "q4_g64")
# Only the forward and decoding read caches.
CACHES: dict[str, Options] = {
    "pages of 16": _pages,
    **{f"{format} cache": _quantised(format) for format in KV_FORMATS},
    "q8_0 and q4_g64 cache": _quantised("q8_0", "q4_g64"),
}
# Features that only decoding has. Together with pages they need the most registers.
BY_ROW: dict[str, Options] = {
    "packed queries": _packed,
    "many queries": lambda _, d, dtype: {"q": torch.empty(1, HEADS, 12, d, dtype=dtype)},
    "lists of keys": lambda *_: {"indices": torch.zeros(1, 1, 1, 32).int()},
    "trees": lambda *_: {"tree_mask": torch.ones(1, 1, dtype=torch.bool)},
}
DECODED: dict[str, Options] = {
    **BY_ROW,
    "rotated q8_0 cache": lambda *sizes: CACHES["q8_0 cache"](*sizes) | {"hadamard": 32},
}
for _name, _options in BY_ROW.items():
    DECODED[f"{_name} in pages"] = partial(_in_pages, _options)
PLAIN = ("none", "causal")
# Features with a value for each head.
PER_HEAD: dict[str, Options] = {
    "ALiBi": lambda *_: {"alibi_slopes": torch.ones(HEADS)},
    "sink": lambda *_: {"learnable_sink": torch.ones(HEADS)},
}
ALL_FEATURES = FEATURES | PER_HEAD | CACHES | DECODED
# Features that only training has, or that only keys outside a cache have.
NOT_DECODED = ("dropout", "rotary of q and k", "rotary, interleaved", *PLAIN)
DECODED_FEATURES = [name for name in ALL_FEATURES if name not in NOT_DECODED]


def specialisations() -> Iterator[Specialisation]:
    """Every kernel, dtype and head dim, plain and causal; then each feature alone."""
    for dtype, head_dim in product(DTYPES, HEAD_DIMS):
        for feature in PLAIN:
            yield from attention(dtype, head_dim, feature, FEATURES[feature])
        for kv_heads in KV_HEADS:
            yield decoding(dtype, head_dim, kv_heads, "none", FEATURES["none"])
    for head_dim, feature in product(FEATURE_HEAD_DIMS, ALL_FEATURES):
        if feature not in PLAIN and feature not in DECODED:
            yield from attention(FEATURE_DTYPE, head_dim, feature, ALL_FEATURES[feature])
    for (head_dim, kv_heads), feature in product(DECODED_SIZES, DECODED_FEATURES):
        yield decoding(FEATURE_DTYPE, head_dim, kv_heads, feature, ALL_FEATURES[feature])
