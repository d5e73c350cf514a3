"""`metal_attn::copy_pages` in Python: fake and CPU kernels, and autograd of its writes."""

from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.ops.cpu import cpu_kernel
from torch_metal_attn.ops.differentiation import count_writes, refuse
from torch_metal_attn.ops.fake import NAMESPACES, register_fake

# Integer types to copy the bits of any dtype.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@register_fake("copy_pages")
def _fake(*_: Any) -> None:
    pass


@cpu_kernel("copy_pages")
def _cpu(cache: Tensor, src: Tensor, dst: Tensor) -> None:
    bits = cache.view(_BITS.get(cache.itemsize, cache.dtype))
    bits[dst.long()] = bits[src.long()]


def _written(given: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    return {"cache": ()}


_libraries = []
for _namespace in NAMESPACES:
    refuse(_namespace, "copy_pages", "detach it, as a cache keeps no graph", _written)
    _libraries.append(count_writes(_namespace, "copy_pages", _written))
