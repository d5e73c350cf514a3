"""Runs ggml's unmodified kernels in the simulator, and formulas in float64 for comparison."""

import re
import struct
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm, scaled_dot_product_attention

from torch_metal_attn.simulator import compile_shader
from torch_metal_attn.simulator.library import ShaderLibrary

from . import peers

HEADS, KV_HEADS, QUERIES, KEYS, HEAD_DIM = 4, 2, 16, 128, 64
ATTENTION = {0: True, 1: False, 2: False, 3: False, 4: False, 20: HEAD_DIM, 21: HEAD_DIM, 22: 4}
# ggml's text numbers the function constants by family of kernels.
CONSTANTS: dict[int | str, bool | int | float] = {
    **{first + index: value for first in (300, 400) for index, value in ATTENTION.items()},
    **dict.fromkeys((422, 423, 602, 603, 604, 702, 703, 704, 705), 1),
    **dict.fromkeys((310, 701), True),
    **dict.fromkeys((700, 800), False),
    **dict.fromkeys((224, 601), 8),
    225: 64,
    600: 2,
}
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
FORMATS = {"int32_t": "i", "uint64_t": "Q", "int16_t": "h", "float": "f", "bool": "?"}

Outcome = tuple[Tensor, Tensor]
RUNS: dict[str, Callable[..., Outcome]] = {}  # {kernel: function of compile_shader's `check`}
# A lane reads a mask that another lane wrote, after SIMD operations but without a barrier.
RACES = frozenset({"flash_attn_ext_vec_f16_dk64_dv64"})
# Bounds relative to the largest value, for kernels that round to 16 bits internally.
BOUNDS = {f"flash_attn_ext_{kind}_dk64_dv64": 2.0**-11 for kind in ("f16", "f32", "vec_f16")}
BOUNDS |= {"flash_attn_ext_bf16_dk64_dv64": 2.0**-8}
BOUNDS |= dict.fromkeys(("rope_neox_f16", "mul_mm_q4_K_f32"), 2.0**-11)


@lru_cache
def library(check: bool) -> ShaderLibrary:
    defines = {"GGML_METAL_EMBED_LIBRARY": 1, "GGML_METAL_HAS_BF16": 1}
    return compile_shader(peers.ggml_source(), defines=defines, constants=CONSTANTS, check=check)


def params(family: str, **values: Any) -> Tensor:
    """The kernels' parameter struct, laid out as the text declares it; other fields are 0."""
    body = re.search(rf"struct {{([^}}]*)}} ggml_metal_kargs_{family};", peers.ggml_source())
    assert body is not None
    fields = re.findall(r"(\w+)\s+(\w+)(?:\[(\d)\])?;", body[1])
    form, flat = "@", []
    for kind, name, count in fields:
        form += (count or "1") + FORMATS[kind]
        value = values.get(name, [0] * int(count or 1))
        flat += value if isinstance(value, list) else [value]
    return torch.frombuffer(bytearray(struct.pack(f"{form}0Q", *flat)), dtype=torch.uint8)


def sizes(name: str, tensor: Tensor) -> dict[str, int]:
    return {f"ne{name}{i}": size for i, size in enumerate(tensor.shape[::-1])}


def strides(name: str, tensor: Tensor) -> dict[str, int]:
    steps = enumerate(tensor.stride()[::-1])
    return {f"nb{name}{i}": step * tensor.element_size() for i, step in steps}


def family(*names: str) -> Callable[[Callable[[str, bool], Outcome]], None]:
    def add(run: Callable[[str, bool], Outcome]) -> None:
        RUNS.update({name: partial(run, name) for name in names})

    return add


def call(
    name: str,
    check: bool,
    *args: Tensor,
    groups: tuple[int, ...],
    size: tuple[int, ...],
    shared: int = 0,
) -> None:
    threads = tuple(a * b for a, b in zip(groups, size, strict=True))
    options = {"group_size": size, "threadgroup_bytes": {0: shared} if shared else None}
    getattr(library(check), f"kernel_{name}")(*args, threads=threads, **options)


@family("soft_max_f32", "soft_max_f16_4")
def _(name: str, check: bool) -> Outcome:
    x, sinks = torch.randn(2, 3, 5, 68), torch.randn(3)
    mask = torch.randn(1, 1, 5, 68).to(torch.float16 if "f16" in name else torch.float32)
    out = torch.empty_like(x)
    kargs = params("soft_max", ne00=68, **sizes("1", mask), **strides("0", x), **strides("1", mask),
                   **strides("", out), scale=0.5)  # fmt: skip
    call(name, check, kargs, x, mask, sinks, out, groups=(5, 3, 2), size=(32, 1, 1), shared=128)
    scores = x.double() * 0.5 + mask.double()
    sink_scores = sinks.double().view(3, 1, 1).expand(2, 3, 5, 1)
    return out, torch.softmax(torch.cat([scores, sink_scores], -1), -1)[..., :-1]


@family("norm_mul_add_f32_4", "rms_norm_mul_f32")
def _(name: str, check: bool) -> Outcome:
    x, factor, added = torch.randn(2, 3, 4, 36), torch.rand(36), torch.randn(36)
    out = torch.empty_like(x)
    rows = [4, 1, 1], [3, 1, 1], [2, 1, 1]
    steps = {f"nbf{i}": [x.stride(3 - i) * 4, 0, 0] for i in (1, 2, 3)}
    kargs = params("norm", ne00=36, ne00_t=36 // (4 if "_4" in name else 1), eps=1e-5, **steps,
                   **strides("", out), nef1=rows[0], nef2=rows[1], nef3=rows[2])  # fmt: skip
    call(name, check, kargs, x, factor, added, out, groups=(4, 3, 2), size=(64, 1, 1), shared=128)
    wide, by = x.double(), factor.double()
    if "rms" in name:
        return out, rms_norm(wide, (36,), by, 1e-5)
    return out, layer_norm(wide, (36,), by, added.double(), 1e-5)


@family("rope_norm_f32", "rope_neox_f16")
def _(name: str, check: bool) -> Outcome:
    """Rotates 24 columns of (batch, sequence, heads, head_dim)."""
    x = torch.randn(1, 5, 3, 32).to(torch.float16 if "f16" in name else torch.float32)
    out, positions = torch.empty_like(x), torch.tensor([0, 3, 4, 100, 7], dtype=torch.int32)
    kargs = params("rope", **sizes("0", x), **sizes("", x), **strides("0", x), **strides("", out),
                   n_dims=24, n_ctx_orig=64, freq_base=1e4, freq_scale=1.0, attn_factor=1.0,
                   beta_fast=32.0, beta_slow=1.0)  # fmt: skip
    call(name, check, kargs, x, positions, x, out, groups=(3, 5, 1), size=(32, 1, 1))
    angles = positions.double()[:, None] * 1e4 ** (-torch.arange(12.0).double() / 12)
    rotated, rest = x[..., :24].double(), x[..., 24:].double()
    pairs = rotated.unflatten(-1, (2, 12) if "neox" in name else (12, 2))
    halves = pairs if "neox" in name else pairs.transpose(-1, -2)
    (a, b), (cos, sin) = halves.unbind(-2), (angles.cos()[:, None], angles.sin()[:, None])
    both = torch.stack([a * cos - b * sin, a * sin + b * cos], -2 if "neox" in name else -1)
    return out, torch.cat([both.flatten(-2), rest], -1)


def weights(kind: str, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    if kind in DTYPES:
        values = torch.randn(rows, columns).to(DTYPES[kind])
        return values, values.double()
    block = {"q8_0": 32, "q4_0": 32, "q4_K": 256}[kind]
    scale = torch.rand(rows, columns // block, 1).half()
    packed = [scale.view(torch.uint8)]
    if kind == "q8_0":
        codes = torch.randint(-127, 128, (rows, columns // block, block), dtype=torch.int8)
        values, packed = codes * scale.double(), [*packed, codes.view(torch.uint8)]
    else:
        codes = torch.randint(0, 16, (rows, columns // block, block))
        halves = codes.unflatten(-1, (-1, 2, 16 if kind == "q4_0" else 32)).unbind(-2)
        nibbles = (halves[0] + 16 * halves[1]).flatten(-2).to(torch.uint8)
        if kind == "q4_0":
            values, packed = (codes - 8) * scale.double(), [*packed, nibbles]
        else:  # eight blocks of 32, each with a scale and a minimum of 6 bits
            scales, minima = torch.randint(0, 16, (2, rows, columns // block, 8))
            lowest = torch.rand(rows, columns // block, 1).half()
            high = scales[..., 4:] + 16 * minima[..., 4:]
            six = torch.cat([scales[..., :4], minima[..., :4], high], -1).to(torch.uint8)
            packed += [lowest.view(torch.uint8), six, nibbles]
            by, less = scale.double() * scales, lowest.double() * minima
            values = codes.unflatten(-1, (8, 32)) * by[..., None] - less[..., None]
    return torch.cat(packed, -1).flatten(1), values.reshape(rows, columns)


PRODUCTS = {
    # rows of a threadgroup, columns of a threadgroup, SIMD groups, bytes of threadgroup memory
    "mul_mv_f16_f32": (2, 1, 2, 256),
    "mul_mv_q8_0_f32": (2, 1, 2, 256),
    "mul_mv_q4_0_f32": (8, 1, 2, 256),
    "mul_mv_ext_q4_K_f32_r1_2": (8, 2, 2, 0),
    "mul_mm_bf16_f32": (64, 32, 4, 8192),
    "mul_mm_q4_K_f32": (64, 32, 4, 8192),
}


@family(*PRODUCTS)
def _(name: str, check: bool) -> Outcome:
    rows, columns, simdgroups, shared = PRODUCTS[name]
    kind = re.sub(r"mul_m[vm]_(ext_)?|_f32.*", "", name)
    packed, matrix = weights(kind, 72, 256)
    x = torch.randn(1 if columns == 1 else 33, 256)
    out = torch.empty(len(x), 72)
    bytes_of_row = packed.stride(0) * packed.element_size()
    op = "mul_mm" if "mm" in name else "mul_mv_ext" if "ext" in name else "mul_mv"
    kargs = {"ne00": 256, "ne01": 72, "ne02": 1, "nb01": bytes_of_row, "ne10": 256, "nr0": rows,
             "ne11": len(x), "ne12": 1, "nb10": 4, "nb11": 1024, "ne0": 72, "ne1": len(x),
             "r2": 1, "r3": 1}  # fmt: skip
    groups = (-(-72 // rows), -(-len(x) // columns), 1)
    if op == "mul_mm":
        groups = (groups[1], groups[0], 1)
    call(name, check, params(op, **kargs), packed, x, out, groups=groups, size=(32, simdgroups, 1),
         shared=shared)  # fmt: skip
    rounded = x.bfloat16() if kind == "bf16" else x.half() if op == "mul_mm" else x
    return out, rounded.double() @ matrix.T


@family("get_rows_q4_0")
def _(name: str, check: bool) -> Outcome:
    """Dequantises rows. Each thread stores a whole 4x4 matrix."""
    packed, matrix = weights("q4_0", 9, 64)
    rows, out = torch.tensor([3, 0, 8], dtype=torch.int32), torch.empty(3, 64)
    kargs = params("get_rows", ne00t=4, ne00=64, nb01=packed.stride(0), ne10=3, nb10=4, nb1=256)
    call(name, check, kargs, packed, rows, out, groups=(3, 1, 1), size=(32, 1, 1))
    return out, matrix[rows.long()]


@family(*(name for name in BOUNDS if name.startswith("flash")))
def _(name: str, check: bool) -> Outcome:
    dtype = DTYPES[name.split("_")[-3]]
    q = torch.randn(1, HEADS, QUERIES, HEAD_DIM)
    k, v = torch.randn(2, 1, KV_HEADS, KEYS, HEAD_DIM).to(dtype)
    mask = torch.zeros(1, 1, QUERIES, KEYS, dtype=torch.float16)
    mask[torch.rand(mask.shape) < 0.3] = -torch.inf
    mask[..., 64:] = torch.randn(QUERIES, KEYS - 64).half()
    out = torch.empty(1, QUERIES, HEADS, HEAD_DIM)
    kargs = {**sizes("0", q), **strides("0", q), **strides("1", k), **strides("2", v),
             **sizes("3", mask), **strides("3", mask), "ne11": KEYS, "ne_12_2": KV_HEADS,
             "ne_12_3": 1, "ns10": HEAD_DIM, "ns20": HEAD_DIM, "ne1": HEADS, "ne2": QUERIES,
             "ne3": 1, "scale": HEAD_DIM**-0.5}  # fmt: skip
    del kargs["ne00"]
    if "vec" in name:
        call(name, check, params("flash_attn_ext_vec", **kargs), q, k, v, mask, mask, mask, out,
             groups=(QUERIES, HEADS, 1), size=(32, 1, 1), shared=2048)  # fmt: skip
    else:
        blocks = torch.empty(2 * 2, dtype=torch.int8)  # the kinds of the mask's blocks
        scan = {"ne01": QUERIES, "ne30": KEYS, **sizes("3", mask), **strides("3", mask)}
        call("flash_attn_ext_blk", check, params("flash_attn_ext_blk", **scan), mask, blocks,
             groups=(2, 2, 1), size=(32, 1, 1))  # fmt: skip
        call(name, check, params("flash_attn_ext", **kargs), q, k, v, mask, mask, mask, blocks, out,
             groups=(2, HEADS, 1), size=(32, 4, 1), shared=16384)  # fmt: skip
    q, k, v, mask = (x.double() for x in (q, k, v, mask))
    return out, scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)
