"""The ops that a score_mod or mask_mod may use: the Metal text and the torch function of each.

Texts are templates with {0}, {1}, ... for the arguments' names. {T} is Metal's name of an integer
type, and {U} that of the unsigned type of equal size, in which arithmetic wraps around. float16 and
bfloat16 are computed in float32 and rounded, as PyTorch does on the CPU. `impossible` is a flag
that a kernel sets where an op has no value.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor


@dataclass(frozen=True)
class Op:
    """The text for each kind of dtype, None if not supported; evaluate: the op in torch."""

    floating: str | None
    integer: str | None
    boolean: str | None
    evaluate: Callable[..., Tensor]

    def text_in(self, dtype: torch.dtype) -> str | None:
        if dtype == torch.bool:
            return self.boolean
        return self.floating if dtype.is_floating_point else self.integer


def _wrapping(sign: str) -> str:
    return f"{{T}}({{U}}({{0}}) {sign} {{U}}({{1}}))"


def _comparison(sign: str, evaluate: Callable[..., Tensor]) -> Op:
    text = f"{{0}} {sign} {{1}}"
    boolean = text if sign in ("==", "!=") else f"int({{0}}) {sign} int({{1}})"
    return Op(text, text, boolean, evaluate)


def _function(text: str, evaluate: Callable[..., Tensor]) -> Op:
    return Op(text, None, None, evaluate)


def _quotient(name: str, evaluate: Callable[..., Tensor]) -> Op:
    text = f"{name}({{0}}, {{1}}, impossible)"
    return Op(text, text, None, evaluate)


def _rounding(name: str, evaluate: Callable[..., Tensor]) -> Op:
    return Op(f"{name}({{0}})", "{0}", None, evaluate)


_SIGNS = "({0} > 0 ? 1 : {0} < 0 ? -1 : 0)"

OPS: dict[str, Op] = {
    "add": Op("{0} + {1}", _wrapping("+"), "{0} || {1}", torch.add),
    "sub": Op("{0} - {1}", _wrapping("-"), None, torch.sub),
    "mul": Op("{0} * {1}", _wrapping("*"), "{0} && {1}", torch.mul),
    "div": Op("{0} / {1}", None, None, torch.div),
    "floor_divide": _quotient("flex_floor_divide", partial(torch.div, rounding_mode="floor")),
    "truncating_divide": _quotient(
        "flex_truncating_divide", partial(torch.div, rounding_mode="trunc")
    ),
    "remainder": _quotient("flex_remainder", torch.remainder),
    "fmod": _quotient("flex_truncating_remainder", torch.fmod),
    "neg": Op("-{0}", "{T}({U}(0) - {U}({0}))", None, torch.neg),
    "abs": Op("fabs({0})", "({0} < 0 ? {T}({U}(0) - {U}({0})) : {0})", None, torch.abs),
    "sign": Op("flex_sign({0})", _SIGNS, None, torch.sign),
    "maximum": Op("flex_max({0}, {1})", "max({0}, {1})", "{0} || {1}", torch.maximum),
    "minimum": Op("flex_min({0}, {1})", "min({0}, {1})", "{0} && {1}", torch.minimum),
    "clamp_min": Op("flex_max({0}, {1})", "max({0}, {1})", None, lambda a, b: a.clamp(min=b)),
    "clamp_max": Op("flex_min({0}, {1})", "min({0}, {1})", None, lambda a, b: a.clamp(max=b)),
    "where": Op("({0} ? {1} : {2})", "({0} ? {1} : {2})", "({0} ? {1} : {2})", torch.where),
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
    "exp": _function("precise::exp({0})", torch.exp),
    "exp2": _function("precise::exp2({0})", torch.exp2),
    "log": _function("precise::log({0})", torch.log),
    "log2": _function("precise::log2({0})", torch.log2),
    "log10": _function("precise::log10({0})", torch.log10),
    "tanh": _function("precise::tanh({0})", torch.tanh),
    "sigmoid": _function("1.0f / (1.0f + precise::exp(-{0}))", torch.sigmoid),
    "sin": _function("precise::sin({0})", torch.sin),
    "cos": _function("precise::cos({0})", torch.cos),
    "tan": _function("precise::sin({0}) / precise::cos({0})", torch.tan),
    "silu": _function("{0} / (1.0f + precise::exp(-{0}))", torch.nn.functional.silu),
    "sqrt": _function("precise::sqrt({0})", torch.sqrt),
    "rsqrt": _function("precise::rsqrt({0})", torch.rsqrt),
    "reciprocal": _function("1.0f / {0}", torch.reciprocal),
    "pow": _function("precise::pow({0}, {1})", torch.pow),
    "relu": Op("flex_max({0}, 0.0f)", "max({0}, {T}(0))", None, torch.relu),
    "detach": Op("{0}", "{0}", "{0}", torch.detach),
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

# Ops that compute in the promoted dtype of their arguments and return a bool.
COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge", "isnan"))
# Ops on truth values.
LOGICAL = frozenset(("logical_and", "logical_or", "logical_xor", "logical_not"))
