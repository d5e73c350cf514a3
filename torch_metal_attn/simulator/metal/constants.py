"""Function constants. Their values are set before compilation, so dead code is removed."""

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..wording import type_text, value_text
from .lexer import MetalSourceError, TokenList

ConstantValue = bool | int | float

INTEGER_RANGES = {
    "char": (-(2**7), 2**7 - 1),
    "uchar": (0, 2**8 - 1),
    "short": (-(2**15), 2**15 - 1),
    "ushort": (0, 2**16 - 1),
    "int": (-(2**31), 2**31 - 1),
    "uint": (0, 2**32 - 1),
    "long": (-(2**63), 2**63 - 1),
    "ulong": (0, 2**64 - 1),
}
SPELLINGS = {
    "int8_t": "char",
    "uint8_t": "uchar",
    "int16_t": "short",
    "uint16_t": "ushort",
    "int32_t": "int",
    "uint32_t": "uint",
    "int64_t": "long",
    "uint64_t": "ulong",
    "size_t": "ulong",
    "unsigned": "uint",
}
# The largest finite value of each type.
FLOATS = {
    "half": 65504.0,
    "bfloat": float.fromhex("0x1.FEp127"),
    "float": float.fromhex("0x1.FFFFFEp127"),
}

Enumerators = dict[str, int | None]
OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.LShift: operator.lshift,
    ast.BitOr: operator.or_,
}


@dataclass(frozen=True)
class FunctionConstant:
    """A declaration `constant T name [[function_constant(index)]];`."""

    index: int
    name: str
    type: str
    optional: bool  # needs no value: the text calls is_function_constant_defined(name)


def number(tokens: TokenList, position: int, text: str, names: Enumerators) -> int:
    """The index of a slot or function constant, from an expression of numbers and enumerators."""
    value = _integer(text, names)
    if value is None:
        problem = "is neither a number nor an enumerator of the text"
        if text in names:
            problem = "has a value that is neither a number nor an earlier enumerator"
        raise tokens.error(position, f"`{text}` {problem}")
    return value


def _integer(text: str, names: Enumerators) -> int | None:
    try:
        decimal = re.sub(r"(?<=[0-9A-Fa-f])[uUlL]+\b", "", re.sub(r"\b0(?=\d)", "0o", text))
        tree = ast.parse(decimal, mode="eval")
    except SyntaxError:
        return None

    def value(node: ast.expr) -> int | None:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            return names.get(node.id)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
            left, right = value(node.left), value(node.right)
            if left is not None and right is not None:
                return OPERATIONS[type(node.op)](left, right)
        return None

    return value(tree.body)


def enumerators(tokens: TokenList) -> Enumerators:
    """The values of the text's enumerators by name; None for an unknown value."""
    values: Enumerators = {}
    for index in tokens.where(("enum",)):
        opening = tokens.next(index, ("{", ";"))
        if tokens.text(opening) != "{":
            continue
        value: int | None = -1
        for start, end in tokens.split(opening + 1, tokens.close(opening)):
            name, _, expression = tokens.source(start, end).partition(" = ")
            if expression:
                value = _integer(expression, values)
            elif value is not None:
                value += 1
            values[name] = value
    return values


def specialise(
    tokens: TokenList, values: Mapping[int | str, ConstantValue]
) -> tuple[list[FunctionConstant], set[str]]:
    """Write the constants' values into the text; returns all constants, and names of unset ones."""
    optional = {tokens.text(i + 2) for i in tokens.find("is_function_constant_defined")}
    names = enumerators(tokens)
    declared: list[FunctionConstant] = []
    missing: set[str] = set()
    unused = dict(values)
    index = 0
    while (index := tokens.next(index, ("function_constant",))) < len(tokens):
        open_attribute = index - 2
        is_attribute = tokens.text(open_attribute) == "[" == tokens.text(index - 1)
        # A `;` follows the attribute of a declared constant, but not the attribute of a parameter.
        if not is_attribute or tokens.text(tokens.close(open_attribute) + 1) != ";":
            index += 1
            continue
        written = tokens.source(index + 2, tokens.close(index + 1))
        key = number(tokens, index, written, names)
        name_at = open_attribute - 1
        start = tokens.seek_back(name_at, (";", "}", "{")) + 1
        words = [t.text for t in tokens.tokens[start:name_at]]
        kind = [w for w in words if w not in ("constant", "const", "static", "constexpr", "inline")]
        name = tokens.text(name_at)
        if len(kind) != 1:
            raise tokens.error(name_at, f"function constant {name} has an unsupported type")
        constant = FunctionConstant(key, name, kind[0], name in optional)
        declared.append(constant)
        keys = [k for k in (constant.index, name) if k in values]
        if len(keys) == 2:
            raise ValueError(f"constants: {name} is passed by name and as index {key}; keep one")
        if keys:
            literal = _literal(constant, values[keys[0]])
            unused.pop(keys[0])
        else:
            literal = f"({kind[0]})0"
            missing.add(name)
        text = f"constexpr constant {kind[0]} {name} = {literal}"
        tokens.replace(start, tokens.close(open_attribute) + 1, text)
        index = start + 1
    if unused:
        known = ", ".join(f"{c.name} ({c.index})" for c in declared) or "none"
        raise ValueError(
            f"constants: the source has no function constant {', '.join(map(repr, unused))}; "
            f"it has {known}"
        )
    defined = {c.name for c in declared} - missing
    for index in tokens.find("is_function_constant_defined"):
        if tokens.text(index + 1) != "(":
            raise tokens.error(index, "is_function_constant_defined needs a name in parentheses")
        end = tokens.close(index + 1)
        tokens.replace(index, end + 1, "true" if tokens.text(index + 2) in defined else "false")
    return declared, missing


def _literal(constant: FunctionConstant, value: ConstantValue) -> str:
    kind = SPELLINGS.get(constant.type, constant.type)
    what = f"constants[{constant.name!r}]"
    if not isinstance(value, (bool, int, float)):
        raise TypeError(f"{what} is {type_text(value)}; it must be a bool, int or float")
    if kind == "bool":
        if value not in (0, 1):
            raise ValueError(f"{what} is {value_text(value)}; a bool must be True or False")
        return "true" if value else "false"
    if kind in INTEGER_RANGES:
        low, high = INTEGER_RANGES[kind]
        if isinstance(value, float):
            raise TypeError(f"{what} is a float; the source declares it as {constant.type}")
        if not low <= value <= high:
            raise ValueError(f"{what} is {value}; {constant.type} accepts {low} to {high}")
        if value == -(2**63):
            return "(long)(-9223372036854775807l - 1)"
        return f"({kind}){int(value)}{'ul' if value > 2**63 - 1 else 'l'}"
    if kind in FLOATS:
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"{what} is {value_text(value)}; it must be finite")
        if abs(number) > FLOATS[kind]:
            raise ValueError(
                f"{what} is {value_text(value)}; {constant.type} accepts up to {FLOATS[kind]:g}"
            )
        return f"({kind}){number.hex()}"  # a hexadecimal literal is exact
    raise MetalSourceError(
        f"function constant {constant.name} has type {constant.type}; it must be a scalar"
    )


def used_constants(tokens: TokenList, missing: set[str]) -> dict[str, set[str]]:
    """For each function, struct and constant, the names in `missing` that it can reach."""
    if not missing:
        return {}
    uses: dict[str, set[str]] = {}
    for start, end, name in _definitions(tokens):
        uses.setdefault(name, set()).update(
            t.text for t in tokens.tokens[start:end] if t.kind == "name"
        )
    reached: dict[str, set[str]] = {}
    for name in uses:
        seen, pending = {name}, [name]
        while pending:
            new = uses.get(pending.pop(), set()) - seen
            seen |= new
            pending += new
        reached[name] = seen & missing
    return reached


def _definitions(tokens: TokenList) -> list[tuple[int, int, str]]:
    """(start, end, name) of the text's functions, types and initialised variables."""
    result: list[tuple[int, int, str]] = []
    index = 0
    while index < len(tokens):
        token = tokens[index]
        if token.text == "(" and index and tokens[index - 1].kind == "name":
            qualifiers = ("const", "thread", "device", "constant", "noexcept")
            body = tokens.skip(tokens.close(index) + 1, qualifiers)
            if tokens.text(body) == "{":
                end = tokens.close(body)
                result.append((index, end, tokens.text(index - 1)))
                index = end
        elif token.text in ("struct", "class", "union") and tokens[index + 1].kind == "name":
            body = tokens.next(index + 2, ("{", ";", ")", ">", ",", "="))
            if tokens.text(body) == "{":
                result.append((body, tokens.close(body), tokens.text(index + 1)))
        elif token.text == "=" and tokens[index - 1].kind == "name":
            before = tokens.seek_back(index - 1, (";", "{", "}", "template"))
            if tokens.text(before) == "template":  # a default of a template's parameter
                index += 1
                continue
            end = tokens.next(index, (";", "{", "}"))
            result.append((index, end, tokens.text(index - 1)))
        index += 1
    return result
