"""`torch_metal_attn.quantisation`: error bounds, rounding and special values of each format."""

import struct

import pytest
import torch

from tests.common.test_bad_options import resized
from tests.helpers.cases import each_case
from tests.helpers.judged import judge
from torch_metal_attn.quantisation import (
    BLOCK,
    FORMATS,
    columns,
    dequantise,
    format_of,
    from_ggml,
    quantise,
    shared_columns,
    sizes,
    to_ggml,
)
from torch_metal_attn.testing import Quantised
from torch_metal_attn.testing.judge import DTYPES, normal
from torch_metal_attn.testing.tensors import DTYPES as NAMES

BLOCKED = ["q8_0", "q4_0"]
GROUPED = [format for format in FORMATS if "_g" in format]
# The scales of q8_0 for rows of 64 columns, which are two blocks.
Q8_SCALES = torch.ones(2, 3, 4, 2).half()


def quantised_in_python(group, format):
    """The codes of one group of columns, its scale and minimum, and the value of code 0."""
    values = [float(x) for x in group]
    if "_g" not in format:
        largest = max(values, key=abs)
        step = abs(largest) / 127 if format == "q8_0" else largest / -8
        scale = torch.tensor(step, dtype=torch.float32).half()
        first, last, zero = (-127, 127, 0) if format == "q8_0" else (0, 15, 8)
        if scale == 0:
            return [zero] * BLOCK, [scale], 0.0
        # round() rounds ties to even. A Python float has enough bits for this quotient.
        codes = [round(x / float(scale)) + zero for x in values]
        return [max(first, min(last, n)) for n in codes], [scale], -zero * float(scale)
    last = 2 ** int(format[1]) - 1
    minimum = torch.tensor(min(values)).half()
    scale = ((torch.tensor(max(values)) - torch.tensor(min(values))) / last).half()
    if scale == 0:
        return [0] * len(values), [scale, minimum], float(minimum)
    above = [torch.tensor(x) - minimum.float() for x in values]
    codes = [round(float(x) / float(scale)) for x in above]
    return [max(0, min(last, n)) for n in codes], [scale, minimum], float(minimum)


def unpacked(data, format):
    if format == "q8_0":
        return data.tolist()
    bits = int(format[1])
    row = int.from_bytes(data.contiguous().view(torch.uint8).numpy().tobytes(), "little")
    return [row >> (bits * n) & (2**bits - 1) for n in range(data.nbytes * 8 // bits)]


@pytest.mark.parametrize("format", FORMATS)
def test_errors_are_within_the_bounds(format):
    """Some scales are subnormal in float16. Some numbers are beyond fp8's largest."""
    judge(
        *(
            Quantised(format, dtype=dtype, rows=40, columns=128, exponent=exponent, scale=scale)
            for dtype in NAMES
            for exponent in (-20, -12, -3, 0, 9)
            for scale in ((0.01, 1.0, 30.0) if format == "fp8_e4m3" else (1.0,))
        )
    )


@pytest.mark.parametrize("format", [*BLOCKED, *GROUPED])
def test_the_documented_rounding_bit_for_bit(format):
    for seed in range(16):
        x = (10.0 ** (seed % 7 - 4) * normal(128, seed=seed)).to(DTYPES[seed % 3]) + seed % 3
        if seed % 2:
            x = (x * 4).round() / 4  # ties
        data, scale = quantise(x, format)
        groups = [quantised_in_python(part, format) for part in x.split(shared_columns(format))]
        assert unpacked(data, format) == [code for codes, _, _ in groups for code in codes]
        assert torch.equal(scale, torch.stack([n for _, numbers, _ in groups for n in numbers]))
        values = [zero + float(numbers[0]) * n for codes, numbers, zero in groups for n in codes]
        expected = torch.tensor(values, dtype=torch.float64).float()
        assert torch.equal(dequantise(data, scale, torch.float32), expected)
        assert format_of(data, scale) == format
        assert columns(data, scale) == 128
        assert sizes(format, 128) == (data.shape[-1], scale.shape[-1])


def ggml_row(format, steps, codes):
    """A row of ggml's block_q4_0 or block_q8_0, packed by hand: a float16 scale, then the codes."""
    row = b""
    for step, block in zip(steps, codes, strict=True):
        if format == "q8_0":
            row += struct.pack("<e32b", step, *block)
        else:
            row += struct.pack("<e16B", step, *(block[j] | block[j + 16] << 4 for j in range(16)))
    return torch.tensor(list(row), dtype=torch.uint8)


@pytest.mark.parametrize("format, zero", [("q8_0", 0), ("q4_0", 8)])
def test_blocks_of_ggml_are_converted(format, zero):
    steps = [0.5, -0.125]
    codes = [[(5 * j + 3) % 16 for j in range(32)], [(11 * j + 6) % 16 for j in range(32)]]
    rows = ggml_row(format, steps, codes).repeat(2, 3, 1)
    data, scale = from_ggml(rows, format)
    assert format_of(data, scale) == format
    expected = (torch.tensor(codes) - zero) * torch.tensor(steps)[:, None]
    assert torch.equal(dequantise(data, scale, torch.float32), expected.flatten().expand(2, 3, 64))
    assert torch.equal(to_ggml(data, scale), rows)
    # Rows may have any strides and begin at an odd byte. There may be zero rows.
    strided = torch.nn.functional.pad(rows, (1, 2))[:, ::2, 1:-2]
    for x, whole in zip(from_ggml(strided, format), (data, scale), strict=True):
        assert torch.equal(x, whole[:, ::2])
    one_block = strided[..., : rows.shape[-1] // 2]
    assert torch.equal(to_ggml(*from_ggml(one_block, format)), one_block)
    assert [x.shape[0] for x in from_ggml(rows[:0], format)] == [0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_zeros_are_exact(format, dtype):
    x = torch.zeros(2, 3, 4, 64, dtype=dtype)
    x[..., 1::2] = -0.0
    data, scale = quantise(x, format)
    back = dequantise(data, scale, dtype)
    assert back.dtype == dtype
    assert torch.equal(back, x)
    if format != "fp8_e4m3":
        expected = torch.zeros(2, 3, 4, sizes(format, 64)[1], dtype=torch.float16)
        assert torch.equal(scale, expected)


@pytest.mark.parametrize("format", [*BLOCKED, *GROUPED])
def test_groups_without_a_finite_scale_are_nan(format):
    """The group is NaN, and its codes are fixed, so that nothing depends on the cast of a NaN."""
    x = torch.full((6, 64), 0.75)
    x[1] = 0.0
    x[1, ::2] = -0.0
    x[2, 3], x[3, 40], x[4, 63], x[5, 0] = torch.nan, -torch.inf, 3e38, torch.inf
    data, scale = quantise(x, format)
    back = dequantise(data, scale, torch.float32)
    if format in GROUPED:  # rows of equal values are exact
        assert torch.equal(back[:2], x[:2])
    group = shared_columns(format)
    bad = (~x.isfinite() | (x.abs() > 65504)).unflatten(-1, (-1, group)).any(-1)
    assert torch.equal(back.isnan(), bad.repeat_interleave(group, -1))
    codes = data.unflatten(-1, (64 // group, -1))[bad]
    assert (codes == (0x88 if format == "q4_0" else 0)).all()


def test_the_largest_scale():
    """65504 is float16's largest number. Numbers up to 65519.99 round to it."""
    for largest, finite in ((65504.0, True), (65519.0, True), (65520.0, False)):
        assert quantise(torch.full((32,), 127 * largest), "q8_0")[1].isfinite() == finite
        assert quantise(torch.full((32,), 8 * largest), "q4_0")[1].isfinite() == finite


def test_fp8_of_every_float16_is_torchs_cast():
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    x = x[None, None, :, None]
    data, scale = quantise(x, "fp8_e4m3")
    assert scale is None
    expected = x.float().clamp(-448, 448).to(torch.float8_e4m3fn)
    nan = x.isnan()
    assert torch.equal(data.view(torch.uint8)[~nan], expected.view(torch.uint8)[~nan])
    assert (data.view(torch.uint8)[nan] == 0x7F).all()
    assert torch.equal(dequantise(data, None, torch.float32).isnan(), nan)


def test_fp8_rounds_a_quotient_once():
    """Near the middle between two codes, rounding to a shorter type first would change the code."""
    codes = torch.arange(0x7E, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    x = torch.stack((middles, middles.nextafter(codes[1:]), middles.nextafter(codes[:-1])))
    x = x[:, None, None]
    data, _ = quantise(x, "fp8_e4m3")
    assert torch.equal(data.view(torch.uint8), x.to(torch.float8_e4m3fn).view(torch.uint8))


def test_fp8_as_bytes():
    """On mps fp8 is stored as uint8. The scale distinguishes it from q4_0."""
    x = normal(2, 3, 4, 8)
    scale = torch.tensor([0.5, 1.0, 2.0])
    data, _ = quantise(x, "fp8_e4m3", scale)
    back = dequantise(data.view(torch.uint8), scale, torch.bfloat16)
    assert torch.equal(back, dequantise(data, scale, torch.bfloat16))
    assert format_of(data.view(torch.uint8), scale) == "fp8_e4m3"
    with torch.device("meta"):  # dequantise ignores the default device
        actual = dequantise(data.view(torch.uint8), scale, torch.float32)
    assert torch.equal(actual, dequantise(data, scale, torch.float32))


def test_fp8_on_devices_without_float8(monkeypatch):
    x = normal(2, 3, 4, 8)
    expected, _ = quantise(x, "fp8_e4m3")
    monkeypatch.setattr("torch_metal_attn.quantisation._has_float8", lambda device: False)
    data, scale = quantise(x, "fp8_e4m3")
    assert torch.equal(data, expected.view(torch.uint8))
    assert torch.equal(scale, torch.ones(3))


def test_heads_dim():
    x = normal(2, 5, 3, 8)  # (B, L, H, D)
    scale = torch.tensor([[0.5, 1.0, 2.0], [1.0, 4.0, 0.25]])
    data, _ = quantise(x, "fp8_e4m3", scale, heads_dim=2)
    swapped, _ = quantise(x.transpose(1, 2), "fp8_e4m3", scale)
    assert torch.equal(data.view(torch.uint8), swapped.transpose(1, 2).view(torch.uint8))
    assert torch.equal(
        dequantise(data, scale, torch.float32, heads_dim=-2),
        dequantise(swapped, scale, torch.float32).transpose(1, 2),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_values_are_rounded_once(format, dtype):
    x = normal(2, 3, 4, 64)
    data, scale = quantise(x, format)
    exact = dequantise(data, scale, torch.float32)
    assert torch.equal(dequantise(data, scale, dtype), exact.to(dtype))


@pytest.mark.parametrize("format", FORMATS)
def test_strides_do_not_change_results(format):
    x = normal(4, 3, 64, 2).transpose(-1, -2)
    data, scale = quantise(x, format)
    expected, expected_scale = quantise(x.contiguous(), format)
    assert torch.equal(data.view(torch.uint8), expected.view(torch.uint8))
    assert scale is expected_scale is None or torch.equal(scale, expected_scale)


@each_case(
    "call, message",
    [
        (lambda x: quantise(x, "q5_0"), "format is 'q5_0'"),
        (lambda x: shared_columns([]), r"format is \[\]"),
        (lambda x: sizes("q3_g64", 96), "head_dim is 96; q3_g64 needs a multiple of 64"),
        (lambda x: dequantise(x.short(), torch.ones(2, 3, 4, 7).half(), x.dtype), "a minimum per"),
        (lambda x: dequantise(x.int(), torch.ones(2, 3, 4, 8), x.dtype), "data has dtype"),
        (lambda x: quantise(x.double(), "q8_0"), "x has dtype torch.float64"),
        (lambda x: quantise(x[..., 1:], "q4_0"), "x has shape .* multiple of 32"),
        (lambda x: quantise(x, "q8_0", torch.ones(3)), "scale is given, but q8_0 computes"),
        (lambda x: quantise(x, "fp8_e4m3", torch.ones(2)), "scale has dtype .* x has shape"),
        (lambda x: quantise(x, "fp8_e4m3", torch.ones(3), heads_dim=4), "heads_dim is 4"),
        (lambda x: dequantise(x, None, torch.float32), "data has dtype torch.float32 and scale"),
        (lambda x: dequantise(*quantise(x, "q8_0"), torch.float64), "dtype is torch.float64"),
        (lambda x: dequantise(x.char(), torch.ones(2, 3, 4, 1).half(), x.dtype), "scale has shape"),
        (lambda x: from_ggml(x.byte(), "q4_0"), r"shape \(2, 3, 4, 64\); in q4_0 .* uint8.* 18"),
        (lambda x: from_ggml(x[..., :34], "q8_0"), "blocks has dtype torch.float32 .* of 34"),
        (lambda x: from_ggml(x.byte(), "fp8_e4m3"), "format is 'fp8_e4m3'; ggml has q8_0 and q4_0"),
        (lambda x: to_ggml(x.char(), torch.ones(2, 3, 4, 1).half()), "scale has shape"),
        (lambda x: quantise(x, "fp8_e4m3", 2.0), "scale is a float; it must be a tensor"),
        (lambda x: quantise(x.to("meta"), "fp8_e4m3", torch.ones(3)), "scale is on cpu and x on m"),
        (lambda x: quantise(resized(x, 6143), "q3_g32"), "x has .* must hold 1536 elements"),
        (lambda x: dequantise(resized(x.char(), 0), Q8_SCALES, x.dtype), "data has .* of 0 bytes"),
        (lambda x: dequantise(x.char()[0, 0, 0, 0], Q8_SCALES, x.dtype), "data has no dimensions"),
    ],
)
def test_invalid_arguments_are_refused(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call(normal(2, 3, 4, 64))
