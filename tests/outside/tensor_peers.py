"""MLX's and PyTorch's attention on Metal 4's tensor operations, unmodified, in the simulator."""

import torch
from torch import Tensor

from torch_metal_attn.simulator import Counters

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


def mlx_nax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    lane_map: str | int = "apple10",
    **how: bool,
) -> tuple[Tensor, Counters]:
    """MLX's attention for M5: arguments and result as of `peers.mlx_steel_attention`."""
    mask_dtype = None if mask is None else mask.dtype
    aligned = (q.shape[2] % BLOCK_Q == 0, k.shape[2] % BLOCK_K == 0)
    kernel = {
        "text": NAX,
        "kernel": "nax",
        "include_dirs": [peers.include_dir(peers.MLX)],
        "defines": {
            "ELEMENT": peers.METAL_TYPES[q.dtype],
            "HEAD_DIM": q.shape[3],
            "MASK": "bool" if mask_dtype == torch.bool else "float",
        },
        "constants": peers.steel_constants(aligned, causal, mask_dtype)
        | {"has_sinks": False, "save_lse": False},
        "language": "4.0",
    }
    return peers.attend(
        kernel,
        q,
        lambda out: peers.steel_arguments(q, k, v, out, mask, BLOCK_K, BLOCK_Q),
        (32, SIMDGROUPS),
        BLOCK_Q,
        lane_map,
        **how,
    )


def torch_mpp_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    table: str = "apple10",
    lane_map: str | int | None = None,
    **how: bool,
) -> tuple[Tensor, Counters]:
    """PyTorch 2.15's attention for macOS 26.2, as of `peers.torch_prefill_attention`.

    table: the lane map that the kernel is written for; the one that it runs under if none is given.
    """
    kernel = {
        "text": MPP,
        "kernel": peers.prefill_name(
            f"prefill_attention_mpp_{table.replace('apple', 'a')}",
            *(q.dtype, q.shape[3], (BLOCK_Q, BLOCK_K), SIMDGROUPS),
            causal=causal,
            mask=None if mask is None else mask.dtype,
        ),
        "include_dirs": [peers.include_dir(peers.TORCH)],
        "language": "4.0",
    }
    return peers.attend(
        kernel,
        q,
        lambda out: peers.prefill_arguments(q, k, v, out, mask),
        (32, SIMDGROUPS),
        BLOCK_Q,
        table if lane_map is None else lane_map,
        **how,
    )
