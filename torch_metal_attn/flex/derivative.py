"""Derivatives of a score_mod as graphs, by reverse-mode differentiation."""

import functools

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torch_metal_attn.flex.captured import Captured
from torch_metal_attn.flex.graph import Graph, Node, ordered
from torch_metal_attn.flex.table import OPS
from torch_metal_attn.flex.tracing import Tracer


def slope(graph: Graph, result: Node) -> Node:
    """d result / d score."""
    return derivative(graph, result, graph.node("input", (), torch.float32, "score"))


def derivative(graph: Graph, result: Node, by: Node) -> Node:
    """d result / d by in float32; the constant 0 if result does not depend on `by`."""
    nodes = list(ordered(result))
    varies = {id(by)}  # nodes that depend on `by` through floating-point nodes
    for node in nodes:
        if node.dtype.is_floating_point and any(id(a) in varies for a in node.args):
            varies.add(id(node))
    zero = graph.constant(0.0, torch.float32)
    gradients = {id(result): graph.constant(1.0, torch.float32)}
    for node in reversed(nodes):
        gradient = gradients.get(id(node))
        if gradient is None or id(node) not in varies:
            continue
        if node is by:
            return gradient
        parts = parts_of(graph, node, gradient)
        for argument, part in zip(node.args, parts, strict=True):
            if part is None or part is zero or id(argument) not in varies:
                continue
            if (other := gradients.get(id(argument))) is not None:
                part = graph.node("add", (other, part), torch.float32)
            gradients[id(argument)] = part
    return zero


def parts_of(graph: Graph, node: Node, gradient: Node) -> tuple[Node | None, ...]:
    """The gradients of a node's arguments, from the gradient of the node."""
    if node.op == "cast":
        return (gradient,)
    if node.op == "composed":
        return by_autograd(graph, node, gradient)
    arguments = (*node.args, gradient)

    def copied(part: Node) -> Node:
        """A part of the cached graph in `graph`, with this node's arguments as inputs."""
        copies: dict[int, Node] = {}
        for each in ordered(part, bodies=True):
            if each.op == "composed":
                copies[id(each)] = copies[id(each.value.body)]
                continue
            args = [copies[id(a)] for a in each.args]
            if each.op == "input":
                copies[id(each)] = arguments[each.value]
            elif each.op == "cast":
                copies[id(each)] = graph.cast(args[0], each.dtype)
            else:
                copies[id(each)] = graph.node(each.op, args, each.dtype, each.value)
        return copies[id(part)]

    parts = _parts_of_op(node.op, tuple(a.dtype for a in node.args), node.dtype)
    return tuple(None if part is None else copied(part) for part in parts)


@functools.cache
def _parts_of_op(
    op: str, dtypes: tuple[torch.dtype, ...], result: torch.dtype
) -> tuple[Node | None, ...]:
    """`by_autograd` of an op with numbered inputs; the last is the gradient. Slow, so cached."""
    graph = Graph()
    inputs = enumerate((*dtypes, torch.float32))
    *args, gradient = (graph.node("input", (), dtype, i) for i, dtype in inputs)
    return by_autograd(graph, graph.node(op, args, result), gradient)


class _Backward(Tracer):
    """Traces autograd, which detaches saved results."""

    same_value = Tracer.same_value | {"detach"}


def by_autograd(graph: Graph, node: Node, gradient: Node) -> tuple[Node | None, ...]:
    """The gradients of a node's arguments, traced from PyTorch's backward of the op."""
    row = node.value if node.op == "composed" else OPS[node.op]
    tracer = _Backward("score_mod", row.evaluate, graph, Captured(), torch.device("cpu"))
    # The caller may be in inference mode, or in a mode whose tensors have no values.
    with torch.inference_mode(False), torch.enable_grad(), _disable_current_modes():
        leaves = []
        for argument in node.args:
            floating = argument.dtype.is_floating_point
            leaf = tracer.scalar(graph.cast(argument, torch.float32) if floating else argument)
            leaves.append(leaf.requires_grad_(floating))
        upstream = tracer.scalar(gradient)
        with tracer:
            result = row.evaluate(*leaves)
            if not result.requires_grad:
                return (None,) * len(leaves)
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            try:
                results = iter(torch.autograd.grad(result, wanted, upstream, allow_unused=True))
            except NotImplementedError:
                raise
            except RuntimeError as error:
                raise NotImplementedError(f"score_mod: {error}") from None
        parts = [next(results) if leaf.requires_grad else None for leaf in leaves]
        return tuple(None if part is None else tracer.operand(part) for part in parts)
