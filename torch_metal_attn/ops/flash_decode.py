"""`metal_attn::flash_decode` in Python: CPU kernel, and autograd for lists of keys only."""

from typing import Any

from torch import Tensor

from torch_metal_attn.ops.differentiation import autograd_kernel, undifferentiated
from torch_metal_attn.ops.flash_fwd import FlashFwdResult, register_cpu
from torch_metal_attn.ops.flash_fwd_autograd import differentiable
from torch_metal_attn.reference import attention, varlen_attention


def decode_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int = 0,
    num_splits: int = 0,
    **options: Any,
) -> FlashFwdResult:
    """The reference, which does not depend on the number of splits."""
    if cu_seqlens_q is None:
        return attention(q, k, v, **options)
    return varlen_attention(q, k, v, cu_seqlens_q, None, max_seqlen_q, **options)


register_cpu("flash_decode", decode_reference)
_refused = undifferentiated(
    "flash_decode",
    "use flash_fwd, or indices without cu_seqlens_q, or call it under torch.no_grad()",
    lambda _: {},
)
_listed = differentiable("flash_decode")


@autograd_kernel("flash_decode", "flash_decode")
def _flash_decode(*arguments: Any, **options: Any) -> FlashFwdResult:
    packed = options.get("cu_seqlens_q") is not None
    kernel = _refused if packed or options.get("indices") is None else _listed
    return kernel(*arguments, **options)
