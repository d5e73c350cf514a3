"""A score_mod or mask_mod as a graph of scalars."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

# Metal's names of the dtypes that captured tensors may have.
TYPES = {
    torch.bool: "bool",
    torch.int8: "char",
    torch.uint8: "uchar",
    torch.int16: "short",
    torch.int32: "int",
    torch.int64: "int64_t",
    torch.float32: "float",
    torch.float16: "half",
    torch.bfloat16: "bfloat",
}
DTYPES = tuple(TYPES)
DTYPE_NAMES = "bool, int8, uint8, int16, int32, int64, float32, float16 or bfloat16"


@dataclass(frozen=True, eq=False)
class Node:
    """A scalar. args: the arguments of the op, or the indices of a load."""

    op: str
    args: tuple["Node", ...]
    dtype: torch.dtype
    value: Any = None  # an input's name, a number, the number of a capture, or a `Composed`


class Graph:
    """Makes nodes. Equal nodes are one object, and a product with 1.0 is the other factor."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[Any, ...], Node] = {}

    def node(self, op: str, args: Iterable[Node], dtype: torch.dtype, value: object = None) -> Node:
        args = tuple(args)
        if op == "mul" and dtype.is_floating_point:
            for factor, other in (args, args[::-1]):
                if factor.op == "constant" and factor.value == 1.0:
                    return other
        # repr distinguishes 1 from True and 0.0 from -0.0, and is equal for NaNs.
        key = (op, *map(id, args), dtype, repr(value))
        return self._nodes.setdefault(key, Node(op, args, dtype, value))

    def constant(self, value: bool | int | float, dtype: torch.dtype) -> Node:
        """The number, rounded to this dtype."""
        wide = torch.float64 if dtype.is_floating_point else None
        with _disable_current_modes():  # torch.compile of torch 2.10 would make it symbolic
            number = torch.tensor(value, dtype=wide, device="cpu").to(dtype).item()
        return self.node("constant", (), dtype, number)

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        if node.dtype == dtype:
            return node
        if node.op == "constant":
            return self.constant(node.value, dtype)
        return self.node("cast", (node,), dtype)


def ordered(*roots: Node, bodies: bool = False) -> Iterator[Node]:
    """Every node that the roots need, each after its arguments; bodies: also in composed nodes."""
    seen: set[int] = set()
    waiting = [(root, False) for root in reversed(roots)]
    while waiting:
        node, complete = waiting.pop()
        if complete:
            yield node
        elif id(node) not in seen:
            seen.add(id(node))
            waiting.append((node, True))
            needed = (node.value.body,) if bodies and node.op == "composed" else node.args
            waiting.extend((arg, False) for arg in reversed(needed))
