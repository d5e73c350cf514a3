"""Values of `--arg`: tensors by fill and shape, numbers, and tensors from files."""

import pickle
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ..metal.constants import FLOATS, INTEGER_RANGES
from ..metal.kernels import Parameter
from ..parameter_types import DTYPE_OF, SCALAR_OF, ParameterType, name_of

SYNTAX = """values of --arg:
  FILL:SHAPE[:DTYPE]   a tensor: randn:5x100, arange:16, nan:5:float16, 0:4x4
                       FILL is a number, rand, randn or arange
  NUMBERS[:DTYPE]      100, 0.5, true, 1,2,3
                       for a struct its fields in order: 4:int,8:int,0.5:float
  FILE                 a tensor from a .npy or .pt file
A DTYPE has torch's name or Metal's. It can be left out where the kernel
declares it."""

DTYPES = {name_of(dtype): dtype for dtype in DTYPE_OF.values()} | DTYPE_OF
SHAPE = re.compile(r"\d+(x\d+)*")
FILE_SUFFIXES = (".npy", ".pt")

_FLOATING = (torch.float16, torch.bfloat16, torch.float32)
_FILLS: dict[str, Callable[[int], torch.Tensor]] = {
    "rand": torch.rand,
    "randn": torch.randn,
    "arange": torch.arange,
}


class BadRequest(ValueError):
    """A command that cannot be run as it is given."""


def sizes(text: str) -> tuple[int, ...]:
    """`5x100`, which matches SHAPE, as a tuple."""
    return tuple(int(size) for size in text.split("x"))


def tensor(text: str, parameter: Parameter, expected: ParameterType) -> torch.Tensor:
    """The tensor that a value stands for, as an argument for the parameter."""
    try:
        if text.endswith(FILE_SUFFIXES):
            return _loaded(Path(text))
        filled = _filled(text, expected)
        return _numbers(text, expected) if filled is None else filled
    except (BadRequest, RuntimeError) as error:  # torch raises the latter without enough memory
        raise BadRequest(f"--arg {parameter.name}={text}: {str(error).splitlines()[0]}") from None


def save(value: torch.Tensor, path: Path) -> None:
    """Write a tensor to a .npy or .pt file."""
    if path.suffix == ".npy":
        np.save(path, value.numpy())
    else:
        torch.save(value, path)


def _loaded(path: Path) -> torch.Tensor:
    try:
        if path.suffix == ".npy":
            loaded = torch.from_numpy(np.ascontiguousarray(np.load(path, allow_pickle=False)))
        else:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, ValueError, TypeError, RuntimeError, EOFError, pickle.PickleError) as error:
        raise BadRequest(f"cannot be read: {str(error).splitlines()[0]}") from None
    if not isinstance(loaded, torch.Tensor):
        raise BadRequest(f"the file holds a {type(loaded).__name__}; it must hold a tensor")
    # In memory of its own, which bounds what the kernel may access.
    return loaded.detach().contiguous().clone()


def _dtype(name: str, expected: ParameterType) -> torch.dtype:
    if name:
        if name not in DTYPES:
            raise BadRequest(f"{name!r} is no dtype; known are {', '.join(DTYPES)}")
        return DTYPES[name]
    if not expected.scalar:
        raise BadRequest("give a dtype: the kernel declares no scalar or vector here")
    return DTYPE_OF[expected.scalar]


def _filled(text: str, expected: ParameterType) -> torch.Tensor | None:
    """A tensor by fill and shape; None if the text is something else."""
    fill, _, rest = text.partition(":")
    shape, _, name = rest.partition(":")
    if "," in fill or not SHAPE.fullmatch(shape):
        if fill in _FILLS:
            raise BadRequest(f"give the shape: {fill}:4x8")
        return None
    dtype = _dtype(name, expected)
    count = int(np.prod(sizes(shape), dtype=object))
    if fill not in _FILLS:
        flat = torch.tensor(_number(fill, dtype), dtype=dtype).expand(count).clone()
    elif fill == "arange" or dtype in _FLOATING:
        flat = _FILLS[fill](count).to(dtype)
    else:
        raise BadRequest(f"{fill} needs a floating-point dtype, and this is {name_of(dtype)}")
    return flat.reshape(sizes(shape))


def _numbers(text: str, expected: ParameterType) -> torch.Tensor:
    """Numbers, each of the dtype that follows it or a later one; as bytes if dtypes differ."""
    items = [item.partition(":") for item in text.split(",")]
    dtypes: list[torch.dtype] = []
    name = ""
    for _, _, given in reversed(items):
        name = given or name
        dtypes.append(_dtype(name, expected))
    dtypes.reverse()
    values = [
        torch.tensor([_number(word, dtype)], dtype=dtype)
        for (word, _, _), dtype in zip(items, dtypes, strict=True)
    ]
    numbers = torch.cat(values) if len(set(dtypes)) == 1 else _struct(values)
    size = numbers.numel() * numbers.element_size()
    if expected.is_reference and size not in (expected.bytes, expected.unpadded_bytes):
        raise BadRequest(f"has {size} bytes; the kernel declares {expected.bytes}, with padding")
    return numbers


def _struct(fields: list[torch.Tensor]) -> torch.Tensor:
    """The bytes of a struct of scalars, each at a multiple of its size."""
    data = b""
    for value in fields:
        data += bytes(-len(data) % value.element_size()) + value.view(torch.uint8).numpy().tobytes()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _number(word: str, dtype: torch.dtype) -> int | float | bool:
    """The word as a number that the dtype holds."""
    scalar = SCALAR_OF[dtype]
    if scalar == "bool":
        if word not in ("0", "1", "true", "false"):
            raise BadRequest(f"{word!r} must be true, false, 1 or 0")
        return word in ("1", "true")
    if scalar in INTEGER_RANGES:
        low, high = INTEGER_RANGES[scalar]
        try:
            value = int(word, 0)
        except ValueError:
            raise BadRequest(f"{word!r} must be an integer ({name_of(dtype)})") from None
        if not low <= value <= high:
            raise BadRequest(f"{word} must be from {low} to {high} ({name_of(dtype)})")
        return value
    try:
        number = float(word)
    except ValueError:
        raise BadRequest(f"{word!r} must be a number ({name_of(dtype)})") from None
    if FLOATS[scalar] < abs(number) < float("inf"):
        raise BadRequest(f"{word} must be at most {FLOATS[scalar]:g} ({name_of(dtype)})")
    return number
