"""`metal_attn::flash_fwd` and `flash_varlen_fwd` in Python: fake kernels and CPU kernels."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.ops.cpu import cpu_kernel
from torch_metal_attn.ops.fake import register_fake
from torch_metal_attn.ops.layout import empty_like_query
from torch_metal_attn.quantisation import columns
from torch_metal_attn.reference import attention, varlen_attention

FlashFwdResult = tuple[Tensor, Tensor]


@register_fake("flash_fwd", "flash_varlen_fwd", "flash_decode", "flex_fwd")
def empty_results(q: Tensor, k: Tensor, v: Tensor, *_: Any, **options: Any) -> FlashFwdResult:
    rows = q.shape[:3] if q.dim() == 4 else (q.shape[1], q.shape[0])
    lse = q.new_empty(rows, dtype=torch.float32)
    return empty_like_query(q, columns(v, options.get("v_scale"))), lse


def register_cpu(name: str, oracle: Callable[..., FlashFwdResult]) -> None:
    @cpu_kernel(name)
    def flash_fwd(*arguments: Any, **options: Any) -> FlashFwdResult:
        with torch.no_grad():
            out, lse = oracle(*arguments, **options)
        return empty_like_query(arguments[0], out.shape[-1]).copy_(out), lse


register_cpu("flash_fwd", attention)
register_cpu("flash_varlen_fwd", varlen_attention)
