"""`metal_attn::flash_decode` in Python: fake kernel and CPU kernel. It has no gradient."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.ops import flash_fwd_checks as checks
from torch_metal_attn.ops import plain
from torch_metal_attn.ops.differentiation import refuse
from torch_metal_attn.ops.flash_fwd import FlashFwdResult, register_cpu
from torch_metal_attn.ops.layout import empty_like_query
from torch_metal_attn.quantisation import columns
from torch_metal_attn.reference import attention


@torch.library.register_fake("metal_attn_simulator::flash_decode")
@torch.library.register_fake("metal_attn::flash_decode")
def _flash_decode_fake(
    q: Tensor, k: Tensor, v: Tensor, *, num_splits: int = 0, **options: Any
) -> FlashFwdResult:
    checks.decode(q, k, v, num_splits, options)
    out = empty_like_query(q, columns(v, options.get("v_scale")))
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, *, num_splits: int = 0, **options: Any
) -> FlashFwdResult:
    """The reference, which does not depend on the number of splits."""
    return attention(q, k, v, **options)


register_cpu("flash_decode", _attention)
_ADVICE = "use flash_fwd, or call it under torch.no_grad()"
refuse("metal_attn", "flash_decode", _ADVICE, shorter=partial(plain.instead, plain.flash_decode))
refuse("metal_attn_simulator", "flash_decode", _ADVICE)
