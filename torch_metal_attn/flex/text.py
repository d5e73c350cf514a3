"""The Metal text of a graph, for shaders/flex.h: the body of a function, on one line.

It consists of text from this file and the table, and numbers, but no names or strings of users.
"""

import math
from collections.abc import Iterable

import torch

from torch_metal_attn.flex.graph import TYPES, Node, ordered
from torch_metal_attn.flex.table import COMPARISONS, LOGICAL, OPS

_INPUTS = {"score": "score", "b": "batch", "h": "head", "q_idx": "query", "kv_idx": "key"}


def body(result: Node, ranks: list[int]) -> str:
    """Statements that compute and return `result`. ranks: dimensions of each captured tensor."""
    statements, names = _statements([result], ranks)
    return " ".join([*statements, f"return {names[id(result)]};"])


def place(load: Node, ranks: list[int]) -> str:
    """Statements that return the index of the element that `load` reads, in contiguous order."""
    statements, names = _statements(load.args, ranks)
    first = sum(ranks[: load.value])
    number = "0"
    for i, argument in enumerate(load.args):
        size = f"params.capture_sizes[{first + i}]"
        index = f"flex_index({names[id(argument)]}, {size}, impossible)"
        number = index if i == 0 else f"({number}) * {size} + {index}"
    return " ".join([*statements, f"return {number};"])


def _statements(results: Iterable[Node], ranks: list[int]) -> tuple[list[str], dict[int, str]]:
    """Statements that compute nodes, and each node's name in them, by the node's id."""
    first_dimension = [sum(ranks[:i]) for i in range(len(ranks))]
    names: dict[int, str] = {}
    statements: list[str] = []
    for node in ordered(*results, bodies=True):
        if node.op == "constant":
            names[id(node)] = _number(node.value, node.dtype)
        elif node.op == "composed":
            names[id(node)] = names[id(node.value.body)]
        elif node.op == "input":
            names[id(node)] = _INPUTS[node.value]
        else:
            arguments = [names[id(a)] for a in node.args]
            name = f"t{len(statements)}"
            if node.op == "load":
                value = _load(node, arguments, first_dimension[node.value])
            elif node.op == "cast":
                value = _cast(node.args[0], arguments[0], node.dtype)
            else:
                value = _row(node, arguments)
            statements.append(f"const {TYPES[node.dtype]} {name} = {value};")
            names[id(node)] = name
    return statements, names


def _number(value: bool | int | float, dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "true" if value else "false"
    if not dtype.is_floating_point:
        # The lowest integer cannot be written as a literal.
        suffix = "L" if dtype == torch.int64 else ""
        lowest = value == torch.iinfo(dtype).min
        text = f"{int(value) + 1}{suffix} - 1" if lowest else f"{int(value)}{suffix}"
        if dtype not in (torch.int32, torch.int64):
            return f"{TYPES[dtype]}({text})"
        return f"({text})" if value < 0 else text
    if math.isnan(value):
        text = "NAN"
    elif math.isinf(value):
        text = "INFINITY" if value > 0 else "(-INFINITY)"
    else:
        digits = f"{value:.9g}"
        digits += "" if "." in digits or "e" in digits else ".0"
        text = f"({digits}f)" if digits.startswith("-") else f"{digits}f"
    return text if dtype == torch.float32 else f"{TYPES[dtype]}({text})"


def _load(node: Node, indices: list[str], first: int) -> str:
    places = [
        f"flex_index({index}, params.capture_sizes[{first + i}], impossible) * "
        f"params.capture_strides[{first + i}]"
        for i, index in enumerate(indices)
    ]
    element = f"inputs.capture_{node.value}[{' + '.join(places) or '0'}]"
    return f"{element} != 0" if node.dtype == torch.bool else element


def _cast(node: Node, name: str, dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        zero = "0.0f" if node.dtype.is_floating_point else "0"
        return f"{_as_float(node, name)} != {zero}"
    if dtype.is_floating_point:
        text = _as_float(node, name) if node.dtype.is_floating_point else f"float({name})"
        return text if dtype == torch.float32 else f"{TYPES[dtype]}({text})"
    if node.dtype.is_floating_point:
        function = "flex_long" if dtype == torch.int64 else "flex_int"
        text = f"{function}({_as_float(node, name)})"
        return text if dtype in (torch.int32, torch.int64) else f"{TYPES[dtype]}({text})"
    return f"{TYPES[dtype]}({name})"


def _as_float(node: Node, name: str) -> str:
    return f"float({name})" if node.dtype in (torch.float16, torch.bfloat16) else name


def _row(node: Node, arguments: list[str]) -> str:
    op = OPS[node.op]
    # The op computes in the dtype of its last argument.
    dtype = torch.bool if node.op in LOGICAL else node.args[-1].dtype
    template = op.text_in(dtype)
    if dtype.is_floating_point:
        arguments = [_as_float(a, name) for a, name in zip(node.args, arguments, strict=True)]
    assert template is not None, f"the tracer refuses {node.op} in {dtype}"
    unsigned = f"u{TYPES[dtype].removeprefix('u')}"  # only integer templates contain {U}
    text = template.format(*arguments, T=TYPES[dtype], U=unsigned)
    narrow = node.dtype in (torch.float16, torch.bfloat16) and node.op not in COMPARISONS
    return f"{TYPES[node.dtype]}({text})" if narrow else text
