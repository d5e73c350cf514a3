"""Values, types and counts in English, for messages."""

import reprlib
from typing import Any

import torch

_LONGEST = 120  # characters of a value that is shown
_DIGITS = 100  # of an int that is shown; Python cannot print more than 4300


def with_article(noun: str) -> str:
    """The noun with its article: "a tensor", "an int", "a uint8 tensor"."""
    begins = noun.lower().startswith
    vowel = begins((*"aeio", "un", "ndarray")) and not begins("uni")
    return f"{'an' if vowel else 'a'} {noun}"


def type_text(value: object) -> str:
    """A value's type: "an int", "a float16 tensor of shape (2, 3)"."""
    array = _array(value)
    if array is None:
        return "None" if value is None else with_article(type(value).__name__)
    shape, dtype = array
    name = "tensor" if isinstance(value, torch.Tensor) else type(value).__name__
    return f"{with_article(f'{dtype} {name}')} of shape {shape}"


def count_text(count: Any, noun: str) -> str:
    """A number with its noun: "1 call", "2 calls", "3 queries"."""
    if count == 1:
        return f"{count} {noun}"
    is_consonant_y = noun.endswith("y") and not noun.endswith("ey")
    return f"{count} {f'{noun[:-1]}ies' if is_consonant_y else f'{noun}s'}"


def value_text(value: object) -> str:
    """A value on one line. Long values are shortened, and a tensor is named by dtype and shape."""
    text = " ".join(_SHORT.repr(value).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _array(value: object) -> tuple[tuple[int, ...], str] | None:
    try:
        shape, dtype = tuple(value.shape), str(value.dtype)  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError, TypeError):  # a nested tensor has no shape
        return None
    if not isinstance(value, torch.Tensor) and shape == ():  # a NumPy scalar
        return None
    return shape, dtype.rpartition(".")[2]


class _Short(reprlib.Repr):
    """`repr` with few elements of each container and no elements of tensors and arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = _LONGEST
        self.maxlong = _DIGITS

    def repr1(self, x: Any, level: int) -> str:
        array = _array(x)
        return super().repr1(x, level) if array is None or array[0] == () else type_text(x)

    def repr_int(self, x: int, level: int) -> str:
        return f"an int of {x.bit_length()} bits" if abs(x) >= 10**_DIGITS else repr(x)


_SHORT = _Short()
