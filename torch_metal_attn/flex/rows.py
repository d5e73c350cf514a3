"""Pointwise ops of whole rows of captured tensors, as of single scalars, and their sums."""

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from torch_metal_attn.flex.captured import Part, Row
from torch_metal_attn.flex.graph import Node

if TYPE_CHECKING:
    from torch_metal_attn.flex.tracing import Tracer

# Each is a load of its own.
MOST_ELEMENTS = 32
_SUMS = ("sum", "mean", "dot")


def of_rows(
    tracer: "Tracer", name: str, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]
) -> Tensor | None:
    """What an op gives of rows, or of a sum's scalar. None: it is no such op, or of other rows."""
    if name not in _SUMS and torch.Tag.pointwise not in func.tags:
        return None
    rows = [x for x in tensors if x.dim() > 0]
    if len({x.shape for x in rows}) > 1 or any(x.numel() > MOST_ELEMENTS for x in rows):
        return None  # for which the tracer has an error
    if name == "dot":
        with tracer:
            product: Tensor = (args[0] * args[1]).sum()
        return product
    if name in _SUMS:
        values = tracer.arguments(func, args, kwargs)
        return _summed(tracer, name, values)
    if not rows:
        return None
    nodes = {id(x): _elements(tracer, x) for x in rows}
    found = []
    for i in range(rows[0].numel()):

        def at(x: Any, i: int = i) -> Any:
            return tracer.scalar(nodes[id(x)][i]) if id(x) in nodes else x

        found.append(tracer.applied(name, func, tree_map(at, args), tree_map(at, kwargs)))
    result = torch.empty(rows[0].shape, dtype=found[0].dtype, device="meta")
    return tracer.known(result, Row(tuple(found)))


def _elements(tracer: "Tracer", x: Tensor) -> tuple[Node, ...]:
    value = tracer.value(x)
    if isinstance(value, Row):
        return value.elements
    if isinstance(value, Node):
        return (value,)
    part = Part(tracer.capture(x), ()) if value is None else value
    places = itertools.product(*(range(size) for size in x.shape))
    indices = [tuple(tracer.operand(i) for i in place) for place in places]
    return tuple(tracer.load(Part(part.capture, (*part.indices, *each))) for each in indices)


def _summed(tracer: "Tracer", name: str, values: dict[str, Any]) -> Tensor:
    """The sum or mean of all elements, in float32 or int64 as PyTorch's."""
    x = values["self"]
    dims = values.get("dim")
    if x.dim() > 0 and (values.get("keepdim") or (dims and len(dims) < x.dim())):
        raise tracer.unsupported(name, "it sums all dimensions of a row")
    floating = x.dtype.is_floating_point
    if name == "mean" and not floating:
        raise tracer.unsupported(name, f"not in {x.dtype}")
    common = torch.float32 if floating else torch.int64
    first, *others = _elements(tracer, x)
    node = tracer.graph.cast(first, common)
    for other in others:
        node = tracer.row("add", [node, other], common)
    if name == "mean":
        node = tracer.row("div", [node, tracer.operand(1 + len(others))], common)
    dtype = values.get("dtype") or (x.dtype if floating else common)
    return tracer.scalar(tracer.graph.cast(node, dtype))
