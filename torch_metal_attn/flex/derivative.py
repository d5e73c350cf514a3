"""Derivatives of a score_mod as graphs: from the result back to its inputs."""

import torch

from torch_metal_attn.flex.graph import Graph, Node, ordered
from torch_metal_attn.flex.table import OPS, Calculus


def slope(graph: Graph, result: Node) -> Node:
    """d result / d score."""
    return derivative(graph, result, graph.node("input", (), torch.float32, "score"))


def derivative(graph: Graph, result: Node, by: Node) -> Node:
    """d result / d by, float32; constant 0 where `by` has no part in it."""
    calculus = Calculus(graph)
    nodes = list(ordered(result))
    varies = {id(by)}  # nodes that depend on it through floating numbers
    for node in nodes:
        if node.dtype.is_floating_point and any(id(a) in varies for a in node.args):
            varies.add(id(node))
    gradients = {id(result): calculus.number(1.0)}
    for node in reversed(nodes):
        gradient = gradients.get(id(node))
        if gradient is None or id(node) not in varies:
            continue
        if node is by:
            return gradient
        parts: tuple[Node | None, ...]
        if node.op == "cast":
            parts = (gradient,)
        else:
            row = OPS[node.op].derivative
            assert row is not None, f"{node.op} gives no floating number"
            parts = row(calculus, gradient, *node.args, node)
        for argument, part in zip(node.args, parts, strict=True):
            if part is not None and id(argument) in varies:
                before = gradients.get(id(argument))
                gradients[id(argument)] = part if before is None else calculus.add(before, part)
    return calculus.number(0.0)
