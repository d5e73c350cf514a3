"""`metal_attn::copy_pages` in Python: fake and CPU kernels, and autograd of its writes."""

from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.ops import rules
from torch_metal_attn.ops.differentiation import refuse, tell_of_writes
from torch_metal_attn.ops.refusals import python_kernel
from torch_metal_attn.ops.view_offsets import offsets_kept
from torch_metal_attn.simulator import session

_NAMESPACES = ("metal_attn", "metal_attn_simulator")

# Integer types to copy the bits of any dtype.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _fake(cache: Tensor, src: Tensor, dst: Tensor) -> None:
    """What csrc/ops/cache/check_copy_pages.cpp checks, but for values and memory."""
    rules.rule(cache.dim() >= 1, lambda: "cache has no dimensions; it must be (pages, ...)")
    for name, pages in (("src", src), ("dst", dst)):
        rules.same_device(name, pages, cache, "cache")
        rules.rule(
            pages.dtype in (torch.int32, torch.int64),
            lambda n=name, p=pages: f"{n} has dtype {p.dtype}; it must be int32 or int64",
        )
        rules.rule(
            pages.dim() == 1,
            lambda n=name, p=pages: f"{n} has {p.dim()} dimensions; it must have 1: (copies)",
        )
    rules.same_dtype("dst", dst, src, "src")
    rules.shape("dst", dst, [tuple(src.shape)])


def _cpu(cache: Tensor, src: Tensor, dst: Tensor) -> None:
    """The shader if the simulator is on, else plain torch, with the same checks."""
    torch.ops.metal_attn.copy_pages_explain(cache, src, dst)
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
for _namespace in _NAMESPACES:
    torch.library.register_fake(f"{_namespace}::copy_pages")(offsets_kept(_fake))
    refuse(_namespace, "copy_pages", "detach it, as a cache keeps no graph", _written)
    _libraries.append(tell_of_writes(_namespace, "copy_pages", _written))
