"""Checks that a kernel's arguments have the types that its parameters point to."""

import ctypes
from typing import Any

import torch

from .diagnostics import hides_frames
from .metal.constants import FLOATS, INTEGER_RANGES
from .metal.kernels import Parameter
from .wording import count_text, value_text

__tracebackhide__ = hides_frames
# In the order of shim/__msl_parameters.h. "" stands for any other type, such as a struct.
SCALARS = ("", "bool", *INTEGER_RANGES, *FLOATS)

SCALAR_OF = {
    torch.bool: "bool",
    torch.int8: "char",
    torch.uint8: "uchar",
    torch.int16: "short",
    torch.uint16: "ushort",
    torch.int32: "int",
    torch.uint32: "uint",
    torch.int64: "long",
    torch.uint64: "ulong",
    torch.float16: "half",
    torch.bfloat16: "bfloat",
    torch.float32: "float",
    torch.complex32: "half",
    torch.complex64: "float",
}
DTYPE_OF = {scalar: dtype for dtype, scalar in SCALAR_OF.items() if not dtype.is_complex}

# The names for `arg_casts`, as in torch.
CASTS = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
}


class ParameterType(ctypes.Structure):
    """metal::__parameter_type: the type that a parameter points to, with aliases resolved.

    bytes: 0 for a type without a size. unpadded_bytes: less the padding of a three-element vector.
    exists: False if the function constants remove the parameter.
    """

    _fields_ = (
        ("bytes", ctypes.c_uint32),
        ("unpadded_bytes", ctypes.c_uint32),
        ("scalar_number", ctypes.c_uint8),
        ("is_reference", ctypes.c_bool),
        ("exists", ctypes.c_bool),
    )

    @property
    def scalar(self) -> str:
        """The type itself, a vector's element type or an atomic's value type; one of SCALARS."""
        return SCALARS[self.scalar_number]


def check_tensor(
    kernel: str, tensor: torch.Tensor, parameter: Parameter, expected: ParameterType
) -> None:
    """Raise TypeError for another type, except that bytes (uint8, char, uchar) fit any type."""
    actual = SCALAR_OF.get(tensor.dtype, "")
    if expected.scalar in ("", "char", "uchar") or actual == "uchar":
        return
    is_complex = tensor.is_complex() and expected.bytes != tensor.element_size()
    if is_complex or not _is_compatible(actual, expected.scalar):
        dtype = DTYPE_OF[expected.scalar]
        convert = "torch.view_as_real(tensor)" if is_complex else f".to({dtype})"
        raise TypeError(
            f"{kernel}: argument {parameter.index} is a tensor of {name_of(tensor.dtype)}; "
            f"{parameter.declared} needs {name_of(dtype)}. Convert it with {convert}, or pass "
            ".view(torch.uint8) to reinterpret its bytes"
        )


def check_numbers(
    kernel: str, arg: Any, numbers: torch.Tensor, parameter: Parameter, expected: ParameterType
) -> None:
    """Raise TypeError or ValueError if the kernel would read different numbers."""
    actual, scalar = SCALAR_OF[numbers.dtype], expected.scalar
    what = f"{kernel}: argument {parameter.index} is {value_text(arg)}"
    # As in torch, a kernel may read the low bytes of one int64 if they are the same number.
    is_integer = scalar not in ("", *FLOATS) and expected.bytes == DTYPE_OF[scalar].itemsize
    if actual == "long" and numbers.numel() == 1 and is_integer:
        # From the minimum of the signed type to the maximum of the unsigned type.
        name = scalar.removeprefix("u")
        low, high = 0, 1
        if name != "bool":
            low, high = INTEGER_RANGES[name][0], INTEGER_RANGES[f"u{name}"][1]
        if not low <= int(numbers) <= high:
            raise ValueError(f"{what}; {parameter.declared} accepts {low} to {high}")
        return
    if scalar and not _is_compatible(actual, scalar):
        raise TypeError(
            f"{what}, passed as {name_of(numbers.dtype)}; {parameter.declared} needs "
            f"{name_of(DTYPE_OF[scalar])}: {_advice(parameter.index, scalar)}"
        )
    size = numbers.numel() * numbers.element_size()
    if expected.is_reference and size not in (expected.bytes, expected.unpadded_bytes):
        raise ValueError(
            f"{what}, which has {count_text(size, 'byte')}; {parameter.declared} needs "
            f"{count_text(expected.bytes, 'byte')}"
        )


def _is_compatible(actual: str, scalar: str) -> bool:
    if not actual or actual in FLOATS or scalar in FLOATS:
        return actual == scalar
    return DTYPE_OF[actual].itemsize == DTYPE_OF[scalar].itemsize


def _advice(index: int, scalar: str) -> str:
    for cast, dtype in CASTS.items():
        if _is_compatible(SCALAR_OF[dtype], scalar):
            return f"pass arg_casts={{{index}: {cast!r}}}"
    return f"pass {'a float' if scalar == 'float' else 'an int'} without a cast"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
