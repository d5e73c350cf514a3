"""The problems whose times are compared: a copy, and one step of decoding for one sequence."""

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.front_end import Source
from torch_metal_attn import simulate
from torch_metal_attn.runtime import extension

from . import peers
from .collect import Collection, Names
from .manifest import NO_LIMIT, OURS, Candidate, Problem

# Decoding: one query of each of 32 heads.
DECODE_HEADS, DECODE_KEYS, DECODE_HEAD_DIM = 32, 32768, 128
DECODE_KV_HEADS = (32, 8, 1)
CORES = (16, 32, 64, 132)
UNKNOWN_CORES = 40  # what csrc/runtime/callbacks.cpp begins with
# With 128 registers a thread a multiprocessor holds 16 SIMD groups, and a core of M1 or M2 12.
CORES_OF_MULTIPROCESSORS = 16 / 12
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384)
MLX_BLOCKS = (64, 128, 256)
# Moves 16 bytes at a time, in as many threads as are given: what memory can do at best.
COPY = """
#include <metal_stdlib>
using namespace metal;
kernel void copy(device uint4* out [[buffer(0)]], const device uint4* x [[buffer(1)]],
                 constant uint& count [[buffer(2)]], uint i [[thread_position_in_grid]],
                 uint threads [[threads_per_grid]]) {
  for (; i < count; i += threads) {
    out[i] = x[i];
  }
}
"""
COPY_BYTES = 2**30
COPY_THREADS = 256
# Numbers of registers a thread may use; 128 on M1 and M2.
LIMITS = (80, 96, 128, 168, NO_LIMIT)
PAGE = 16


@contextmanager
def gpu_of(multiprocessors: int) -> Iterator[None]:
    """Choices in it are those for a GPU that is as large."""
    library = extension.load()
    library.metal_attn_set_gpu_cores(math.ceil(multiprocessors * CORES_OF_MULTIPROCESSORS))
    try:
        yield
    finally:
        library.metal_attn_set_gpu_cores(UNKNOWN_CORES)


def ours(
    collection: Collection,
    label: str,
    tensors: Mapping[str, Tensor],
    call: Callable[[], Any],
    multiprocessors: int = CORES[-1],
) -> Candidate:
    """The launches of an op that returns out and lse."""
    with gpu_of(multiprocessors), simulate(record=True) as run:
        returned = call()
    names = Names({**tensors, **dict(zip(("out", "lse"), returned, strict=True))})
    # What only prepares or finishes is not worth limits of its own.
    dispatches = [
        collection.recorded(
            launch, names, LIMITS if launch.kernel == "flash_decode" else (NO_LIMIT,)
        )
        for launch in run.recorded
    ]
    return Candidate(OURS, label, dispatches, names.scratch)


def copy(collection: Collection) -> Iterator[Problem]:
    """A copy, by as many threadgroups as eight a core, and as a large grid."""
    x = torch.empty(COPY_BYTES, dtype=torch.uint8)
    tensors = {"out": torch.empty_like(x), "q": x}
    count = struct.pack("I", COPY_BYTES // 16)
    candidates = []
    for groups in (*(8 * cores for cores in CORES), 4096):
        launch = collection.launch(
            Source(COPY, "copy", COPY_THREADS),
            (groups, 1, 1),
            (COPY_THREADS, 1, 1),
            (*tensors.values(), count),
            Names(tensors),
        )
        candidates.append(Candidate("copy", f"{groups} threadgroups", [launch]))
    yield Problem("copy", "copy", {"bytes": COPY_BYTES}, candidates)


def decode(collection: Collection) -> Iterator[Problem]:
    """flash_decode with float16, 8-bit and paged caches, beside MLX's and torch's kernels."""
    for kv_heads in DECODE_KV_HEADS:
        q = torch.empty(1, DECODE_HEADS, 1, DECODE_HEAD_DIM, dtype=torch.float16)
        k = torch.empty(1, kv_heads, DECODE_KEYS, DECODE_HEAD_DIM, dtype=torch.float16)
        tensors = {"q": q, "k": k, "v": torch.empty_like(k)}
        plain = [
            *_decode(collection, tensors, CORES, SPLITS),
            *(
                peers.mlx_vector(collection, **tensors, out=torch.empty_like(q), blocks=blocks)
                for blocks in (1, *MLX_BLOCKS)
            ),
            peers.torch_vector(collection, **tensors, out=torch.empty_like(q)),
        ]
        shape = {"heads": DECODE_HEADS, "kv_heads": kv_heads, "keys": DECODE_KEYS}
        shape["head_dim"] = DECODE_HEAD_DIM
        yield Problem(f"decode-float16-{kv_heads}", "decode", {**shape, "cache": "float16"}, plain)
        cache = torch.empty(1, kv_heads, DECODE_KEYS, DECODE_HEAD_DIM, dtype=torch.int8)
        scale = torch.empty(1, kv_heads, DECODE_KEYS, DECODE_HEAD_DIM // 32, dtype=torch.float16)
        eight = {"q": q, "k": cache, "v": torch.empty_like(cache), "k_scale": scale}
        eight["v_scale"] = torch.empty_like(scale)
        yield Problem(
            f"decode-q8_0-{kv_heads}",
            "decode",
            {**shape, "cache": "q8_0"},
            _decode(collection, eight, CORES),
        )
        pages = math.ceil(DECODE_KEYS / PAGE)
        pool = torch.empty(pages, kv_heads, PAGE, DECODE_HEAD_DIM, dtype=torch.float16)
        paged = {
            "q": q,
            "k": pool,
            "v": torch.empty_like(pool),
            "block_table": torch.arange(pages, dtype=torch.int32)[None],
            "seqused_k": torch.tensor([DECODE_KEYS], dtype=torch.int32),
        }
        yield Problem(
            f"decode-paged-{kv_heads}",
            "decode",
            {**shape, "cache": "paged", "page": PAGE},
            _decode(collection, paged, CORES),
        )


def _decode(
    collection: Collection,
    tensors: dict[str, Tensor],
    cores: tuple[int, ...],
    splits: tuple[int, ...] = (),
) -> list[Candidate]:
    """As the op chooses for GPUs of so many cores, and with given numbers of splits."""
    inputs = ("q", "k", "v")
    options = {name: tensor for name, tensor in tensors.items() if name not in inputs}

    def call(**more: int) -> Any:
        return torch.ops.metal_attn.flash_decode(
            *(tensors[name] for name in inputs), **options, **more
        )

    chosen = [ours(collection, f"chosen for {n} cores", tensors, call, n) for n in cores]
    return chosen + [
        ours(collection, f"{n} splits", tensors, partial(call, num_splits=n)) for n in splits
    ]
