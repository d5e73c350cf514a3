"""The inner loops of attention's gradient kernels, and the cost of each feature.

flash_bwd_dq owns queries and walks over keys: its rows are what a thread executes per 32 keys and 8
queries. flash_bwd_dkv owns keys and walks over queries: per 32 queries and 8 keys, which are as
many scores. Every query sees every key.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from bench.bench_flash_fwd import DTYPES, HEAD_DIMS, HEADINGS, OF_LENGTHS, ROWS, Options
from bench.inner_loop import LENGTHS, slopes
from bench.tables import print_table
from torch_metal_attn import simulate
from torch_metal_attn.reference import attention
from torch_metal_attn.simulator import Counters

OWNED = 64  # rows of the side that a kernel owns: a multiple of every tile
KERNELS = ("flash_bwd_dq", "flash_bwd_dkv")


def run(
    kernel: str, q_length: int, kv_length: int, head_dim: int, dtype: torch.dtype, **options: Any
) -> tuple[Counters, dict[str, str]]:
    """Counters and defines of one kernel in a backward of one head, as autograd calls it."""
    q, dout = (torch.randn(1, 1, q_length, head_dim).to(dtype) for _ in range(2))
    k, v = (torch.randn(1, 1, kv_length, head_dim).to(dtype) for _ in range(2))
    out, lse = attention(q, k, v, **options)
    with simulate(count=True) as session:
        torch.ops.metal_attn_simulator.flash_bwd(
            dout, None, q, k, v, out, lse, exact_delta=True, **options
        )
    defines = next(launch.defines for launch in session.launches if launch.kernel == kernel)
    return session.counters[kernel], defines


def lengths(kernel: str, walked: int) -> tuple[int, int]:
    """q_length and kv_length of a kernel that walks over this many rows."""
    return (OWNED, walked) if kernel == "flash_bwd_dq" else (walked, OWNED)


def ours(
    kernel: str, head_dim: int, dtype: torch.dtype, options: Options = lambda *_: {}
) -> dict[str, float]:
    """Counts of the specialisation that the op chooses.

    options: a feature's arguments, from the numbers of queries and keys, the head dim and the
        dtype.
    """

    def counters(walked: int) -> Counters:
        sizes = (*lengths(kernel, walked), head_dim, dtype)
        return run(kernel, *sizes, **options(*sizes))[0]

    return slopes(map(counters, LENGTHS), OWNED / ROWS)


def tile(kernel: str, head_dim: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Rows that a SIMD group owns, rows of a block of the walked side, and slices of the result."""
    _, defines = run(kernel, *lengths(kernel, 128), head_dim, dtype)
    walks_queries = kernel == "flash_bwd_dkv"
    columns = int(defines["DK_SLICE" if walks_queries else "DQ_SLICE"])
    block = int(defines["BLOCK_Q" if walks_queries else "BLOCK_K"])
    return 8 * int(defines["ROW_FRAGMENTS"]), block, -(-head_dim // columns)


FEATURES = {
    name: OF_LENGTHS[name]
    for name in (
        *("none", "causal", "window", "chunk", "seqused_k", "bool mask", "bias", "softcap"),
        *("ALiBi", "sink", "rotary of q and k"),
    )
}


def kernel_rows() -> Iterator[list[Any]]:
    """Full attention, and each kernel's tile."""
    for head_dim, dtype, kernel in product(HEAD_DIMS, DTYPES, KERNELS):
        owned, block, slices = tile(kernel, head_dim, dtype)
        name = f"{kernel}, {owned} rows, blocks of {block}, {slices} slices"
        yield [name, head_dim, dtype, *ours(kernel, head_dim, dtype).values()]


def feature_rows() -> Iterator[list[Any]]:
    """Each feature by itself, where the head dim is 64."""
    for kernel, name in product(KERNELS, FEATURES):
        cells = ours(kernel, 64, torch.float16, FEATURES[name]).values()
        yield [f"{kernel.removeprefix('flash_bwd_')}: {name}", 64, torch.float16, *cells]


if __name__ == "__main__":
    print_table(["kernel, rows a SIMD group owns", *HEADINGS], kernel_rows())
    print_table(["feature", *HEADINGS], feature_rows())
