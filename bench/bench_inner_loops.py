"""Counts of the inner loops of attention and its gradients, with features, and of MLX and PyTorch.

A row is per thread, for 32 visible keys and 8 query rows (16 on tensor tiles). Kernels that loop
over queries (dkv) have 32 queries and 8 or 16 keys. If two SIMD groups of a gradient share rows,
the row is the sum of both.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from itertools import product
from typing import Any

import torch
from torch import Tensor

from bench.features import OF_LENGTHS, OfLengths
from bench.inner_loop import COLUMNS, LENGTHS, slopes
from bench.tables import print_table
from tests.outside import peers
from torch_metal_attn import simulate
from torch_metal_attn.reference import attention
from torch_metal_attn.runtime.tensor_tiles import on_m5
from torch_metal_attn.simulator import Counters
from torch_metal_attn.tuned import tiles

HEAD_DIMS = (64, 128)
DTYPES = (torch.float16, torch.bfloat16)
OWNED = 64  # rows of the side that a kernel does not loop over: a multiple of every tile
GRADIENTS = ("flash_bwd_dq", "flash_bwd_dkv")
TENSOR_GRADIENTS = tuple(f"{kernel}_tensor" for kernel in GRADIENTS)
TENSOR_COLUMNS = (
    *("products", "device loads", "device loads (bytes)", "converts", "exps", "floats"),
    *("integers", "addresses", "selects", "shuffles", "barriers"),
)
PEERS: dict[str, Callable[..., tuple[Tensor, Counters]]] = {
    "MLX 0.32.4 steel_attention": peers.mlx_steel_attention,
    "torch 2.15.0 prefill_attention": peers.torch_prefill_attention,
}
TENSOR_PEERS: dict[str, Callable[..., tuple[Tensor, Counters]]] = {
    "MLX 0.32.4 steel_attention_nax": peers.mlx_nax_attention,
    "torch 2.15.0 prefill_attention_mpp": peers.torch_mpp_attention,
}


def operands(q_length: int, kv_length: int, head_dim: int, dtype: torch.dtype) -> list[Tensor]:
    lengths = (q_length, kv_length, kv_length)
    return [torch.randn(1, 1, length, head_dim).to(dtype) for length in lengths]


def run(
    kernel: str,
    q_length: int,
    kv_length: int,
    head_dim: int,
    dtype: torch.dtype,
    q_dtype: torch.dtype | None = None,
    **options: Any,
) -> tuple[Counters, dict[str, str]]:
    """Counters and defines of a kernel, in a forward of one head or in its backward."""
    q, k, v = operands(q_length, kv_length, head_dim, dtype)
    q = q.to(q_dtype or dtype)
    with on_m5() if kernel.endswith("tensor") else nullcontext(), simulate(count=True) as session:
        if "fwd" in kernel:
            torch.ops.metal_attn.flash_fwd(q, k, v, **options)
        else:
            out, lse = attention(q, k, v, **options)
            torch.ops.metal_attn_simulator.flash_bwd(
                torch.randn_like(q), None, q, k, v, out, lse, exact_delta=True, **options
            )
    defines = next(launch.defines for launch in session.launches if launch.kernel == kernel)
    return session.counters[kernel], defines


def lengths(kernel: str, looped: int) -> tuple[int, int]:
    """q_length and kv_length of a kernel that loops over this many rows."""
    return (looped, OWNED) if "dkv" in kernel else (OWNED, looped)


def per_block(kernel: str, counted: Iterable[Counters]) -> dict[str, float]:
    columns, rows = COLUMNS, 8
    if kernel.endswith("tensor") or kernel in TENSOR_PEERS:
        columns, rows = TENSOR_COLUMNS, 16
    if kernel in TENSOR_GRADIENTS:
        columns += ("tg loads", "tg stores")
    return slopes(counted, OWNED / rows, columns)


def ours(
    kernel: str,
    head_dim: int,
    dtype: torch.dtype,
    options: OfLengths = OF_LENGTHS["none"],
    q_dtype: torch.dtype | None = None,
) -> dict[str, float]:
    """Counts of the specialisation that the op chooses. options: a feature's arguments."""

    def counters(looped: int) -> Counters:
        sizes = (*lengths(kernel, looped), head_dim, dtype)
        return run(kernel, *sizes, q_dtype, **options(*sizes))[0]

    return per_block(kernel, map(counters, LENGTHS))


def unstaged(head_dim: int, dtype: torch.dtype) -> dict[str, float]:
    """Counts of a tile that fits into M1's registers and reads K and V from device memory."""
    tile = f"V_SLICE={head_dim} BLOCK_K=32 SIMDGROUPS=4"
    places = "COLUMN_SIMDGROUPS=1 Q_IN_REGISTERS=1 KV_STAGED=0"
    with tiles.forced({"flash_fwd": f"{tile} {places}"}):
        return ours("flash_fwd", head_dim, dtype)


def peer_cells(name: str, head_dim: int, dtype: torch.dtype) -> list[Any]:
    attend = (PEERS | TENSOR_PEERS)[name]
    problems = (operands(OWNED, length, head_dim, dtype) for length in LENGTHS)
    try:
        return [*per_block(name, (attend(*qkv, count=True)[1] for qkv in problems)).values()]
    except peers.PeerUnavailable as error:
        return [f"not counted: {error}"]


def tile(kernel: str, head_dim: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """The rows that a SIMD group owns, the rows of a block that it loops over, and the slices."""
    _, defines = run(kernel, *lengths(kernel, 128), head_dim, dtype)
    dkv = kernel == "flash_bwd_dkv"
    columns = int(defines["DK_SLICE" if dkv else "DQ_SLICE"])
    block = int(defines["BLOCK_Q" if dkv else "BLOCK_K"])
    return 8 * int(defines["ROW_FRAGMENTS"]), block, -(-head_dim // columns)


# Features of the gradients; unsupported features and features of equal cost are left out.
FEATURES = {
    name: OF_LENGTHS[name]
    for name in (
        *("none", "causal", "window", "chunk", "seqused_k", "bool mask", "bias", "softcap"),
        *("ALiBi", "sink", "rotary of q and k"),
    )
}


def forward_rows() -> Iterator[list[Any]]:
    for sizes in product(HEAD_DIMS, DTYPES):
        yield ["flash_fwd", *sizes, *ours("flash_fwd", *sizes).values()]
        wide = ours("flash_fwd", *sizes, q_dtype=torch.float32)
        yield ["flash_fwd, float32 queries", *sizes, *wide.values()]
        yield ["flash_fwd, nothing staged", *sizes, *unstaged(*sizes).values()]
        for name in PEERS:
            yield [name, *sizes, *peer_cells(name, *sizes)]


def gradient_rows() -> Iterator[list[Any]]:
    for head_dim, dtype, kernel in product(HEAD_DIMS, DTYPES, GRADIENTS):
        owned, block, slices = tile(kernel, head_dim, dtype)
        name = f"{kernel}, {owned} rows, blocks of {block}, {slices} slices"
        yield [name, head_dim, dtype, *ours(kernel, head_dim, dtype).values()]


def feature_rows() -> Iterator[list[Any]]:
    """Each feature alone. The gradients have head dim 64 only."""
    problems = [("flash_fwd", *each) for each in product(HEAD_DIMS, OF_LENGTHS)]
    problems += [(kernel, 64, name) for kernel, name in product(GRADIENTS, FEATURES)]
    for kernel, head_dim, name in problems:
        cells = ours(kernel, head_dim, torch.float16, OF_LENGTHS[name]).values()
        yield [f"{kernel}: {name}", head_dim, torch.float16, *cells]


def tensor_rows() -> Iterator[list[Any]]:
    for sizes in product(HEAD_DIMS, DTYPES):
        yield ["flash_fwd_tensor", *sizes, *ours("flash_fwd_tensor", *sizes).values()]
        for name in TENSOR_PEERS:
            yield [name, *sizes, *peer_cells(name, *sizes)]
    for sizes in product(HEAD_DIMS, (torch.float32,)):
        yield ["flash_fwd_tensor", *sizes, *ours("flash_fwd_tensor", *sizes).values()]


def tensor_gradient_rows() -> Iterator[list[Any]]:
    problems = product(HEAD_DIMS, (*DTYPES, torch.float32), TENSOR_GRADIENTS)
    for head_dim, dtype, kernel in problems:
        yield [kernel, head_dim, dtype, *ours(kernel, head_dim, dtype).values()]


if __name__ == "__main__":
    sizes = ("D", "dtype")
    print_table(["kernel", *sizes, *COLUMNS], forward_rows())
    print_table(["kernel, rows a SIMD group owns", *sizes, *COLUMNS], gradient_rows())
    print_table(["feature", *sizes, *COLUMNS], feature_rows())
    print_table(["kernel", *sizes, *TENSOR_COLUMNS], tensor_rows())
    columns = ("kernel", *sizes, *TENSOR_COLUMNS, "tg loads", "tg stores")
    print_table(columns, tensor_gradient_rows())
