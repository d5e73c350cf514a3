"""`metal_attn::flash_decode` in Python: its CPU kernel. It has no gradient."""

from functools import partial
from typing import Any

from torch import Tensor

from torch_metal_attn.ops import plain
from torch_metal_attn.ops.differentiation import refuse
from torch_metal_attn.ops.flash_fwd import FlashFwdResult, register_cpu
from torch_metal_attn.reference import attention


def _attention(
    q: Tensor, k: Tensor, v: Tensor, *, num_splits: int = 0, **options: Any
) -> FlashFwdResult:
    """The reference, which does not depend on the number of splits."""
    return attention(q, k, v, **options)


register_cpu("flash_decode", _attention)
refuse(
    "flash_decode",
    "use flash_fwd, or call it under torch.no_grad()",
    plain=partial(plain.instead, plain.flash_decode),
)
