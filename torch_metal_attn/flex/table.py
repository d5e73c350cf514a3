"""Every op that a score_mod or mask_mod may be made of: its Metal text, value and derivative.

One row an op. Texts are templates of the arguments' names; {T} is Metal's name of an integer type
and {U} that of the unsigned type of its size, in which arithmetic wraps around. float16 and
bfloat16 are computed in float32 and rounded, as PyTorch does on the CPU. In a template `impossible`
is what a kernel sets where there is no value.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_metal_attn.flex.graph import Graph, Node


class Calculus:
    """Makes the nodes of derivatives, which are float32, and drops ones and zeros on the way."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def number(self, value: float) -> Node:
        return self.graph.constant(value, torch.float32)

    def apply(self, op: str, *args: Node) -> Node:
        return self.graph.node(op, [self.graph.cast(a, torch.float32) for a in args], torch.float32)

    def compare(self, op: str, a: Node, b: Node) -> Node:
        return self.graph.node(op, [self.graph.cast(x, torch.float32) for x in (a, b)], torch.bool)

    def where(self, condition: Node, a: Node, b: Node) -> Node:
        chosen = [self.graph.cast(x, torch.float32) for x in (a, b)]
        return self.graph.node("where", (condition, *chosen), torch.float32)

    def add(self, a: Node, b: Node) -> Node:
        return b if _is(a, 0.0) else a if _is(b, 0.0) else self.apply("add", a, b)

    def mul(self, a: Node, b: Node) -> Node:
        if _is(a, 0.0) or _is(b, 0.0):
            return self.number(0.0)
        return b if _is(a, 1.0) else a if _is(b, 1.0) else self.apply("mul", a, b)

    def neg(self, a: Node) -> Node:
        return self.number(-a.value) if a.op == "constant" else self.apply("neg", a)

    def div(self, a: Node, b: Node) -> Node:
        return self.apply("div", a, b)

    def sub(self, a: Node, b: Node) -> Node:
        return self.apply("sub", a, b)


def _is(node: Node, value: float) -> bool:
    return node.op == "constant" and node.value == value


# From the gradient of the result g, the arguments and the result y: the arguments' gradients. None
# is one that is always 0.
Derivative = Callable[..., tuple[Node | None, ...]]


@dataclass(frozen=True)
class Op:
    """A row of the table.

    Attributes: floating, integer, boolean: texts by the dtype that it computes in; None: it cannot.
        evaluate: the same with torch. derivative: None for PyTorch's own, by autograd.
    """

    floating: str | None
    integer: str | None
    boolean: str | None
    evaluate: Callable[..., Tensor]
    derivative: Derivative | None = None


def _wrapping(sign: str) -> str:
    return f"{{T}}({{U}}({{0}}) {sign} {{U}}({{1}}))"


def _comparison(sign: str, evaluate: Callable[..., Tensor]) -> Op:
    text = f"{{0}} {sign} {{1}}"
    return Op(
        text, text, text if sign in ("==", "!=") else f"int({{0}}) {sign} int({{1}})", evaluate
    )


def _function(
    text: str, evaluate: Callable[..., Tensor], derivative: Derivative | None = None
) -> Op:
    return Op(text, None, None, evaluate, derivative)


def _rounding(name: str, evaluate: Callable[..., Tensor]) -> Op:
    return Op(f"{name}({{0}})", "{0}", None, evaluate, lambda d, g, a, y: (None,))


def _chosen(d: Calculus, g: Node, a: Node, b: Node, op: str) -> tuple[Node, Node]:
    """Of max and min: equals share the gradient, as in PyTorch."""
    half = d.where(d.compare("eq", a, b), d.mul(d.number(0.5), g), d.number(0.0))
    return (
        d.where(d.compare(op, a, b), g, half),
        d.where(d.compare(op, b, a), g, half),
    )


def _within(d: Calculus, g: Node, a: Node, b: Node, op: str) -> tuple[Node, Node]:
    """Of clamp: the limit itself counts as inside."""
    zero = d.number(0.0)
    inside = d.compare(op, a, b)
    return d.where(inside, g, zero), d.where(inside, zero, g)


def _power(d: Calculus, g: Node, a: Node, b: Node, y: Node) -> tuple[Node, Node]:
    zero = d.number(0.0)
    less = d.apply("pow", a, d.sub(b, d.number(1.0)))
    of_base = d.where(d.compare("eq", b, zero), zero, d.mul(g, d.mul(b, less)))
    of_exponent = d.where(d.compare("eq", a, zero), zero, d.mul(g, d.mul(y, d.apply("log", a))))
    return of_base, of_exponent


def _silu(d: Calculus, g: Node, a: Node, y: Node) -> tuple[Node]:
    weight = d.apply("sigmoid", a)
    return (d.mul(g, d.apply("add", weight, d.mul(y, d.sub(d.number(1.0), weight)))),)


def _two_over(value: float) -> Derivative:
    return lambda d, g, a, y: (d.div(g, d.mul(a, d.number(value))),)


_SIGNS = "({0} > 0 ? 1 : {0} < 0 ? -1 : 0)"

OPS: dict[str, Op] = {
    "add": Op("{0} + {1}", _wrapping("+"), "{0} || {1}", torch.add, lambda d, g, a, b, y: (g, g)),
    "sub": Op("{0} - {1}", _wrapping("-"), None, torch.sub, lambda d, g, a, b, y: (g, d.neg(g))),
    "mul": Op(
        "{0} * {1}",
        _wrapping("*"),
        "{0} && {1}",
        torch.mul,
        lambda d, g, a, b, y: (d.mul(g, b), d.mul(g, a)),
    ),
    "div": Op(
        "{0} / {1}",
        None,
        None,
        torch.div,
        lambda d, g, a, b, y: (d.div(g, b), d.neg(d.mul(g, d.div(y, b)))),
    ),
    "floor_divide": Op(
        "flex_floor_divide({0}, {1}, impossible)",
        "flex_floor_divide({0}, {1}, impossible)",
        None,
        functools.partial(torch.div, rounding_mode="floor"),
        lambda d, g, a, b, y: (None, None),
    ),
    "truncating_divide": Op(
        "flex_truncating_divide({0}, {1}, impossible)",
        "flex_truncating_divide({0}, {1}, impossible)",
        None,
        functools.partial(torch.div, rounding_mode="trunc"),
        lambda d, g, a, b, y: (None, None),
    ),
    "remainder": Op(
        "flex_remainder({0}, {1}, impossible)",
        "flex_remainder({0}, {1}, impossible)",
        None,
        torch.remainder,
        lambda d, g, a, b, y: (g, d.neg(d.mul(g, d.apply("floor_divide", a, b)))),
    ),
    "fmod": Op(
        "flex_truncating_remainder({0}, {1}, impossible)",
        "flex_truncating_remainder({0}, {1}, impossible)",
        None,
        torch.fmod,
        lambda d, g, a, b, y: (g, d.neg(d.mul(g, d.apply("truncating_divide", a, b)))),
    ),
    "neg": Op("-{0}", "{T}({U}(0) - {U}({0}))", None, torch.neg, lambda d, g, a, y: (d.neg(g),)),
    "abs": Op(
        "fabs({0})",
        "({0} < 0 ? {T}({U}(0) - {U}({0})) : {0})",
        None,
        torch.abs,
        lambda d, g, a, y: (d.mul(g, d.apply("sign", a)),),
    ),
    "sign": Op("flex_sign({0})", _SIGNS, None, torch.sign, lambda d, g, a, y: (None,)),
    "maximum": Op(
        "flex_max({0}, {1})",
        "max({0}, {1})",
        "{0} || {1}",
        torch.maximum,
        lambda d, g, a, b, y: _chosen(d, g, a, b, "gt"),
    ),
    "minimum": Op(
        "flex_min({0}, {1})",
        "min({0}, {1})",
        "{0} && {1}",
        torch.minimum,
        lambda d, g, a, b, y: _chosen(d, g, a, b, "lt"),
    ),
    "clamp_min": Op(
        "flex_max({0}, {1})",
        "max({0}, {1})",
        None,
        torch.maximum,
        lambda d, g, a, b, y: _within(d, g, a, b, "ge"),
    ),
    "clamp_max": Op(
        "flex_min({0}, {1})",
        "min({0}, {1})",
        None,
        torch.minimum,
        lambda d, g, a, b, y: _within(d, g, a, b, "le"),
    ),
    "where": Op(
        "({0} ? {1} : {2})",
        "({0} ? {1} : {2})",
        "({0} ? {1} : {2})",
        torch.where,
        lambda d, g, c, a, b, y: (
            None,
            d.where(c, g, d.number(0.0)),
            d.where(c, d.number(0.0), g),
        ),
    ),
    "eq": _comparison("==", torch.eq),
    "ne": _comparison("!=", torch.ne),
    "lt": _comparison("<", torch.lt),
    "le": _comparison("<=", torch.le),
    "gt": _comparison(">", torch.gt),
    "ge": _comparison(">=", torch.ge),
    "logical_and": Op(None, None, "{0} && {1}", torch.logical_and),
    "logical_or": Op(None, None, "{0} || {1}", torch.logical_or),
    "logical_xor": Op(None, None, "{0} != {1}", torch.logical_xor),
    "logical_not": Op(None, None, "!{0}", torch.logical_not),
    "bitwise_and": Op(None, "{0} & {1}", "{0} && {1}", torch.bitwise_and),
    "bitwise_or": Op(None, "{0} | {1}", "{0} || {1}", torch.bitwise_or),
    "bitwise_xor": Op(None, "{0} ^ {1}", "{0} != {1}", torch.bitwise_xor),
    "bitwise_not": Op(None, "~{0}", "!{0}", torch.bitwise_not),
    "bitwise_left_shift": Op(None, "flex_left_shift({0}, {1})", None, torch.bitwise_left_shift),
    "bitwise_right_shift": Op(None, "flex_right_shift({0}, {1})", None, torch.bitwise_right_shift),
    "isnan": Op("isnan({0})", None, None, torch.isnan),
    "exp": _function("precise::exp({0})", torch.exp, lambda d, g, a, y: (d.mul(g, y),)),
    "exp2": _function(
        "precise::exp2({0})",
        torch.exp2,
        lambda d, g, a, y: (d.mul(g, d.mul(y, d.number(math.log(2)))),),
    ),
    "log": _function("precise::log({0})", torch.log, lambda d, g, a, y: (d.div(g, a),)),
    "log2": _function("precise::log2({0})", torch.log2, _two_over(math.log(2))),
    "log10": _function("precise::log10({0})", torch.log10, _two_over(math.log(10))),
    "tanh": _function(
        "precise::tanh({0})",
        torch.tanh,
        lambda d, g, a, y: (d.mul(g, d.sub(d.number(1.0), d.mul(y, y))),),
    ),
    "sigmoid": _function(
        "1.0f / (1.0f + precise::exp(-{0}))",
        torch.sigmoid,
        lambda d, g, a, y: (d.mul(g, d.mul(y, d.sub(d.number(1.0), y))),),
    ),
    "sin": _function(
        "precise::sin({0})", torch.sin, lambda d, g, a, y: (d.mul(g, d.apply("cos", a)),)
    ),
    "cos": _function(
        "precise::cos({0})", torch.cos, lambda d, g, a, y: (d.neg(d.mul(g, d.apply("sin", a))),)
    ),
    "tan": _function(
        "precise::sin({0}) / precise::cos({0})",
        torch.tan,
        lambda d, g, a, y: (d.mul(g, d.apply("add", d.number(1.0), d.mul(y, y))),),
    ),
    "silu": _function("{0} / (1.0f + precise::exp(-{0}))", torch.nn.functional.silu, _silu),
    "sqrt": _function(
        "precise::sqrt({0})",
        torch.sqrt,
        lambda d, g, a, y: (d.div(g, d.mul(d.number(2.0), y)),),
    ),
    "rsqrt": _function(
        "precise::rsqrt({0})",
        torch.rsqrt,
        lambda d, g, a, y: (d.mul(d.number(-0.5), d.mul(g, d.mul(y, d.mul(y, y)))),),
    ),
    "reciprocal": _function(
        "1.0f / {0}", torch.reciprocal, lambda d, g, a, y: (d.neg(d.mul(g, d.mul(y, y))),)
    ),
    "pow": _function("precise::pow({0}, {1})", torch.pow, _power),
    "relu": Op(
        "flex_max({0}, 0.0f)",
        "max({0}, {T}(0))",
        None,
        torch.relu,
        lambda d, g, a, y: (d.where(d.compare("gt", a, d.number(0.0)), g, d.number(0.0)),),
    ),
    "detach": Op("{0}", "{0}", "{0}", torch.detach, lambda d, g, a, y: (None,)),
    "log1p": _function("flex_log1p({0})", torch.log1p),
    "expm1": _function("flex_expm1({0})", torch.expm1),
    "erf": _function("flex_erf({0})", torch.erf),
    **{
        name: _function(f"precise::{name}({{0}})", getattr(torch, name))
        for name in ("asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh")
    },
    "atan2": _function("precise::atan2({0}, {1})", torch.atan2),
    "floor": _rounding("floor", torch.floor),
    "ceil": _rounding("ceil", torch.ceil),
    "trunc": _rounding("trunc", torch.trunc),
    "round": _rounding("rint", torch.round),
}

# The ops that compute in the dtype their arguments promote to and give a bool.
COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge", "isnan"))
# Those of truth values.
LOGICAL = frozenset(("logical_and", "logical_or", "logical_xor", "logical_not"))
