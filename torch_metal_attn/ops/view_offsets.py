"""A workaround for ops that write into views and are compiled for dynamic sizes.

Inductor has no lowering of `aten.sym_storage_offset` and assumes offset 0 for every view, so an op
that writes into a view silently writes to the start of its buffer (pytorch#198068).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def with_offset_lowering(fake: Callable[..., Any]) -> Callable[..., Any]:
    """A fake kernel of an op that writes in place. Adds the lowering if an offset is symbolic."""

    @functools.wraps(fake)
    def run(*values: Any, **options: Any) -> Any:
        tensors = [x for x in (*values, *options.values()) if isinstance(x, Tensor)]
        if any(isinstance(x.storage_offset(), torch.SymInt) for x in tensors):
            _add_lowering()
        return fake(*values, **options)

    return run


@functools.cache
def _add_lowering() -> None:
    """Add the lowering of pytorch#198069, which returns the traced offset."""
    from torch._inductor.lowering import lowerings, register_lowering
    from torch._inductor.virtualized import V

    op = torch.ops.aten.sym_storage_offset.default
    if op in lowerings:
        return

    @register_lowering(op, type_promotion_kind=None)
    def sym_storage_offset(view: Any) -> Any:
        offset = V.graph.current_node.meta["val"]
        return offset.node.expr if isinstance(offset, torch.SymInt) else int(offset)
