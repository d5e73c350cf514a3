"""Makes the values and the memory layouts of a case's tensors from seeds and words."""

import math
import random
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.quantisation import HADAMARD, shared_columns
from torch_metal_attn.runtime.device import memory_of
from torch_metal_attn.testing.judge import Measure, Skipped, normal, same_bits

DTYPES = ("float32", "float16", "bfloat16")

# Words that describe a tensor's memory layout, see `Memory.place`.
Layout = tuple[str, ...]

_FAR = 2**31  # elements
_MEMORY_FOR_FAR = 16e9  # bytes; such a tensor of two parts in half precision has 4.3e9

# By kind of values: factors for normally distributed q and k, and for v.
_SCALES = {
    "normal": (1.0, 1.0),
    "sharp": (3.0, 1.0),  # scores are 9 times as large
    "tiny": (2.0**-8, 2.0**-8),
    "huge": (1.0, 2.0**10),
    "zeros": (0.0, 1.0),
}
KINDS = (*_SCALES, "constant")


def dtype_of(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def numbers(
    *shape: int, kind: str = "normal", seed: int = 0, dtype: torch.dtype, values: bool = False
) -> Tensor:
    """A tensor of a kind on the CPU. values: True for v."""
    if kind == "constant":
        return torch.full(shape, 0.75, dtype=dtype)
    return (normal(*shape, seed=seed) * _SCALES[kind][values]).to(dtype)


def expanded(x: Tensor, layout: Layout) -> Tensor:
    """x, expanded along the dimensions that the layout repeats."""
    for dim in _repeated_dims(layout, x.dim()):
        x = x.narrow(dim, 0, min(1, x.shape[dim])).expand_as(x)
    return x


class Memory:
    """The memory of a case's tensors. Each is part of a larger one of NaN or the largest int."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # The whole tensor, a copy of it before the call, and the part that the call gets.
        self._held: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    def place(self, name: str, x: Tensor, layout: Layout = ()) -> Tensor:
        """Copy x to the device in a layout, which is a tuple of these words:

        "order 021": the dimensions from the outermost in memory; omitted ones follow. "padded n":
        n other elements at each end of the innermost dimension, and one row at each end of the
        other dimensions. "repeated n": dimension n has stride 0; x must be `expanded`. "far n", as
        the only word: dimension n has a stride of 2**31 elements; the memory around is not checked.
        """
        if layout and layout[0].startswith("far"):
            return self._far(x, int(layout[0].split()[1]))
        order, padding = list(range(x.dim())), 0
        for word in layout:
            what, number = word.split()
            if what == "order":
                named = [int(digit) for digit in number]
                order = named + [dim for dim in order if dim not in named]
            elif what == "padded":
                padding = int(number)
        repeated = _repeated_dims(layout, x.dim())
        sizes = [1 if dim in repeated and x.shape[dim] else x.shape[dim] for dim in order]
        ends = [1 if padding else 0] * x.dim()
        if ends:
            ends[-1] = padding
        bits = x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
        whole = torch.empty(
            [size + 2 * end for size, end in zip(sizes, ends, strict=True)],
            dtype=bits.dtype,
            device=self.device,
        ).fill_(_nonsense(bits.dtype))
        part = whole[
            tuple(slice(end, end + size) for size, end in zip(sizes, ends, strict=True))
        ].permute([order.index(dim) for dim in range(x.dim())])
        part.copy_(
            bits[tuple(slice(0, 1) if dim in repeated else slice(None) for dim in range(x.dim()))]
        )
        part = part.expand(x.shape)
        self._held[name] = (whole, whole.clone(), part)
        return part.view(x.dtype)

    def placed(self) -> dict[str, Tensor]:
        """The tensors by name; 8-bit floats as bytes."""
        return {name: part for name, (_, _, part) in self._held.items()}

    def _far(self, x: Tensor, dim: int) -> Tensor:
        """Raises Skipped if the device has too little memory."""
        memory = memory_of(self.device)
        if memory < _MEMORY_FOR_FAR:
            needed = _MEMORY_FOR_FAR / 1e9
            raise Skipped(f"the machine has {memory / 1e9:.0f} GB; this case needs {needed:.0f} GB")
        parts = x.unbind(dim)
        count = parts[0].numel()
        try:
            size = (len(parts) - 1) * _FAR + count
            whole = torch.empty(size, dtype=x.dtype, device=self.device)
            for i, part in enumerate(parts):  # torch copies a contiguous part without an index
                there = whole[i * _FAR : i * _FAR + count]
                there.copy_(part.flatten())
                if not torch.equal(there.cpu(), part.flatten()):
                    raise RuntimeError("it reads other values than it wrote")
            strides = [*parts[0].contiguous().stride()]
            return whole.as_strided(x.shape, (*strides[:dim], _FAR, *strides[dim:]))
        except RuntimeError as error:
            raise Skipped(f"torch itself cannot prepare the tensor: {error}") from None

    @torch.no_grad()
    def undisturbed(self, written: tuple[str, ...] = ()) -> Measure:
        """Counts the bytes that a call changed outside of the tensors that it may write."""
        changed = 0.0
        for name, (whole, before, part) in self._held.items():
            expected = before
            if name in written:
                expected = before.clone()
                as_in = torch.as_strided(expected, part.shape, part.stride(), part.storage_offset())
                as_in.copy_(part)
            changed += same_bits(name, whole, expected).error
        return Measure("memory that must not be written, bytes that differ", changed, 0.0)


def _repeated_dims(layout: Layout, dims: int) -> list[int]:
    results = [int(word.split()[1]) for word in layout if word.startswith("repeated")]
    return [dim for dim in results if dim < dims]


def _nonsense(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point:
        return math.nan
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def rotated_blocks(r: random.Random, case: Any) -> int:
    """Draw the size of rotated blocks, which divides both head dims; 0 without a format."""
    fit = [n for n in HADAMARD if case.head_dim % n == 0 and case.v_head_dim % n == 0]
    return r.choice(fit) if fit and case.format else 0


def wrong_rotation(case: Any) -> dict[str, Any]:
    size = case.hadamard
    return {
        "hadamard without a format": size and not case.format,
        "hadamard": size not in (0, *HADAMARD)
        or (size and (case.head_dim % size or case.v_head_dim % size)),
    }


def partial_groups(case: Any) -> dict[str, Any]:
    """Conflicts of a case with format and v_format: head dims that are not whole blocks."""
    operands = (
        ("k", case.format, case.head_dim),
        ("v", case.v_format or case.format, case.v_head_dim),
    )
    return {
        f"{name} in {format} has blocks of {shared_columns(format)} columns": columns
        % shared_columns(format)
        for name, format, columns in operands
        if format
    }


def impossible_heads(case: Any) -> dict[str, Any]:
    """Conflicts of heads and head dims in a case with a cache."""
    return {
        "values in keys must not be wider than the keys": case.values_in_keys
        and case.v_head_dim > case.head_dim,
        "heads must be a multiple of kv_heads": case.kv_heads < 1 or case.heads % case.kv_heads,
        **partial_groups(case),
    }
