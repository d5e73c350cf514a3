"""MLX's and PyTorch's attention on Metal 4's tensor operations, unmodified, in the simulator."""

import torch
from torch import Tensor

from torch_metal_attn.simulator import Counters, compile_shader

from . import peers

# Both kernels have four SIMD groups of 16 queries each, and blocks of 32 keys.
BLOCK_Q, BLOCK_K, SIMDGROUPS = 64, 32, 4

NAX = """
#include "mlx/backend/metal/kernels/utils.h"
#include "mlx/backend/metal/kernels/steel/attn/kernels/steel_attention_nax.h"
using Kernel =
    decltype(attention_nax<ELEMENT, 64, 32, HEAD_DIM, HEAD_DIM, 4, 1, MASK, float>);
template [[host_name("nax")]] [[kernel]] Kernel
attention_nax<ELEMENT, 64, 32, HEAD_DIM, HEAD_DIM, 4, 1, MASK, float>;
"""
MPP = f"{peers.PREFILL}#include <ATen/native/mps/kernels/MppAttention.h>\n"


def grid(q: Tensor) -> tuple[int, int, int]:
    """Threads of both kernels' grids, which have a threadgroup of (32, 4, 1) for each block."""
    batch, heads, q_length, _ = q.shape
    return -(-q_length // BLOCK_Q) * 32, heads * SIMDGROUPS, batch


def mlx_nax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    check: bool = False,
    count: bool = False,
    lane_map: str | int = "apple10",
) -> tuple[Tensor, Counters]:
    """MLX's attention for M5: arguments and result as of `peers.mlx_steel_attention`."""
    head_dim, kv_length = q.shape[3], k.shape[2]
    library = compile_shader(
        NAX,
        include_dirs=[peers.include_dir(peers.MLX)],
        defines={
            "ELEMENT": peers.METAL_TYPES[q.dtype],
            "HEAD_DIM": head_dim,
            "MASK": "bool" if mask is not None and mask.dtype == torch.bool else "float",
        },
        constants={
            "align_Q": q.shape[2] % BLOCK_Q == 0,
            "align_K": kv_length % BLOCK_K == 0,
            "has_mask": mask is not None,
            "do_causal": causal,
            "has_sinks": False,
            "save_lse": False,
        },
        check=check,
        count=count,
        language="4.0",
    )
    out = torch.full_like(q, torch.nan)
    arguments = [q, k, v, out, peers.steel_params(q, k, v, out, BLOCK_K, BLOCK_Q)]
    if mask is not None:
        arguments += [peers.params(("3q", peers.outer_strides(mask))), mask]
    library.nax(*arguments, threads=grid(q), group_size=(32, SIMDGROUPS, 1), lane_map=lane_map)
    assert library.last_counters is not None
    return out, library.last_counters


def torch_mpp_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    check: bool = False,
    count: bool = False,
    table: str = "apple10",
    lane_map: str | int | None = None,
) -> tuple[Tensor, Counters]:
    """PyTorch 2.15's attention for macOS 26.2, as of `peers.torch_prefill_attention`.

    table: the lane map that the kernel is written for; the one that it runs under if none is given.
    """
    element = peers.TORCH_TYPES[q.dtype]
    name = (
        f"prefill_attention_mpp_{table.replace('apple', 'a')}_{element}_bq{BLOCK_Q}_bk{BLOCK_K}"
        f"_bd{q.shape[3]}_wm{SIMDGROUPS}_wn1_hm{int(mask is not None)}_dc{int(causal)}"
        f"_mask{'bool_' if mask is not None and mask.dtype == torch.bool else element}"
    )
    library = compile_shader(
        MPP,
        include_dirs=[peers.include_dir(peers.TORCH)],
        check=check,
        count=count,
        language="4.0",
    )
    out = torch.full_like(q, torch.nan)
    any_mask = torch.zeros(1, 1, 1, 1, dtype=q.dtype) if mask is None else mask
    strides = peers.params(("4q", any_mask.stride()))
    getattr(library, name)(
        *(q, k, v, out, peers.prefill_params(q, k, v, out), strides, any_mask),
        threads=grid(q),
        group_size=(32, SIMDGROUPS, 1),
        lane_map=table if lane_map is None else lane_map,
    )
    assert library.last_counters is not None
    return out, library.last_counters
