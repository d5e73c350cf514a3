"""`metal_attn::copy_pages` in Python: fake and CPU kernels, and autograd of its writes."""

from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.ops.differentiation import count_writes, refuse
from torch_metal_attn.ops.fake import NAMESPACES, register_fake
from torch_metal_attn.ops.refusals import python_kernel
from torch_metal_attn.runtime import session

# Integer types to copy the bits of any dtype.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@register_fake("copy_pages")
def _fake(*_: Any) -> None:
    pass


def _cpu(cache: Tensor, src: Tensor, dst: Tensor) -> None:
    """The shader if the simulator is on, else plain torch, with the same checks."""
    torch.ops.metal_attn_explain.copy_pages(cache, src, dst)
    if session.active():
        with session.raising():
            torch.ops.metal_attn_simulator.copy_pages(cache, src, dst)
        return
    bits = cache.view(_BITS.get(cache.itemsize, cache.dtype))
    bits[dst.long()] = bits[src.long()]


def _written(given: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    return {"cache": ()}


python_kernel("metal_attn::copy_pages", "CPU")(_cpu)
_libraries = []
for _namespace in NAMESPACES:
    refuse(_namespace, "copy_pages", "detach it, as a cache keeps no graph", _written)
    _libraries.append(count_writes(_namespace, "copy_pages", _written))
