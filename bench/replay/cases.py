"""The problems whose times are compared: forward, backward and decoding, one sequence each."""

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn import simulate
from torch_metal_attn.runtime import extension

from . import peers
from .collect import Collection, Names
from .manifest import LIMITS, NO_LIMIT, OURS, OURS_FLOAT, Candidate, Problem
from .ptx import Source

FLOAT_PRODUCTS = {"MSL_HALF_PRODUCTS": 0}

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
HEADS, KV_HEADS = 16, 4
# (dtype, head dim, length, causal)
FORWARD = [
    *((d, n, 4096, c) for d, n, c in product(("float16", "bfloat16"), (64, 128), (False, True))),
    *(("float16", n, 4096, False) for n in (80, 96, 256)),
    ("float16", 80, 4096, True),
    ("float16", 256, 4096, True),
    ("bfloat16", 256, 4096, False),
    *(("float32", n, 4096, c) for n, c in product((64, 128), (False, True))),
    *(("float16", n, 1024, c) for n, c in product((64, 128), (False, True))),
    ("bfloat16", 128, 1024, False),
]
BACKWARD = list(product(("float16", "bfloat16"), (64, 128), (4096,), (False, True)))

# (queries, KV heads, keys), where both flash_decode and flash_fwd may be called.
FEW = list(product((16, 24, 32), (32, 8, 1), (4096, 32768)))

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
DECODE_LIMITS = (80, 96, 128, 168, NO_LIMIT)
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
    results: tuple[str, ...],
    limits: tuple[int, ...] = LIMITS,
    party: str = OURS,
    extra: Mapping[str, object] | None = None,
    multiprocessors: int = CORES[-1],
) -> Candidate:
    """The launches of an op. results: names of the tensors that it returns, in order."""
    with gpu_of(multiprocessors), simulate(record=True) as run:
        returned = call()
    names = Names({**tensors, **dict(zip(results, returned, strict=False))})
    # What only prepares or finishes is not worth limits of its own.
    main = ("flash_fwd", "flash_bwd_dq", "flash_bwd_dkv", "flash_decode")
    dispatches = [
        collection.recorded(launch, names, limits if launch.kernel in main else (NO_LIMIT,), extra)
        for launch in run.recorded
    ]
    return Candidate(party, label, dispatches, names.scratch)


def operands(dtype: str, head_dim: int, length: int) -> dict[str, Tensor]:
    """q, k and v, with nothing in them."""
    heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
    return {
        name: torch.empty(1, count, length, head_dim, dtype=DTYPES[dtype])
        for name, count in heads.items()
    }


def sizes(dtype: str, head_dim: int, length: int, causal: bool) -> dict[str, Any]:
    """What the machine with the GPU needs to know to make the tensors and the reference."""
    return {
        "dtype": dtype,
        "head_dim": head_dim,
        "length": length,
        "causal": causal,
        "heads": HEADS,
        "kv_heads": KV_HEADS,
    }


def forward(collection: Collection) -> Iterator[Problem]:
    """flash_fwd beside MLX's and torch's kernels."""
    for dtype, head_dim, length, causal in FORWARD:
        t = operands(dtype, head_dim, length)
        out = torch.empty_like(t["q"])

        def call(t: dict[str, Tensor] = t, causal: bool = causal) -> Any:
            return torch.ops.metal_attn.flash_fwd(**t, causal=causal)

        candidates = [ours(collection, "", t, call, ("out", "lse"))]
        if dtype != "float32":
            candidates.append(
                ours(collection, "", t, call, ("out", "lse"), LIMITS, OURS_FLOAT, FLOAT_PRODUCTS)
            )
        candidates += peers.steel(collection, **t, out=out, causal=causal)
        candidates.append(peers.prefill(collection, **t, out=out, causal=causal))
        kind = "causal" if causal else "full"
        name = f"forward-{dtype}-{head_dim}-{length}-{kind}"
        yield Problem(name, "forward", sizes(dtype, head_dim, length, causal), candidates)


def backward(collection: Collection) -> Iterator[Problem]:
    """The three kernels of flash_bwd. Neither MLX nor torch has a Metal kernel for it."""
    for dtype, head_dim, length, causal in BACKWARD:
        t = operands(dtype, head_dim, length)
        more = {
            "dout": torch.empty_like(t["q"]),
            "out": torch.empty_like(t["q"]),
            "lse": torch.empty(1, HEADS, length),
        }

        def call(
            t: dict[str, Tensor] = t, more: dict[str, Tensor] = more, causal: bool = causal
        ) -> Any:
            dout, out, lse = more.values()
            return torch.ops.metal_attn.flash_bwd(dout, None, *t.values(), out, lse, causal=causal)

        one = ours(collection, "", {**t, **more}, call, ("dq", "dk", "dv", "delta"))
        kind = "causal" if causal else "full"
        name = f"backward-{dtype}-{head_dim}-{length}-{kind}"
        yield Problem(name, "backward", sizes(dtype, head_dim, length, causal), [one])


def few(collection: Collection) -> Iterator[Problem]:
    """flash_decode beside flash_fwd for the few queries of a speculative step."""
    for queries, kv_heads, keys in FEW:
        q = torch.empty(1, DECODE_HEADS, queries, DECODE_HEAD_DIM, dtype=torch.float16)
        k = torch.empty(1, kv_heads, keys, DECODE_HEAD_DIM, dtype=torch.float16)
        t = {"q": q, "k": k, "v": torch.empty_like(k)}
        candidates = []
        for name in ("flash_decode", "flash_fwd"):
            call = partial(getattr(torch.ops.metal_attn, name), **t, causal=True)
            candidates.append(ours(collection, name, t, call, ("out", "lse")))
        shape = sizes("float16", DECODE_HEAD_DIM, keys, True) | {"queries": queries}
        shape |= {"heads": DECODE_HEADS, "kv_heads": kv_heads}
        yield Problem(f"few-{queries}-{kv_heads}-{keys}", "few", shape, candidates)


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
    results = ("out", "lse")

    def call(**more: int) -> Any:
        return torch.ops.metal_attn.flash_decode(
            *(tensors[name] for name in inputs), **options, **more
        )

    candidates = []
    for count in cores:
        label = f"chosen for {count} cores"
        candidates.append(
            ours(collection, label, tensors, call, results, DECODE_LIMITS, multiprocessors=count)
        )
    for count in splits:

        def split(count: int = count) -> Any:
            return call(num_splits=count)

        label = f"{count} splits"
        candidates.append(ours(collection, label, tensors, split, results, DECODE_LIMITS))
    return candidates
