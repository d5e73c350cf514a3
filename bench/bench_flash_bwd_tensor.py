"""The inner loops of flash_bwd on tensor tiles, as bench_flash_fwd_tensor counts the forward's.

Of flash_bwd_dq_tensor per 32 keys and 16 queries, and of flash_bwd_dkv_tensor per 32 queries and 16
keys, which are as many scores. Where two SIMD groups share rows, it is what both do. Every query
sees every key.
"""

from itertools import product

import torch

from bench import bench_flash_bwd
from bench.bench_flash_fwd import DTYPES, HEAD_DIMS
from bench.bench_flash_fwd_tensor import HEADINGS, ROWS, on_m5, slopes
from bench.inner_loop import KEYS, LENGTHS
from bench.tables import print_table
from torch_metal_attn.simulator import Counters

KERNELS = {"flash_bwd_dq_tensor": "flash_bwd_dq", "flash_bwd_dkv_tensor": "flash_bwd_dkv"}
THREADGROUP: tuple[str, ...] = ("threadgroup loads", "threadgroup stores")
SIMD_LANES = 32


def row(kernel: str, head_dim: int, dtype: torch.dtype) -> list[float]:
    """Counts in the order of HEADINGS, and of THREADGROUP."""

    def counters(walked: int) -> Counters:
        sizes = bench_flash_bwd.lengths(KERNELS[kernel], walked)
        with on_m5():
            return bench_flash_bwd.run(kernel, *sizes, head_dim, dtype)[0]

    short, long = (counters(walked) for walked in LENGTHS)
    blocks = (LENGTHS[1] - LENGTHS[0]) / KEYS
    threads = bench_flash_bwd.OWNED / ROWS * SIMD_LANES
    shared = [
        (getattr(long, name)["threadgroup"] - getattr(short, name)["threadgroup"])
        / (blocks * threads)
        for name in ("loads", "stores")
    ]
    return [*slopes(short, long), *shared]


if __name__ == "__main__":
    cases = product(HEAD_DIMS, (*DTYPES, torch.float32), KERNELS)
    print_table(
        ["kernel", "D", "dtype", *HEADINGS, *THREADGROUP],
        ([kernel, dim, dtype, *row(kernel, dim, dtype)] for dim, dtype, kernel in cases),
    )
