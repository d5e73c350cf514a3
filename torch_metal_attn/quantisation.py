"""The formats of quantised K and V caches, and their conversion.

| format | data | scale | value |
| --- | --- | --- | --- |
| q8_0 | int8 (..., D) | float16 (..., D / 32) | data * scale of its 32 columns |
| q4_0 | uint8 (..., D / 2), column 2 j in byte j's low nibble | the same | (nibble - 8) * scale |
| fp8_e4m3 | float8_e4m3fn (..., D), or its bytes | float32 (heads) or (B, heads) | data * scale |
| q2_g32, q2_g64 | int16 (..., D / 8) | float16 (..., 2 D / G) | code * scale + minimum |
| q3_g32, q3_g64 | uint8 (..., 3 D / 8) | the same | the same |
| q4_g32, q4_g64 | int32 (..., D / 8) | the same | the same |

The last six have codes of 2, 3 or 4 bits, and a scale and a minimum for each group of G = 32 or 64
columns. Group g has its scale in column 2 g of the scale tensor, and its minimum in column 2 g + 1.
The codes of a row are consecutive; the first code is in the lowest bits of the first element. With
a minimum, a group uses the entire range of codes. MLX's caches have this form
(`mlx.core.quantize`), and so do the values in Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit
Quantization for KV Cache" (2024), whose keys are quantised by column. K and V may differ in format.

q8_0 and q4_0 are llama.cpp's (ggml's) formats with another byte order, which `from_ggml` and
`to_ggml` convert. Quantising computes the scale of each block of 32 columns; ggml's own
quantisation may round a value to the neighbouring code. fp8_e4m3 is vLLM's format. The caller
passes its scales, one per head. Its data is uint8 on mps, which has no float8.

Rows may be rotated before quantisation: each block of 32, 64 or 128 columns is multiplied by the
orthonormal Hadamard matrix, which spreads a column of large values over its block, so that its
neighbours keep their precision (Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated
LLMs", 2024). Rotated queries and keys have the same scores.

These functions are plain torch, on any device. `torch.ops.metal_attn.append_kv` gives the same
bits.
"""

import torch
from torch import Tensor

from torch_metal_attn.call import arguments
from torch_metal_attn.call.autocast import without_autocast
from torch_metal_attn.wording import count_text, value_text

__all__ = [
    *("BLOCK", "DTYPES", "FORMATS", "HADAMARD", "columns", "dequantise", "format_of", "from_ggml"),
    *("hadamard", "quantise", "shared_columns", "sizes", "to_ggml"),
]

# The number of columns that share a scale in q8_0 and q4_0.
BLOCK = 32
# Bits per code and columns per group, for the formats with a scale and a minimum per group.
_GROUPED = {f"q{bits}_g{group}": (bits, group) for bits in (2, 3, 4) for group in (32, 64)}
_WORDS = {2: torch.int16, 3: torch.uint8, 4: torch.int32}
# The dtype of a format's data on any device.
DTYPES = {"q8_0": torch.int8, "q4_0": torch.uint8, "fp8_e4m3": torch.uint8} | {
    format: _WORDS[bits] for format, (bits, _) in _GROUPED.items()
}
FORMATS = tuple(DTYPES)

# The possible numbers of columns of a rotated block.
HADAMARD = (32, 64, 128)

_LARGEST_FP8 = 448.0
_NAN_FP8 = 0x7F
# The dtypes of rows that are not quantised.
ELEMENTS = (torch.float32, torch.float16, torch.bfloat16)


def hadamard(x: Tensor, size: int) -> Tensor:
    """Multiply each block of `size` columns of x (..., D) by the orthonormal Hadamard matrix.

    The matrix is symmetric and its own inverse, so the same call rotates back. Sums are float32 and
    are rounded to x's dtype. With a rotated cache, pass hadamard(q) to `flash_fwd`, and the result
    is hadamard(out). `flash_decode` does both itself.

    size: 32, 64 or 128. D must be a multiple of `size`.
    """
    arguments.check_tensor("x", x)
    if x.dtype not in ELEMENTS:
        raise ValueError(f"x has dtype {x.dtype}; it must be float32, float16 or bfloat16")
    if not check_hadamard(size, {"x": x.shape[-1] if x.dim() else 0}, "size"):
        raise ValueError(f"size is 0; it must be one of {', '.join(map(str, HADAMARD))}")
    # Created on x's device, as a copy from the host would wait for the GPU.
    matrix = rotated(torch.eye(size, device=x.device), size)
    with without_autocast(x.device.type):
        return (x.float().unflatten(-1, (-1, size)) @ matrix).flatten(-2).to(x.dtype)


def check_columns(name: str, columns: int, format: str) -> None:
    shared = shared_columns(format)
    if columns % shared != 0:
        raise ValueError(f"{name} is {columns}; {format} needs a multiple of {shared}")


def check_hadamard(size: int, columns: dict[str, int], name: str = "hadamard") -> int:
    """`size` as an int; it must be 0 or divide `columns`, the columns of each named tensor."""
    size = arguments.as_int(name, size)
    if size not in (0, *HADAMARD):
        raise ValueError(f"{name} is {size}; it must be 0 (off), 32, 64 or 128")
    for x, count in columns.items():
        if size and (count % size or count == 0):
            raise ValueError(
                f"{x} has {count_text(count, 'column')}; {name}={size} needs a multiple of {size}"
            )
    return size


def rotated(x: Tensor, size: int) -> Tensor:
    """`hadamard` of float32 x, by sums and differences at distances 1, 2, ...; x if size is 0."""
    distance = 1
    while distance < size:
        low, high = x.unflatten(-1, (-1, 2, distance)).unbind(-2)
        x = torch.stack((low + high, low - high), -2).flatten(-3)
        distance *= 2
    return x * size**-0.5 if size else x


def quantise(
    x: Tensor,
    format: str,
    scale: Tensor | None = None,
    *,
    heads_dim: int = 1,
    hadamard: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Quantise x (..., D) in float32, float16 or bfloat16; returns data and scale.

    x is converted to float32 first. With amax the largest magnitude of a block of 32 columns, and y
    the float32 result of `dequantise`:

    q8_0: scale = float16(amax / 127); data = x / scale rounded to nearest even, in -127..127.
        |x - y| <= amax / 254 * (1 + 2^-10) + 2^-18.
    q4_0: m is the first value of largest magnitude; scale = float16(m / -8); nibble = 8 + x / scale
        rounded to nearest even, in 0..15. |x - y| <= amax / 16 * (1 + 2^-7) + 2^-22 if x has the
        sign of m or |x| <= 15/16 amax; otherwise the bound is twice as large.
    fp8_e4m3: x / scale clamped to -448..448 and rounded to nearest even. If |x| <= 448 scale,
        |x - y| is at most the larger of 2^-4 |x| and scale * 2^-10. inf is clamped; NaN stays NaN.

    2, 3 and 4 bits: with the group's smallest and largest value, minimum = float16(smallest); scale
        = float16((largest - smallest) / n), n = 3, 7 or 15; code = (x - minimum) / scale rounded to
        nearest even, in 0..n. With amax the group's largest magnitude and r = largest - smallest,
        |x - y| <= r / (2 n) * (1 + 2^-7) + 2^-10 amax + 2^-21.

    2^-18, 2^-21 and 2^-22 come from float16's smallest steps, and matter only for blocks of small
    values. A block or group with NaN or inf, or whose scale or minimum exceeds float16, has scale
    (and minimum) NaN and zeros as data. D must be a multiple of 32 (q8_0 and q4_0) or of G.

    `scale` is for fp8_e4m3 only: float32 (heads) or (B, heads), where x's dimension `heads_dim` is
    the heads and dimension 0 is B. It is returned unchanged. None means 1; on devices without
    float8 a scale of ones is then returned, as it distinguishes fp8_e4m3 from q4_0.

    With `hadamard` of 32, 64 or 128, x above is x rotated by `hadamard(x, ...)` in float32.
    """
    _check_format(format)
    _check_tensors(x=x, scale=scale)
    if x.dtype not in ELEMENTS:
        raise ValueError(f"x has dtype {x.dtype}; it must be float32, float16 or bfloat16")
    if check_hadamard(hadamard, {"x": x.shape[-1] if x.dim() else 0}):
        x = rotated(x.float(), hadamard)
    if format == "fp8_e4m3":
        if scale is None and not _has_float8(x.device):
            scale = torch.ones(x.shape[_checked_dim(x, heads_dim)], device=x.device)
        by_head = 1.0 if scale is None else _by_head("x", x, scale, heads_dim)
        bits = _fp8_bits(x.float() / by_head)
        return bits.view(torch.float8_e4m3fn) if _has_float8(x.device) else bits, scale
    if scale is not None:
        raise ValueError(f"scale is given, but {format} computes its own scale: leave scale out")
    shared = shared_columns(format)
    if x.dim() == 0 or x.shape[-1] % shared != 0:
        raise ValueError(
            f"x has shape {tuple(x.shape)}; {format} needs a multiple of {shared} as its last size"
        )
    # (..., blocks, 32)
    blocks = x.float().unflatten(-1, (x.shape[-1] // shared, shared))
    if format in _GROUPED:
        return _quantise_groups(blocks, format)
    if format == "q8_0":
        steps = _steps(blocks.abs().amax(-1, keepdim=True) / 127)
        data = _quotient(blocks, steps).clamp(-127, 127).to(torch.int8).flatten(-2)
    else:
        largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
        steps = _steps(largest / -8)
        nibbles = (_quotient(blocks, steps) + 8).clamp(0, 15).to(torch.uint8).flatten(-2)
        data = _packed(nibbles)
    return data, steps.squeeze(-1)


def dequantise(
    data: Tensor,
    scale: Tensor | None,
    dtype: torch.dtype,
    heads_dim: int = 1,
    *,
    hadamard: int = 0,
) -> Tensor:
    """The values (..., D) of quantised data, multiplied in float32 and rounded to `dtype`.

    The dtypes of data and scale determine the format, see `format_of`. fp8_e4m3 has one scale per
    head; dimension `heads_dim` of data is the heads. hadamard: as in `quantise`; values are rotated
    back before they are rounded.
    """
    if dtype not in ELEMENTS:
        raise ValueError(f"dtype is {dtype}; it must be float32, float16 or bfloat16")
    values = _values(data, scale, heads_dim)
    return rotated(values, check_hadamard(hadamard, {"data": values.shape[-1]})).to(dtype)


def _values(data: Tensor, scale: Tensor | None, heads_dim: int) -> Tensor:
    format = format_of(data, scale)
    if format == "fp8_e4m3":
        values = _fp8_values(data)
        return values if scale is None else values * _by_head("data", data, scale, heads_dim)
    assert scale is not None
    if format in _GROUPED:
        codes = _codes(data, _GROUPED[format][0])
        _check_block_scales(format, codes, scale)
        numbers = scale.float().unflatten(-1, (-1, 2))
        groups = codes.float().unflatten(-1, (numbers.shape[-2], -1))
        return (groups * numbers[..., :1] + numbers[..., 1:]).flatten(-2)
    if format == "q4_0":
        data = _nibbles(data).to(torch.int8) - 8
    _check_block_scales(format, data, scale)
    blocks = data.float().unflatten(-1, (scale.shape[-1], BLOCK))
    return (blocks * scale.float()[..., None]).flatten(-2)


def from_ggml(blocks: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """Convert ggml's blocks, n per row, to data and scale with the same values; D = 32 n.

    blocks: uint8 (..., n * 18) of q4_0 or (..., n * 34) of q8_0. A block is its scale, a
    little-endian float16, followed by its codes: 32 bytes in q8_0, 16 in q4_0. In q4_0 byte j has
    column j in the low nibble and column j + 16 in the high nibble.
    """
    size = _ggml_block_bytes(format)
    arguments.check_tensor("blocks", blocks)
    if blocks.dtype != torch.uint8 or blocks.dim() == 0 or blocks.shape[-1] % size != 0:
        raise ValueError(
            f"blocks has dtype {blocks.dtype} and shape {tuple(blocks.shape)}; in {format} "
            f"it must be uint8, and its last size a multiple of {size}"
        )
    parts = blocks.unflatten(-1, (blocks.shape[-1] // size, size)).split((2, size - 2), -1)
    scale, codes = (part.clone(memory_format=torch.contiguous_format) for part in parts)
    if format == "q8_0":
        data = codes.flatten(-2).view(torch.int8)
    else:
        data = _packed(torch.cat((codes & 15, codes >> 4), -1).flatten(-2))
    return data, scale.view(torch.float16).squeeze(-1)


def to_ggml(data: Tensor, scale: Tensor) -> Tensor:
    """Convert data and scale of q8_0 or q4_0 to ggml's blocks; the inverse of `from_ggml`."""
    format = format_of(data, scale)
    _ggml_block_bytes(format)
    codes = data.view(torch.uint8) if format == "q8_0" else _nibbles(data)
    _check_block_scales(format, codes, scale)
    codes = codes.unflatten(-1, (scale.shape[-1], BLOCK))
    if format == "q4_0":
        low, high = codes.chunk(2, -1)
        codes = low | (high << 4)
    scale_bytes = scale.contiguous().unsqueeze(-1).view(torch.uint8)
    return torch.cat((scale_bytes, codes), -1).flatten(-2)


def format_of(data: Tensor, scale: Tensor | None) -> str:
    """The format, from the dtypes: uint8 is q4_0 if scale is float16, fp8_e4m3 if it is float32.

    The number of float16 scales per row distinguishes group sizes, and q4_0 from 3 bits.
    """
    _check_tensors(data=data, scale=scale)
    _check_columns(data)
    has = None if scale is None else scale.dtype
    if data.dtype == torch.int8 and has == torch.float16:
        return "q8_0"
    if scale is not None and has == torch.float16 and data.dtype in _WORDS.values():
        elements, numbers = data.shape[-1], scale.shape[-1] if scale.dim() else 0
        bits = next(bits for bits, dtype in _WORDS.items() if dtype == data.dtype)
        # A unit holds 8 codes; a row has 16 * units / G scales and minimums.
        units = elements / 3 if bits == 3 else elements
        if bits == 3 and (units == 0 or units not in (2 * numbers, 4 * numbers)):
            return "q4_0"
        return f"q{bits}_g{64 if units > 0 and units == 4 * numbers else 32}"
    if data.dtype == torch.float8_e4m3fn and has in (None, torch.float32):
        return "fp8_e4m3"
    if data.dtype == torch.uint8 and has == torch.float32:
        return "fp8_e4m3"
    raise ValueError(
        f"data has dtype {data.dtype} and scale {has}; they must be int8 and float16 (q8_0), uint8 "
        "and float16 (q4_0 and 3 bits), int16 or int32 and float16 (2 and 4 bits), or "
        "float8_e4m3fn or uint8 and float32 (fp8_e4m3)"
    )


def columns(data: Tensor, scale: Tensor | None) -> int:
    """The number of columns D of the values; data may also be unquantised."""
    _check_tensors(data=data, scale=scale)
    _check_columns(data)
    size = data.shape[-1]
    if scale is None or scale.dtype != torch.float16:
        return size
    format = format_of(data, scale)
    if format in _GROUPED:
        return size * 8 // 3 if data.dtype == torch.uint8 else size * 8
    return size * 2 if format == "q4_0" else size


def shared_columns(format: str) -> int:
    """The number of columns that share a scale; it divides D. 1 for fp8_e4m3, which takes any D."""
    _check_format(format)
    if format in _GROUPED:
        return _GROUPED[format][1]
    return 1 if format == "fp8_e4m3" else BLOCK


def sizes(format: str, head_dim: int) -> tuple[int, int]:
    """The last sizes of data and scale for D columns; the latter is 0 for fp8_e4m3."""
    _check_format(format)
    head_dim = arguments.as_int_at_least("head_dim", head_dim)
    if format == "fp8_e4m3":
        return head_dim, 0
    check_columns("head_dim", head_dim, format)
    shared = shared_columns(format)
    if format in _GROUPED:
        return head_dim // 8 * (3 if DTYPES[format] == torch.uint8 else 1), 2 * head_dim // shared
    return head_dim if format == "q8_0" else head_dim // 2, head_dim // BLOCK


def _check_format(format: str) -> None:
    if format not in FORMATS:
        raise ValueError(f"format is {value_text(format)}; it must be one of {', '.join(FORMATS)}")


def _check_tensors(scale: Tensor | None, **tensors: Tensor) -> None:
    arguments.check_one_device(**(tensors if scale is None else tensors | {"scale": scale}))


def _check_columns(data: Tensor) -> None:
    if data.dim() == 0:
        raise ValueError("data has no dimensions; it must have columns")


def _packed(nibbles: Tensor) -> Tensor:
    """Pack two neighbouring columns into each byte, the first in the low nibble."""
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def _nibbles(data: Tensor) -> Tensor:
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)


def _check_block_scales(format: str, values: Tensor, scale: Tensor) -> None:
    size, shared = values.shape[-1], shared_columns(format)
    numbers = 2 if format in _GROUPED else 1
    if scale.shape != (*values.shape[:-1], numbers * size // shared) or size % shared != 0:
        raise ValueError(
            f"scale has shape {tuple(scale.shape)} and the values {tuple(values.shape)}; {format} "
            f"has {'a scale and a minimum' if numbers == 2 else 'one scale'} per "
            f"{count_text(shared, 'column')}"
        )


def _quantise_groups(groups: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """Codes and scales of float32 groups (..., groups, G)."""
    bits, _ = _GROUPED[format]
    last = 2**bits - 1
    smallest, largest = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    # -0.0 becomes 0.0.
    minimum = smallest.masked_fill(smallest == 0, 0).to(torch.float16)
    steps = ((largest - smallest) / last).to(torch.float16)
    finite = steps.isfinite() & minimum.isfinite()
    numbers = torch.cat((steps, minimum), -1).masked_fill(~finite, torch.nan)
    codes = _quotient(groups - minimum.float(), numbers[..., :1]).clamp(0, last)
    return _words(codes.flatten(-2), bits), numbers.flatten(-2)


def _words(codes: Tensor, bits: int) -> Tensor:
    """Codes (..., D), packed into one word per 8 codes, or three bytes for 3 bits."""
    shifts = torch.arange(8, device=codes.device, dtype=torch.int64) * bits
    words = (codes.long().unflatten(-1, (codes.shape[-1] // 8, 8)) << shifts).sum(-1)
    if bits == 3:
        return torch.stack([(words >> n) & 255 for n in (0, 8, 16)], -1).flatten(-2).byte()
    span = 2 ** (8 * bits)
    return torch.where(words < span // 2, words, words - span).to(_WORDS[bits])


def _codes(data: Tensor, bits: int) -> Tensor:
    words = data.long()
    if bits == 3:
        low, middle, high = words.unflatten(-1, (words.shape[-1] // 3, 3)).unbind(-1)
        words = low | middle << 8 | high << 16
    shifts = torch.arange(8, device=data.device, dtype=torch.int64) * bits
    return ((words[..., None] >> shifts) & (2**bits - 1)).flatten(-2)


def _ggml_block_bytes(format: str) -> int:
    if format not in ("q8_0", "q4_0"):
        raise ValueError(f"format is {value_text(format)}; ggml has q8_0 and q4_0")
    return 2 + sizes(format, BLOCK)[0]


def _steps(steps: Tensor) -> Tensor:
    """`steps` as float16, with NaN in place of values that are not finite."""
    half = steps.to(torch.float16)
    return half.masked_fill(~half.isfinite(), torch.nan)


def _quotient(blocks: Tensor, steps: Tensor) -> Tensor:
    """Blocks divided by their steps, rounded to nearest even; 0 where the step is 0 or NaN."""
    usable = (steps != 0) & ~steps.isnan()
    return torch.where(usable, blocks / steps.float(), 0).round()


def _has_float8(device: torch.device) -> bool:
    return device.type != "mps"


def _checked_dim(x: Tensor, dim: int) -> int:
    dim = arguments.as_int("heads_dim", dim)
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"heads_dim is {dim}; the tensor has {count_text(x.dim(), 'dimension')}")
    return dim % x.dim()


def _by_head(name: str, x: Tensor, scale: Tensor, heads_dim: int) -> Tensor:
    """scale (heads) or (B, heads), as float32 that broadcasts to x."""
    heads_dim = _checked_dim(x, heads_dim)
    heads = x.shape[heads_dim]
    allowed = [(heads,)] + ([(x.shape[0], heads)] if heads_dim > 0 else [])
    if scale.dtype != torch.float32 or scale.shape not in allowed:
        raise ValueError(
            f"scale has dtype {scale.dtype} and shape {tuple(scale.shape)}, and {name} has shape "
            f"{tuple(x.shape)}; fp8_e4m3 needs float32 of shape {' or '.join(map(str, allowed))}"
        )
    shape = [1] * x.dim()
    shape[heads_dim] = heads
    if scale.dim() == 2:
        shape[0] = x.shape[0]
    return scale.reshape(shape)


def _fp8_bits(x: Tensor) -> Tensor:
    """float32 as clamped float8 bits in uint8; NaN is 0x7f. Computed on bits: mps lacks the cast.

    Normal values: the exponent is rebased and 20 bits of the fraction are rounded off, with a carry
    into the exponent. Below 2^-6 the code counts steps of 2^-9.
    """
    magnitude = x.abs().clamp(max=_LARGEST_FP8)
    bits = magnitude.view(torch.int32)
    rounded = bits + 0x7FFFF + ((bits >> 20) & 1)
    normal = (rounded >> 20) - (120 << 3)
    subnormal = (magnitude * 512).round()
    code = torch.where(magnitude < 2**-6, subnormal.nan_to_num().to(torch.int32), normal)
    code = code | torch.where(x.signbit(), 0x80, 0)
    return torch.where(x.isnan(), _NAN_FP8, code).to(torch.uint8)


def _fp8_values(data: Tensor) -> Tensor:
    if data.dtype == torch.float8_e4m3fn:
        return data.float()
    table = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()
    return table.to(data.device)[data.int()]
