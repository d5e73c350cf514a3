"""The inner loops on tensor tiles, flash_fwd's next to MLX's and PyTorch's kernels for M5.

Each row is what a thread executes per 32 keys and 16 query rows, all of which are visible; of
flash_bwd_dkv_tensor per 32 queries and 16 keys, which are as many scores. Where two SIMD groups of
a gradient share rows, it is what both do. Nothing here says what it costs on a GPU.
"""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch

from bench import bench_flash_bwd
from bench.bench_flash_fwd import DTYPES, HEAD_DIMS, Q_LENGTH, operands
from bench.inner_loop import LENGTHS, slopes
from bench.tables import print_table
from tests.outside.peers import PeerUnavailable
from tests.outside.tensor_peers import mlx_nax_attention, torch_mpp_attention
from torch_metal_attn import simulate
from torch_metal_attn.runtime.tensor_tiles import on_m5
from torch_metal_attn.simulator import Counters

ROWS = 16
COLUMNS = (
    *("products", "device loads", "device loads (bytes)", "converts", "exps", "floats"),
    *("integers", "addresses", "selects", "shuffles", "barriers"),
)


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Counters:
    """Of the op on an M5."""
    with on_m5(), simulate(count=True) as run:
        torch.ops.metal_attn.flash_fwd(q, k, v)
    return run.counters["flash_fwd_tensor"]


KERNELS: dict[str, Callable[..., Counters]] = {
    "flash_fwd_tensor": ours,
    "MLX 0.32.4 steel_attention_nax": lambda *qkv: mlx_nax_attention(*qkv, count=True)[1],
    "torch 2.15.0 prefill_attention_mpp": lambda *qkv: torch_mpp_attention(*qkv, count=True)[1],
}


def row(kernel: Callable[..., Counters], head_dim: int, dtype: torch.dtype) -> dict[str, float]:
    """What a thread of one kernel does, by COLUMNS."""
    found = (kernel(*operands(length, head_dim, dtype)) for length in LENGTHS)
    return slopes(found, Q_LENGTH / ROWS, COLUMNS)


GRADIENTS = {"flash_bwd_dq_tensor": "flash_bwd_dq", "flash_bwd_dkv_tensor": "flash_bwd_dkv"}
GRADIENT_COLUMNS = (*COLUMNS, "tg loads", "tg stores")


def gradient_row(kernel: str, head_dim: int, dtype: torch.dtype) -> dict[str, float]:
    """What a thread of one of GRADIENTS does, by GRADIENT_COLUMNS."""

    def counters(walked: int) -> Counters:
        sizes = bench_flash_bwd.lengths(GRADIENTS[kernel], walked)
        with on_m5():
            return bench_flash_bwd.run(kernel, *sizes, head_dim, dtype)[0]

    return slopes(map(counters, LENGTHS), bench_flash_bwd.OWNED / ROWS, GRADIENT_COLUMNS)


def rows() -> Iterator[list[Any]]:
    """Every kernel in 16 bit, and ours in float32."""
    cases = [*product(HEAD_DIMS, DTYPES, KERNELS)]
    cases += [(head_dim, torch.float32, "flash_fwd_tensor") for head_dim in HEAD_DIMS]
    for head_dim, dtype, name in cases:
        try:
            yield [name, head_dim, dtype, *row(KERNELS[name], head_dim, dtype).values()]
        except PeerUnavailable as error:
            yield [name, head_dim, dtype, f"not counted: {error}"]


if __name__ == "__main__":
    print_table(["kernel", "D", "dtype", *COLUMNS], rows())
    cases = product(HEAD_DIMS, (*DTYPES, torch.float32), GRADIENTS)
    print_table(
        ["kernel", "D", "dtype", *GRADIENT_COLUMNS],
        (
            [name, dim, dtype, *gradient_row(name, dim, dtype).values()]
            for dim, dtype, name in cases
        ),
    )
