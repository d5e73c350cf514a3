"""`metal_attn::copy_pages` in Python: CPU kernel, and autograd of its writes."""

import torch
from torch import Tensor

from torch_metal_attn.ops.cpu import cpu_kernel
from torch_metal_attn.ops.differentiation import refuse

# Integer types with which the bits of any dtype are copied.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@cpu_kernel("copy_pages")
def _cpu(cache: Tensor, src: Tensor, dst: Tensor) -> None:
    bits = cache.view(_BITS.get(cache.itemsize, cache.dtype))
    bits[dst.long()] = bits[src.long()]


refuse("copy_pages", "detach it, as a cache keeps no graph", lambda arguments: {"cache": ()})
