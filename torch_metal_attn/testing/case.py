"""A case: one call of a public function as plain data, and what runs it."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from torch_metal_attn.testing.judge import Measure
from torch_metal_attn.testing.tensors import Memory

Own = TypeVar("Own", bound="Case")


@dataclass(frozen=True)
class Prepared:
    """A case's call.

    Attributes: judge: compares the function's result. written: the tensors in `memory` that the
        call may write.
    """

    function: Callable[..., Any]
    arguments: dict[str, Any]
    judge: Callable[[Any], list[Measure]]
    memory: Memory
    written: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """Fields are numbers, strings and tuples of them. Their defaults are the simplest case's.

    Attributes: call: the function. dtype: of its operands. seed: of the values. spoilt: how one
        argument is made wrong, see `spoiling`, so that the call must be refused. strict: judge by
        the policy alone. Otherwise the bounds also allow the roundings that few or equal values
        show (docs/numerics.md). threads: call again in so many threads at once, for the same bits.
        tiles: of attention: "8x8", "TF32" where the GPU has it, or "" for those of the dtype.
    """

    call: str = ""
    dtype: str = "float32"
    seed: int = 0
    spoilt: str = ""
    strict: bool = False
    threads: int = 0
    tiles: str = ""

    # Exceptions that the documentation of a call promises in addition to those of every call.
    ALSO_RAISES: ClassVar[dict[str, tuple[type[Exception], ...]]] = {}

    # Reasons of `refused` that are numbers in tensors: on mps the host does not read them.
    UNREAD_ON_MPS: ClassVar[tuple[str, ...]] = ()

    def meaningless(self) -> str:
        """Why no call can be made from the fields; "" for every case that was drawn."""
        return ""

    def refused(self) -> str:
        """Why the call must raise according to the documentation; "" if it must not."""
        return self.spoilt and f"{self.spoilt} is wrong"

    def smaller(self: Own) -> Iterator[Own]:
        """Simpler cases that change more than one field."""
        return iter(())

    def fields(self) -> dict[str, Any]:
        """The fields that differ from the defaults, and the call."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default or field.name == "call"
        }

    def __str__(self) -> str:
        """Python code that makes the case."""
        given = (f"{name}={value!r}" for name, value in self.fields().items())
        return f"{type(self).__name__}({', '.join(given)})"


def fewer(n: int) -> Iterator[int]:
    """Smaller counts to try for n, the smallest first."""
    return (less for less in dict.fromkeys((0, 1, n // 2, n - 1)) if 0 <= less < n)


def shorter(counts: tuple[int, ...] | None) -> Iterator[tuple[int, ...]]:
    """The same counts, each with one of them reduced by one."""
    for i, n in enumerate(counts or ()):
        for less in fewer(n):
            yield (*(counts or ())[:i], less, *(counts or ())[i + 1 :])
