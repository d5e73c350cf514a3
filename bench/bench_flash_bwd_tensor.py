"""The inner loops of flash_bwd on tensor tiles, as bench_flash_fwd_tensor counts the forward's.

Of flash_bwd_dq_tensor per 32 keys and 16 queries, and of flash_bwd_dkv_tensor per 32 queries and 16
keys, which are as many scores. Where two SIMD groups share rows, it is what both do. Every query
sees every key.
"""

from itertools import product

import torch

from bench import bench_flash_bwd
from bench.bench_flash_fwd import DTYPES, HEAD_DIMS
from bench.bench_flash_fwd_tensor import COLUMNS, ROWS
from bench.inner_loop import LENGTHS, slopes
from bench.tables import print_table
from torch_metal_attn.runtime.tensor_tiles import on_m5
from torch_metal_attn.simulator import Counters

KERNELS = {"flash_bwd_dq_tensor": "flash_bwd_dq", "flash_bwd_dkv_tensor": "flash_bwd_dkv"}
SHARED = ("tg loads", "tg stores")


def row(kernel: str, head_dim: int, dtype: torch.dtype) -> dict[str, float]:
    """Counts by COLUMNS, and those of threadgroup memory."""

    def counters(walked: int) -> Counters:
        sizes = bench_flash_bwd.lengths(KERNELS[kernel], walked)
        with on_m5():
            return bench_flash_bwd.run(kernel, *sizes, head_dim, dtype)[0]

    return slopes(map(counters, LENGTHS), bench_flash_bwd.OWNED / ROWS, (*COLUMNS, *SHARED))


if __name__ == "__main__":
    cases = product(HEAD_DIMS, (*DTYPES, torch.float32), KERNELS)
    print_table(
        ["kernel", "D", "dtype", *COLUMNS, *SHARED],
        ([kernel, dim, dtype, *row(kernel, dim, dtype).values()] for dim, dtype, kernel in cases),
    )
