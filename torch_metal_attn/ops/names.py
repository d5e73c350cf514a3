"""For errors: the names that ops' arguments have in the functions that call the ops."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.ops.differentiation import by_schema, call
from torch_metal_attn.runtime.refusals import marked, unmarked
from torch_metal_attn.wording import type_text, value_text

_MARK = re.compile("`([^`]*)`")
# By an argument's kind in an op's schema: the allowed Python types, and their name in errors.
_KINDS: dict[str, tuple[Any, str]] = {
    "TensorType": (Tensor, "a tensor"),
    "FloatType": (int | float | torch.SymInt | torch.SymFloat, "a number"),
    "IntType": (int | torch.SymInt, "an int"),
    "BoolType": (bool | torch.SymBool, "a bool"),
}


@dataclass(frozen=True)
class ArgumentNames:
    """{op's name: function's name} where they differ. blhd: the function's tensors are BLHD."""

    names: Mapping[str, str] = field(default_factory=dict)
    blhd: bool = False

    def run(self, op: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Run an op, or a function of an op, with the function's names in errors."""
        try:
            return call(op, arguments, options)
        except (ValueError, NotImplementedError) as error:
            raise self.error(error) from None
        except RuntimeError:
            self.check_types(op, arguments, options)
            raise

    def error(self, error: Exception) -> Exception:
        """A refusal with the function's names. Other errors are returned unchanged."""
        if type(error) not in (ValueError, NotImplementedError):
            return error
        return type(error)(self.text(str(error)))

    def text(self, message: str) -> str:
        return unmarked(_MARK.sub(lambda match: f"`{self._replaced(match[1])}`", marked(message)))

    def _replaced(self, word: str) -> str:
        """The function's name of an argument, or its form of a shape or layout."""
        if not word.startswith("("):
            return self.names.get(word, word)
        sizes = word[1:-1].split(", ")
        if self.blhd and len(sizes) == 4:
            sizes[1], sizes[2] = sizes[2], sizes[1]
            return f"({', '.join(sizes)})"
        return word

    def check_types(self, op: Any, arguments: Sequence[Any], options: dict[str, Any]) -> None:
        for argument, value in by_schema(op, arguments, options):
            optional = argument.type.kind() == "OptionalType"
            kind = argument.type.getElementType() if optional else argument.type
            allowed, wanted = _KINDS.get(kind.kind(), (object, ""))
            name = self.names.get(argument.name, argument.name)
            if isinstance(value, int) and not -(2**63) <= value < 2**63 and wanted == "an int":
                raise ValueError(f"{name} is {value_text(value)}; it must fit int64") from None
            if isinstance(value, allowed):
                continue
            if optional:
                if value is None:
                    continue
                wanted += " or None"
            actual = type_text(value) if allowed is Tensor else value_text(value)
            raise TypeError(f"{name} is {actual}; it must be {wanted}") from None
