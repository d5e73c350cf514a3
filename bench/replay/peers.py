"""MLX's and PyTorch's kernels as candidates, with the tiles and grids of their own."""

import math
import struct
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tests.outside import peers
from torch_metal_attn.simulator.metal.constants import ConstantValue

from .collect import Argument, Collection, Names
from .manifest import LIMITS, Candidate
from .ptx import Source

STEEL_PARTY = "MLX steel_attention"
PREFILL_PARTY = "torch prefill_attention"
VECTOR_PARTY = "MLX sdpa_vector"
DECODE_PARTY = "torch sdpa_vector"

SIMD_LANES = 32


def _bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.tolist())


def copied_bytes(block: int, head_dim: int, threads: int, dtype: torch.dtype) -> int:
    """The alignment, up to 16, of a thread's share of a block of keys, which both divide evenly."""
    return math.gcd(block * head_dim // threads * dtype.itemsize, 16)


def steel(
    collection: Collection, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *, causal: bool
) -> list[Candidate]:
    """MLX's full attention. At D 256 it has two SIMD groups per 8 rows and either block of keys."""
    heads, q_length, head_dim = q.shape[1:]
    steps = (16, 32) if head_dim == 256 else (peers.block_k(head_dim),)
    columns = 2 if head_dim == 256 else 1
    candidates = []
    for step in steps:
        aligned = (q_length % peers.BLOCK_Q == 0, k.shape[2] % step == 0)
        kernel = peers.steel_kernel(
            q.dtype,
            head_dim,
            causal=causal,
            aligned=aligned,
            step=step,
            column_simdgroups=columns,
        )
        joined = copied_bytes(step, head_dim, kernel["threads"], q.dtype)
        source = Source(**kernel, joined_bytes=joined)
        names = Names({"q": q, "k": k, "v": v, "out": out})
        dispatch = collection.launch(
            source,
            (-(-q_length // peers.BLOCK_Q), heads, q.shape[0]),
            (SIMD_LANES, 4, columns),
            (q, k, v, out, _bytes(peers.steel_params(q, k, v, out, step))),
            names,
            LIMITS,
        )
        candidates.append(Candidate(STEEL_PARTY, f"{step} keys a block", [dispatch]))
    return candidates


def prefill(
    collection: Collection, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *, causal: bool
) -> Candidate:
    """PyTorch's prefill attention."""
    heads, q_length, head_dim = q.shape[1:]
    kernel = peers.prefill_kernel(q.dtype, head_dim, causal=causal)
    block_q, step = (16, 8) if head_dim == 256 else (peers.BLOCK_Q, peers.block_k(head_dim))
    joined = copied_bytes(step, head_dim, kernel["threads"], q.dtype)
    source = Source(**kernel, joined_bytes=joined)
    no_mask = bytes(32)
    dispatch = collection.launch(
        source,
        (-(-q_length // block_q), heads, q.shape[0]),
        (kernel["threads"], 1, 1),
        (q, k, v, out, _bytes(peers.prefill_params(q, k, v, out)), no_mask, no_mask),
        Names({"q": q, "k": k, "v": v, "out": out}),
        LIMITS,
    )
    return Candidate(PREFILL_PARTY, "", [dispatch])


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
