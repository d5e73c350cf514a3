"""`metal_attn::flash_fwd` and `flash_varlen_fwd` in Python: fake kernels and CPU kernels."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn import reference
from torch_metal_attn.ops import flash_fwd_checks as checks
from torch_metal_attn.ops.layout import empty_like_query
from torch_metal_attn.ops.refusals import python_kernel
from torch_metal_attn.quantisation import columns
from torch_metal_attn.simulator import session

FlashFwdResult = tuple[Tensor, Tensor]


@torch.library.register_fake("metal_attn_simulator::flash_fwd")
@torch.library.register_fake("metal_attn::flash_fwd")
def _flash_fwd_fake(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> FlashFwdResult:
    checks.dense(q, k, v, options)
    out = empty_like_query(q, columns(v, options.get("v_scale")))
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.register_fake("metal_attn_simulator::flash_varlen_fwd")
@torch.library.register_fake("metal_attn::flash_varlen_fwd")
def _flash_varlen_fwd_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **options: Any,
) -> FlashFwdResult:
    checks.varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, options)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    return empty_like_query(q, columns(v, options.get("v_scale"))), lse


def register_cpu(name: str, oracle: Callable[..., FlashFwdResult]) -> None:
    """The shader if the simulator is on, else the reference, with the same checks."""

    def flash_fwd(*arguments: Any, **options: Any) -> FlashFwdResult:
        if session.active():
            with session.raising():
                result: FlashFwdResult = getattr(torch.ops.metal_attn_simulator, name)(
                    *arguments, **options
                )
                return result
        getattr(torch.ops.metal_attn, f"{name}_explain")(*arguments, **options)
        with torch.no_grad():
            out, lse = oracle(*arguments, **options)
        return empty_like_query(arguments[0], out.shape[-1]).copy_(out), lse

    python_kernel(f"metal_attn::{name}", "CPU")(flash_fwd)


register_cpu("flash_fwd", reference.attention)
register_cpu("flash_varlen_fwd", reference.varlen_attention)
