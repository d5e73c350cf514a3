"""Which of its ways torch's `scaled_dot_product_attention` takes on mps.

The rules are those of torch's sources: `case SDPBackend::math` in
aten/src/ATen/native/transformers/attention.cpp, and `_scaled_dot_product_attention_math_mps` in
aten/src/ATen/native/mps/operations/Attention.mm (read at 00a5f92f7805). The head dims are those of
the kernels in the macOS wheels of torch 2.12.0 and 2.13.0. The headers of the latter are in torch's
include folder: ATen/native/mps/kernels/DecodeAttention.h and PrefillAttention.h.
"""

import os
from dataclasses import dataclass

import torch

from torch_metal_attn.wording import count_text

TORCH = str(torch.__version__)  # whose ways they are

_DECODE_QUERIES = 8
_DECODE_HEAD_DIMS = (64, 96, 128, 256)
_PREFILL_HEAD_DIMS = (32, 64, 72, 80, 96, 128, 256)
_NO_PREFILL = "PYTORCH_MPS_DISABLE_PREFILL_ATTENTION"
_BEFORE_2_13 = "torch before 2.13 fuses up to 8 queries without a mask, at head dims 64, 96 and 128"

FUSED, UNFUSED, RAISES = "torch, fused", "torch, unfused", "torch raises"


@dataclass(frozen=True)
class Call:
    """A call of torch's function: what its choice depends on.

    gradients: whether query, key or value needs a gradient. mask: attn_mask's dtype.
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: torch.dtype
    mask: torch.dtype | None = None
    is_causal: bool = False
    dropout: bool = False
    gradients: bool = False

    @property
    def scores_bytes(self) -> int:
        """Bytes of one array of all scores, of which the unfused way holds at least one."""
        try:
            leading = torch.broadcast_shapes(self.query[:-2], self.key[:-2])
        except RuntimeError:  # grouped heads
            leading = torch.Size(self.query[:-2])
        # With gradients torch computes in float32, unless it is told otherwise.
        reduced = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
        element = torch.float32 if self.gradients and not reduced else self.dtype
        return leading.numel() * self.query[-2] * self.key[-2] * element.itemsize


def way(call: Call, version: str | None = None) -> tuple[str, str]:
    """FUSED, UNFUSED or RAISES, and why, or for how many queries; version: torch's own if None."""
    later = torch.torch_version.TorchVersion(version or TORCH) >= "2.13"
    reason = _not_fused(call, later)
    if reason is None:
        return FUSED, _fused_only(call.query[-1]) if later else _BEFORE_2_13
    if call.is_causal and call.mask is not None:
        return RAISES, "torch takes no attn_mask together with is_causal"
    if call.dropout and later and not call.gradients:
        return RAISES, "torch takes no dropout on mps, except with gradients"
    return UNFUSED, reason


def _prefill_head_dims() -> tuple[int, ...]:
    return () if os.environ.get(_NO_PREFILL, "0") != "0" else _PREFILL_HEAD_DIMS


def _fused_only(head_dim: int) -> str:
    """For which queries a head dim that is fused is fused, if not for all."""
    if head_dim in _DECODE_HEAD_DIMS and head_dim in _prefill_head_dims():
        return ""
    limit = "up to" if head_dim in _DECODE_HEAD_DIMS else "more than"
    return f"at head dim {head_dim} torch fuses {limit} {_DECODE_QUERIES} queries only"


def _not_fused(call: Call, later: bool) -> str | None:
    """Why no fused kernel takes the call; later: of torch 2.13 and later."""
    if call.gradients:
        return "torch has no fused attention with gradients on mps"
    if call.dropout:
        return "torch has no fused attention with dropout on mps"
    queries, keys, head_dim = call.query[-2], call.key[-2], call.query[-1]
    if call.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"torch has no fused attention in {call.dtype} on mps"
    if call.value[-1] != head_dim:
        return f"torch's fused kernels need value's head dim {call.value[-1]} as query's"
    # A mask of bools is one of query's dtype by then.
    if call.mask not in (None, torch.bool, call.dtype):
        return f"torch's fused kernels need attn_mask in {call.dtype}, not {call.mask}"
    masked = call.is_causal or call.mask is not None
    if not later and (queries > _DECODE_QUERIES or masked or head_dim not in (64, 96, 128)):
        return _BEFORE_2_13
    few, many = _DECODE_HEAD_DIMS, _prefill_head_dims()
    if queries > _DECODE_QUERIES:
        if not many:
            return f"{_NO_PREFILL} is set"
    else:
        if queries > keys:
            return f"torch's fused kernels for {count_text(queries, 'query')} need as many keys"
        if call.is_causal and call.mask is not None:
            return "torch's fused kernels for few queries take is_causal or attn_mask"
    if head_dim not in (many if queries > _DECODE_QUERIES else few):
        listed = [", ".join(map(str, dims)) or "none" for dims in (few, many)]
        return (
            f"head dim {head_dim}: torch's fused kernels have {listed[0]} for up to "
            f"{_DECODE_QUERIES} queries, and {listed[1]} for more"
        )
    if keys == 0:
        return "there are no keys"
    return None
