"""Small problems of every kernel and feature, with contents and what must come out of them.

They are for compute-sanitizer, which makes kernels a hundred times slower. Sizes are odd, so that
tiles have edges. What must come out is what the op's reference computes on the CPU.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn import rope
from torch_metal_attn.quantisation import quantise
from torch_metal_attn.tools.tune import tiles

ops = torch.ops.metal_attn
HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
FORMATS = ("q8_0", "q4_0", "fp8_e4m3")


@dataclass
class Case:
    """A call with its tensors. It returns the results, or None where it works in place."""

    name: str
    call: Callable[..., Any]
    tensors: dict[str, Tensor]


def results(returned: Any) -> list[Tensor]:
    """What a call has returned, as a list."""
    if returned is None:
        return []
    return list(returned) if isinstance(returned, (tuple, list)) else [returned]


def ints(*values: int) -> Tensor:
    """Lengths, as ops take them."""
    return torch.tensor(values, dtype=torch.int32)


def qkv(
    dtype: torch.dtype,
    head_dim: int,
    length: int,
    kv_length: int,
    heads: int = 4,
    kv_heads: int = 2,
) -> dict[str, Tensor]:
    """One sequence."""
    return {
        "q": torch.randn(1, heads, length, head_dim).to(dtype),
        "k": torch.randn(1, kv_heads, kv_length, head_dim).to(dtype),
        "v": torch.randn(1, kv_heads, kv_length, head_dim).to(dtype),
    }


def pages(head_dim: int, length: int, kv_heads: int = 2, page: int = 16) -> dict[str, Tensor]:
    """Paged K and V with three pages that are not used."""
    count = -(-length // page)
    shape = (count + 3, kv_heads, page, head_dim)
    return {
        "k": torch.randn(shape).half(),
        "v": torch.randn(shape).half(),
        "block_table": torch.randperm(count + 3)[:count].int()[None].contiguous(),
        "seqused_k": ints(length),
    }


def quantised(format: str, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Random numbers in a format, and their scales."""
    head_scale = torch.ones(shape[1]) if format == "fp8_e4m3" else None
    data, scale = quantise(torch.randn(*shape), format, head_scale)
    assert scale is not None
    return data, scale


def tables(head_dim: int = 64, length: int = 256) -> dict[str, Tensor]:
    """Rotary tables."""
    cos, sin = rope.tables(rope.default(head_dim)[0], length)
    return {"rotary_cos": cos.half(), "rotary_sin": sin.half()}


def attention(
    name: str,
    tensors: Mapping[str, Tensor],
    more: Mapping[str, Tensor] | None = None,
    **options: Any,
) -> Case:
    """A call of flash_fwd. more: tensors of features."""
    more = more or {}

    def call(q: Tensor, k: Tensor, v: Tensor, **given: Tensor) -> Any:
        return ops.flash_fwd(q, k, v, **given, **options)

    return Case(f"forward {name}", call, {**tensors, **more})


def rotary(q_length: int, kv_length: int) -> dict[str, Tensor]:
    """Tables of flash_fwd for both sides."""
    angles = torch.rand(kv_length, 32)
    sides = {"q": angles[:q_length], "k": angles}
    return {
        f"{side}_rotary_{name}": getattr(a, name)().half()
        for side, a in sides.items()
        for name in ("cos", "sin")
    }


def tiled(case: Case, tile: str) -> Case:
    """The case with another tile of flash_fwd than the chooser's."""

    def call(**tensors: Tensor) -> Any:
        with tiles.forced({"flash_fwd": tile}):
            return case.call(**tensors)

    return Case(f"{case.name}, {tile.split()[-1]}", call, case.tensors)


def forward_tiles() -> Iterator[Case]:
    """K and V read without staging, as only `tune` chooses, with partial blocks and pages."""
    tile = "V_SLICE=64 BLOCK_K=16 SIMDGROUPS=4 COLUMN_SIMDGROUPS=1"
    tile += " Q_IN_REGISTERS=1 KV_STAGED=0"
    yield tiled(attention("causal", qkv(HALF, 64, 50, 70), causal=True), tile)
    paged = {"q": torch.randn(1, 4, 20, 64).half(), **pages(64, 41)}
    yield tiled(attention("pages", paged), tile)


def forward() -> Iterator[Case]:
    """flash_fwd in each dtype, size class and feature."""
    yield attention("half 64 causal", qkv(HALF, 64, 100, 130), causal=True)
    yield attention("bfloat 128", qkv(BFLOAT, 128, 37, 65))
    yield attention("half 128 causal", qkv(HALF, 128, 129, 129), causal=True)
    yield attention("float 128", qkv(FLOAT, 128, 37, 65))
    yield attention("bfloat 256", qkv(BFLOAT, 256, 20, 33))
    yield attention("half 80", qkv(HALF, 80, 50, 70))
    yield attention("half 512", qkv(HALF, 512, 9, 17, 2, 1))
    odd = {name: t[..., :71] for name, t in qkv(HALF, 73, 33, 41).items()}
    yield attention("odd head dim and strides", odd)
    small = qkv(HALF, 64, 33, 47)
    yield attention("mask", small, {"attn_mask": torch.rand(33, 47) > 0.3})
    # Of so many scores that blocks which the mask hides are skipped.
    banded = torch.ones(300, 1800, dtype=torch.bool).triu(20).tril(150)
    yield attention("hidden blocks", qkv(HALF, 16, 300, 1800, 2, 1), {"attn_mask": banded})
    yield attention("bias", small, {"attn_bias": torch.randn(4, 33, 47).half()})
    slopes = {"alibi_slopes": torch.rand(4), "learnable_sink": torch.rand(4)}
    yield attention(
        "softcap ALiBi sink", qkv(BFLOAT, 64, 33, 47), slopes, softcap=20.0, causal=True
    )
    sides = qkv(HALF, 64, 70, 90)
    yield attention("window", sides, window_size_left=20, window_size_right=3)
    yield attention("chunk", qkv(HALF, 64, 70, 70), attention_chunk=32, causal=True)
    lengths = {"seqused_k": ints(41), "leftpad_k": ints(5)}
    yield attention("lengths", qkv(HALF, 64, 20, 60), lengths)
    for interleaved in (False, True):
        yield attention(
            "rotary interleaved" if interleaved else "rotary",
            qkv(HALF, 64, 40, 130),
            rotary(40, 130),
            rotary_interleaved=interleaved,
        )
    state = {"rng_state": torch.tensor([1, 2])}
    yield attention("dropout", qkv(HALF, 64, 40, 60), state, dropout_p=0.2)
    paged = {"q": torch.randn(1, 4, 20, 64).half(), **pages(64, 75)}
    yield attention("paged", paged, causal=True)
    for format in FORMATS:
        (k, k_scale), (v, v_scale) = (quantised(format, (1, 2, 75, 64)) for _ in range(2))
        cache = {"k": k, "v": v, "k_scale": k_scale, "v_scale": v_scale}
        yield attention(format, {"q": torch.randn(1, 4, 20, 64).half(), **cache})
    yield Case("forward varlen", _varlen, packed())


def packed() -> dict[str, Tensor]:
    """Sequences of 13, 0 and 47 tokens."""
    shapes = {"q": 4, "k": 2, "v": 2}
    tensors = {name: torch.randn(64, heads, 64).half() for name, heads in shapes.items()}
    return {**tensors, "cu": ints(0, 13, 13, 60)}


def _varlen(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Any:
    return ops.flash_varlen_fwd(q, k, v, cu, cu, 47, 47, causal=True)


def decoding(name: str, tensors: dict[str, Tensor], **options: Any) -> Case:
    """A call of flash_decode."""

    def call(q: Tensor, k: Tensor, v: Tensor | None = None, **given: Tensor) -> Any:
        return ops.flash_decode(q, k, k[..., :512] if v is None else v, **given, **options)

    return Case(f"decode {name}", call, tensors)


def decode() -> Iterator[Case]:
    """flash_decode and the merge of its splits."""
    for heads, kv_heads, head_dim, splits in (
        *((8, 8, 128, 1), (8, 8, 128, 3), (8, 2, 128, 3), (32, 1, 128, 3)),
        *((32, 1, 128, 1), (32, 1, 256, 2), (8, 2, 64, 4)),
    ):
        tensors = qkv(HALF, head_dim, 1, 300, heads, kv_heads)
        name = f"{heads} of {kv_heads} heads {head_dim}, {splits} splits"
        yield decoding(name, tensors, num_splits=splits)
    yield decoding("bfloat causal", qkv(BFLOAT, 64, 3, 200, 8, 2), num_splits=2, causal=True)
    yield decoding("float", qkv(FLOAT, 64, 1, 200, 8, 2), num_splits=2)
    latent = qkv(HALF, 576, 1, 150, 16, 1)
    yield decoding("latent", {"q": latent["q"], "k": latent["k"]}, num_splits=2)
    paged = {"q": torch.randn(1, 8, 1, 128).half(), **pages(128, 275)}
    yield decoding("paged", paged, num_splits=3)
    sink = {**qkv(HALF, 128, 1, 300, 8, 2), "learnable_sink": torch.rand(8)}
    yield decoding("sink and window", sink, num_splits=2, window_size_left=70)
    for format in FORMATS:
        (k, k_scale), (v, v_scale) = (quantised(format, (1, 2, 75, 64)) for _ in range(2))
        cache = {"k": k, "v": v, "k_scale": k_scale, "v_scale": v_scale}
        q = torch.randn(1, 8, 1, 64).half()
        yield decoding(format, {"q": q, **cache}, num_splits=2)


def backward(
    name: str,
    tensors: Mapping[str, Tensor],
    more: Mapping[str, Tensor] | None = None,
    of: str | None = None,
    **options: Any,
) -> Iterator[Case]:
    """A call of flash_bwd, and perhaps of flash_bwd_bias or flash_bwd_slopes."""
    more = more or {}
    out, lse = ops.flash_fwd(*tensors.values(), **more, **options)
    dout = torch.randn_like(out)

    def call(
        dout: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, **given: Tensor
    ) -> Any:
        return ops.flash_bwd(dout, None, q, k, v, out, lse, **given, **options)

    all_tensors = {"dout": dout, "out": out, "lse": lse, **tensors, **more}
    yield Case(f"backward {name}", call, all_tensors)
    if of is None:
        return
    delta = call(**all_tensors)[3]
    op = getattr(ops, f"flash_bwd_{of}")

    def gradient(
        dout: Tensor, lse: Tensor, delta: Tensor, q: Tensor, k: Tensor, v: Tensor, **given: Tensor
    ) -> Any:
        return op(dout, q, k, v, lse, delta, **given, **options)

    own = {"dout": dout, "lse": lse, "delta": delta, **tensors, **more}
    yield Case(f"backward of {of} {name}", gradient, own)


def backwards() -> Iterator[Case]:
    """The backward's kernels."""
    yield from backward("half 64 causal", qkv(HALF, 64, 70, 90), causal=True)
    yield from backward("bfloat 128", qkv(BFLOAT, 128, 37, 45))
    yield from backward("float 64", qkv(FLOAT, 64, 37, 45))
    yield from backward("half 256", qkv(HALF, 256, 20, 23, 2, 1))
    yield from backward("half 80", qkv(HALF, 80, 33, 40))
    # Few KV heads, so that threadgroups share the query heads of one.
    yield from backward("half 64 MQA", qkv(HALF, 64, 100, 520, 4, 1))
    small = qkv(HALF, 64, 33, 47)
    yield from backward("bias", small, {"attn_bias": torch.randn(4, 33, 47).half()}, "bias")
    yield from backward("one bias", small, {"attn_bias": torch.randn(1, 33, 47)}, "bias")
    row = {"attn_bias": torch.randn(1, 1, 47)}
    yield from backward("bias of keys", qkv(BFLOAT, 128, 33, 47), row, "bias")
    yield from backward("ALiBi", small, {"alibi_slopes": torch.rand(4)}, "slopes", causal=True)
    masked = {"attn_mask": torch.rand(33, 47) > 0.3, "learnable_sink": torch.rand(4)}
    yield from backward("softcap sink mask", small, masked, softcap=20.0)
    state = {"rng_state": torch.tensor([1, 2])}
    yield from backward("dropout", qkv(HALF, 64, 40, 60), state, dropout_p=0.2)
    tensors = packed()
    out, lse = _varlen(**tensors)
    own = {"dout": torch.randn_like(out), "out": out, "lse": lse, **tensors}

    def varlen(
        dout: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, cu: Tensor
    ) -> Any:
        return ops.flash_varlen_bwd(dout, None, q, k, v, out, lse, cu, cu, 47, 47, causal=True)

    yield Case("backward varlen", varlen, own)


def cache(
    format: str | None, is_paged: bool, kv_heads: int = 2, head_dim: int = 64
) -> dict[str, Tensor]:
    """Caches of 64 rows."""
    shape = (4, kv_heads, 16, head_dim) if is_paged else (1, kv_heads, 64, head_dim)
    tensors: dict[str, Tensor] = {}
    for name in ("k", "v"):
        if format is None:
            tensors[f"{name}_cache"] = torch.randn(shape).half()
        else:
            tensors[f"{name}_cache"], tensors[f"{name}_scale"] = quantised(format, shape)
    if is_paged:
        tensors["block_table"] = torch.randperm(4).int()[None]
    return tensors


def caches() -> Iterator[Case]:
    """append_kv and decode_step with every format, and copy_pages."""
    for format in (None, *FORMATS):
        for is_paged in (False, True):
            name = f"{format or 'half'}{' paged' if is_paged else ''}"
            new = {"k": torch.randn(1, 2, 5, 64).half(), "v": torch.randn(1, 2, 5, 64).half()}
            rows = {**new, **cache(format, is_paged), "cache_seqlens": ints(19)}
            yield Case(
                f"append {name}",
                ops.append_kv,
                {**rows, "q": torch.randn(1, 4, 5, 64).half(), **tables()},
            )
            for splits in (1, 3):
                step = {
                    "q": torch.randn(1, 8, 1, 64).half(),
                    "k": torch.randn(1, 2, 1, 64).half(),
                    "v": torch.randn(1, 2, 1, 64).half(),
                    **cache(format, is_paged),
                    "cache_seqlens": ints(47),
                    **tables(),
                }

                def call(splits: int = splits, **given: Tensor) -> Any:
                    return ops.decode_step(**given, num_splits=splits)

                yield Case(f"step {name}, {splits} splits", call, step)
    pool = {"cache": torch.randn(8, 2, 16, 64).half()}
    places = {"source": torch.tensor([1, 5, 2]), "destination": torch.tensor([0, 3, 7])}

    def copy(cache: Tensor, source: Tensor, destination: Tensor) -> Any:
        return ops.copy_pages(cache, source, destination)

    yield Case("copy pages", copy, {**pool, **places})


def others() -> Iterator[Case]:
    """softmax, rope, merge and the indexer."""
    for name, dtype, shape, dim in (
        ("softmax", FLOAT, (7, 1000), 1),
        ("softmax half", HALF, (3, 8200), 1),
        ("softmax long", FLOAT, (2, 40000), 1),
        ("softmax of columns", FLOAT, (33, 7), 0),
    ):

        def softmax(x: Tensor, dim: int = dim) -> Any:
            return ops.softmax(x, dim)

        yield Case(name, softmax, {"x": torch.randn(shape).to(dtype)})
    yield Case("causal mask", ops.apply_causal_mask_, {"scores": torch.randn(2, 33, 47)})
    rows = {"q": torch.randn(2, 4, 9, 64).half(), "k": torch.randn(2, 2, 9, 64).half(), **tables()}

    def rotated(q: Tensor, k: Tensor, rotary_cos: Tensor, rotary_sin: Tensor) -> Any:
        return ops.rope(q, k, rotary_cos, rotary_sin, seqlen_offset=3)

    def rotate(q: Tensor, k: Tensor, rotary_cos: Tensor, rotary_sin: Tensor) -> Any:
        ops.rope_(q, k, rotary_cos, rotary_sin, interleaved=True)

    yield Case("rope", rotated, rows)
    yield Case("rope in place", rotate, rows)
    frequencies = {"frequencies": rope.default(64)[0], "positions": torch.arange(20)}

    def rope_tables(frequencies: Tensor, positions: Tensor) -> Any:
        return ops.rope_tables(frequencies, positions)

    yield Case("rope tables", rope_tables, frequencies)
    states = [torch.randn(1, 4, 9, 64).half(), torch.randn(1, 4, 9)] * 2
    named = {f"state{i}": t.clone() for i, t in enumerate(states)}

    def merge(**given: Tensor) -> Any:
        return ops.merge_state(*given.values())

    yield Case("merge", merge, named)
    indexer = {
        "q": torch.randn(2, 4, 9, 64).half(),
        "k": torch.randn(2, 37, 64).half(),
        "weights": torch.randn(2, 4, 9),
    }

    def index_scores(q: Tensor, k: Tensor, weights: Tensor) -> Any:
        return ops.index_scores(q, k, weights, causal=True)

    yield Case("index scores", index_scores, indexer)


def cases() -> Iterator[Case]:
    """All of them, with the same contents in every run."""
    for group in (forward, forward_tiles, decode, backwards, caches, others):
        torch.manual_seed(0)
        yield from group()
