"""`metal_attn::copy_pages` in Python: fake and CPU kernels, and autograd of its writes."""

from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.ops.cpu import cpu_kernel
from torch_metal_attn.ops.differentiation import refuse
from torch_metal_attn.ops.fake import register_fake

# Integer types to copy the bits of any dtype.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@register_fake("copy_pages")
def _fake(*_: Any) -> None:
    pass


@cpu_kernel("copy_pages")
def _cpu(cache: Tensor, src: Tensor, dst: Tensor) -> None:
    bits = cache.view(_BITS.get(cache.itemsize, cache.dtype))
    bits[dst.long()] = bits[src.long()]


refuse("copy_pages", "detach it, as a cache keeps no graph", lambda given: {"cache": ()})
