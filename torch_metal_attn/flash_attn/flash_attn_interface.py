"""`flash_attn.flash_attn_interface`: its public functions, and private ones in wide use.

Packages for sequence and ring parallelism combine results of `_flash_attn_forward` and
`_flash_attn_backward`.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch_metal_attn.flash_attn import flash_attn_gpu
from torch_metal_attn.functional import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from torch_metal_attn.ops.attention_weights import block_size
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

# flash-attn's tests and other code read this to find out if AMD's kernels run.
USE_TRITON_ROCM = False


def _get_block_size_n(device: Any, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Keys per block in S_dmask, as in flash-attn on an A100."""
    return block_size(head_dim, is_dropout)


# The names of arguments here, by their names in flash_attn_gpu.
_RENAMED = {"p_dropout": "dropout_p", "is_causal": "causal"}


def _private(function: Callable[..., Any], names: str, **defaults: Any) -> Callable[..., Any]:
    """A function of flash_attn_gpu, with the names and order of flash-attn's private interface."""
    needed = inspect.signature(function).parameters

    @flash_attn_gpu.in_order(names, **defaults)
    def call(**named: Any) -> Any:
        # `names` lacks only out and gen, which must be None.
        return function(**{name: named.get(_RENAMED.get(name, name)) for name in needed})

    call.__doc__ = function.__doc__
    return call


def _softmax_d_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """A backward of flash_attn_gpu that returns only softmax_d, as it writes dq, dk and dv."""

    @functools.wraps(function)
    def call(**named: Any) -> Any:
        return function(**named)[-1]

    return call


_SCORES = "dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes"
_LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
_BACKWARD_OPERANDS = "dout q k v out softmax_lse dq dk dv"

_flash_attn_forward = _private(flash_attn_gpu.fwd, f"q k v {_SCORES} return_softmax")
_flash_attn_varlen_forward = _private(
    flash_attn_gpu.varlen_fwd,
    f"q k v {_LENGTHS} {_SCORES} return_softmax block_table leftpad_k seqused_k zero_tensors "
    "num_splits",
    **dict.fromkeys(("window_size_left", "window_size_right"), -1),
    **dict.fromkeys(("alibi_slopes", "block_table", "leftpad_k", "seqused_k")),
    softcap=0.0,
    return_softmax=False,
    zero_tensors=False,
    num_splits=0,
)
_flash_attn_backward = _private(
    _softmax_d_of(flash_attn_gpu.bwd),
    f"{_BACKWARD_OPERANDS} {_SCORES} deterministic rng_state",
    rng_state=None,
)
_flash_attn_varlen_backward = _private(
    _softmax_d_of(flash_attn_gpu.varlen_bwd),
    f"{_BACKWARD_OPERANDS} {_LENGTHS} {_SCORES} deterministic rng_state zero_tensors",
    rng_state=None,
    zero_tensors=False,
)
