"""`flash_attn.flash_attn_interface`: the functions that `torch_metal_attn` has too.

It also has the private functions that other packages import: sequence and ring parallelism combine
the results of `_flash_attn_forward` and `_flash_attn_backward` themselves.
"""

from typing import Any

from torch import Tensor

from torch_metal_attn.call.attention_weights import block_size
from torch_metal_attn.flash_attn import flash_attn_gpu
from torch_metal_attn.functional import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from torch_metal_attn.with_kvcache import flash_attn_with_kvcache

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def _get_block_size_n(device: Any, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Keys per block in S_dmask, as flash-attn has them on an A100."""
    return block_size(head_dim, is_dropout)


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> flash_attn_gpu.Forward:
    """`flash_attn_gpu.fwd`: out, softmax_lse, S_dmask and rng_state."""
    return flash_attn_gpu.fwd(
        *(q, k, v, None, alibi_slopes, dropout_p, softmax_scale, causal),
        *(window_size_left, window_size_right, softcap, return_softmax, None),
    )


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> flash_attn_gpu.Forward:
    """`flash_attn_gpu.varlen_fwd`: out, softmax_lse, S_dmask and rng_state."""
    return flash_attn_gpu.varlen_fwd(
        *(q, k, v, None, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table),
        *(alibi_slopes, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, zero_tensors),
        *(causal, window_size_left, window_size_right, softcap, return_softmax, None),
    )


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """`flash_attn_gpu.bwd` into dq, dk and dv; returns softmax_d."""
    *_, softmax_d = flash_attn_gpu.bwd(
        *(dout, q, k, v, out, softmax_lse, dq, dk, dv, alibi_slopes, dropout_p, softmax_scale),
        *(causal, window_size_left, window_size_right, softcap, deterministic, None, rng_state),
    )
    return softmax_d


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """`flash_attn_gpu.varlen_bwd` into dq, dk and dv; returns softmax_d."""
    *_, softmax_d = flash_attn_gpu.varlen_bwd(
        *(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, alibi_slopes),
        *(max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, zero_tensors, causal),
        *(window_size_left, window_size_right, softcap, deterministic),
        gen=None,
        rng_state=rng_state,
    )
    return softmax_d
