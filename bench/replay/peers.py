"""MLX's and PyTorch's decoding kernels as candidates, with grids of their own."""

import struct
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from bench.front_end import Source
from tests.outside import peers
from torch_metal_attn.simulator.metal.constants import ConstantValue

from .collect import Argument, Collection, Names
from .manifest import Candidate

VECTOR_PARTY = "MLX sdpa_vector"
DECODE_PARTY = "torch sdpa_vector"

SIMD_LANES = 32


def mlx_vector(
    collection: Collection, q: Tensor, k: Tensor, v: Tensor, out: Tensor, blocks: int
) -> Candidate:
    """MLX's decoding attention: in one pass (`blocks` 1), or with so many blocks of keys in two."""
    heads, kv_heads, kv_length, head_dim = q.shape[1], *k.shape[1:]
    group = heads // kv_heads
    strides = [struct.pack("Q", s) for t in (k, v) for s in (t.stride(1), t.stride(2))]
    scale, keys = struct.pack("f", head_dim**-0.5), struct.pack("i", kv_length)

    def source(kernel: str, threads: int) -> Source:
        off = ("has_mask", "query_transposed", "do_causal", "bool_mask", "float_mask", "has_sinks")
        constants: dict[int | str, ConstantValue] = {**dict.fromkeys(off, False), "blocks": blocks}
        return Source(
            peers.SDPA_VECTOR,
            kernel,
            threads,
            {"ELEMENT": peers.METAL_TYPES[q.dtype], "HEAD_DIM": head_dim},
            constants,
            (peers.include_dir(peers.MLX),),
        )

    names = Names({"q": q, "k": k, "v": v, "out": out})
    if blocks == 1:
        arguments: list[Argument] = [q, k, v, out, struct.pack("i", group), keys, *strides, scale]
        only = collection.launch(source("one", 1024), (heads, 1, 1), (1024, 1, 1), arguments, names)
        return Candidate(VECTOR_PARTY, "one pass", [only])
    partial = torch.empty(heads, blocks, head_dim, dtype=q.dtype)
    sums, maxima = torch.empty(heads, blocks), torch.empty(heads, blocks)
    first = collection.launch(
        source("first", SIMD_LANES * group),
        (kv_heads, 1, blocks),
        (SIMD_LANES, group, 1),
        (q, k, v, partial, sums, maxima, None, keys, *strides, scale),
        names,
    )
    second = collection.launch(
        source("second", 1024),
        (heads, 1, 1),
        (1024, 1, 1),
        (partial, sums, maxima, out, struct.pack("i", blocks)),
        names,
    )
    return Candidate(VECTOR_PARTY, f"two passes, {blocks} blocks", [first, second], names.scratch)


def torch_vector(collection: Collection, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Candidate:
    """PyTorch's decoding attention in two passes, as it runs for many keys."""
    heads, kv_length, head_dim = q.shape[1], *k.shape[2:]
    include: Sequence[Path] = (peers.include_dir(peers.TORCH),)
    element, blocks = peers.METAL_TYPES[q.dtype], 32

    def three(values: Sequence[int]) -> bytes:
        return struct.pack("4I", *values, 0)

    arguments: list[Argument] = [
        struct.pack("I", heads // k.shape[1]),
        struct.pack("I", kv_length),
        three([t.stride(1) for t in (q, k, v)]),
        three([t.stride(2) for t in (q, k, v)]),
        struct.pack("f", head_dim**-0.5),
        bytes(16),
        bytes(16),
        struct.pack("4I", *(t.stride(0) % 2**32 for t in (q, k, v)), heads),
    ]
    names = Names({"q": q, "k": k, "v": v, "out": out})
    partial = torch.empty(heads, blocks, head_dim, dtype=q.dtype)
    sums, maxima = torch.empty(heads, blocks), torch.empty(heads, blocks)
    first = f"sdpa_vector_2pass_1_{element}_{head_dim}_{head_dim}_masknone"
    second = f"sdpa_vector_2pass_2_{element}_{head_dim}"
    dispatches = [
        collection.launch(
            Source(peers.DECODE, first, 256, include_dirs=include),
            (heads, 1, blocks),
            (256, 1, 1),
            (q, k, v, partial, sums, maxima, *arguments),
            names,
        ),
        collection.launch(
            Source(peers.DECODE, second, 1024, include_dirs=include),
            (heads, 1, 1),
            (1024, 1, 1),
            (partial, sums, maxima, out),
            names,
        ),
    ]
    return Candidate(DECODE_PARTY, "two passes", dispatches, names.scratch)
