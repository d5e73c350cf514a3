"""Translates errors of ops into the argument names of the functions that call them."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch_metal_attn.ops.differentiation import call

_NAME = re.compile(r"\b[a-z]\w*\b")
# Four sizes, strides or dimensions: "(2, 4, 40, 32)", "(batch, heads, length, head_dim)".
_FOUR = re.compile(r"\(([^\s(),]+), ([^\s(),]+), ([^\s(),]+), ([^\s(),]+)\)")
# torch's own refusal of an argument's type.
_SCHEMA = re.compile(
    r"Expected a value of type '(?P<type>\S+)' for argument '(?P<name>\w+)' but instead found type "
    r"'(?P<found>\S+)'.*?^Value: (?P<value>.*?)$",
    re.DOTALL | re.MULTILINE,
)
_KINDS = {"float": "a number", "int": "an int", "bool": "a bool", "Tensor": "a tensor"}


@dataclass(frozen=True)
class Wording:
    """What a function calls an op's arguments.

    heads_third: the function's tensors are (B, L, H, D), while the op's are (B, H, L, D).
    """

    names: Mapping[str, str] = field(default_factory=dict)
    heads_third: bool = False

    def run(
        self, op: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """Run the op; its errors name the function's arguments."""
        try:
            return call(op, arguments, options)
        except (RuntimeError, ValueError) as error:
            raise self.error(error) from None

    def of(self, message: str) -> str:
        """The op's message with the function's names."""
        message = _NAME.sub(lambda match: self.names.get(match[0], match[0]), message)
        return _FOUR.sub(r"(\1, \3, \2, \4)", message) if self.heads_third else message

    def error(self, error: Exception) -> Exception:
        """What the function raises for an op's error: `error` itself if it is not ours."""
        text = str(error)
        if type(error) in (ValueError, NotImplementedError):
            return type(error)(self.of(text))
        schema = _SCHEMA.search(text) if type(error) is RuntimeError else None
        return error if schema is None else TypeError(self._type(schema))

    def _type(self, schema: re.Match[str]) -> str:
        name = self.names.get(schema["name"], schema["name"])
        optional = schema["type"].startswith("Optional[")
        kind = schema["type"].removeprefix("Optional[").removesuffix("]")
        wanted = _KINDS.get(kind, kind) + (" or None" if optional else "")
        if kind == "Tensor":
            return f"{name} is a {schema['found']}; it must be {wanted}"
        return f"{name} is {schema['value']}; it must be {wanted}"
