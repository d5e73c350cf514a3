"""`metal_attn::index_scores` in Python: definition, fake and CPU kernels. It has no gradient."""

from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.call.autocast import without_autocast
from torch_metal_attn.ops.cpu import cpu_kernel
from torch_metal_attn.ops.differentiation import refuse
from torch_metal_attn.ops.fake import register_fake


@register_fake("index_scores")
def _fake(q: Tensor, k: Tensor, weights: Tensor, **_: Any) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[2], k.shape[1]), dtype=torch.float32)


@cpu_kernel("index_scores")
def index_scores(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_offset: int | None = None,
) -> Tensor:
    """The scores in plain torch, in float32; in float64 if q is float64."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    with without_autocast(q.device.type):
        products = torch.matmul(q.to(dtype), k.to(dtype)[:, None].transpose(-1, -2)) * scale
        scores = torch.einsum("bhq,bhqk->bqk", weights.to(dtype), products.relu())
    if not causal:
        return scores
    q_length, kv_length = scores.shape[1:]
    offset = kv_length - q_length if q_offset is None else q_offset
    queries, keys = (torch.arange(n, device=q.device) for n in (q_length, kv_length))
    return scores.masked_fill(keys > queries[:, None] + offset, -torch.inf)


refuse("index_scores", "call it under torch.no_grad(), as choosing keys has no derivative")
