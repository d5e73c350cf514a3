"""Formats of 2, 3 and 4 bits with a scale and a minimum per group, and K and V in two formats.

The other formats' tests hold what does not depend on the format.
"""

import pytest
import torch

from tests.attention import held_cases
from tests.helpers.steps import check_special, step
from torch_metal_attn import quantisation
from torch_metal_attn.quantisation import dequantise, format_of, quantise
from torch_metal_attn.testing.judge import normal

GROUPED = [format for format in quantisation.FORMATS if "_g" in format]
# Of K and V; each format is once in either.
PAIRS = [
    *(("q2_g32", "q3_g64"), ("q3_g32", "q4_g64"), ("q4_g32", "q2_g64"), ("q2_g64", "q8_0")),
    *(("q3_g64", "fp8_e4m3"), ("q4_g64", "q4_0"), ("q8_0", "q4_g32"), ("q4_0", "q2_g32")),
    ("fp8_e4m3", "q3_g32"),
]
DTYPES = ("float16", "bfloat16", "float32")
SIZES = {"heads": 4, "kv_heads": 2, "head_dim": 64, "v_head_dim": 128}


def parts(format):
    """Bits of a code and columns of a group."""
    return int(format[1]), int(format[4:])


def slowly(group, bits):
    """Codes, scale and minimum of one group, value by value."""
    values = [float(x) for x in group]
    last = 2**bits - 1
    minimum = torch.tensor(min(values)).half()
    extent = torch.tensor(max(values)) - torch.tensor(min(values))
    scale = (extent / last).half()
    if scale == 0:
        return [0] * len(values), scale, minimum
    above = [torch.tensor(x) - minimum.float() for x in values]
    codes = [round(float(x) / float(scale)) for x in above]
    return [max(0, min(last, n)) for n in codes], scale, minimum


def codes_of(data, bits):
    """Codes of one row, from its bits."""
    row = int.from_bytes(data.contiguous().view(torch.uint8).numpy().tobytes(), "little")
    return [row >> (bits * n) & (2**bits - 1) for n in range(data.nbytes * 8 // bits)]


@pytest.mark.parametrize("format", GROUPED)
def test_the_documented_rounding_bit_for_bit(format):
    bits, group = parts(format)
    for seed in range(12):
        x = normal(128, seed=seed) * 10.0 ** (seed % 6 - 4) + seed % 3
        if seed % 2:
            x = (x * 4).round() / 4  # ties
        data, scale = quantise(x, format)
        groups = [slowly(part, bits) for part in x.split(group)]
        assert codes_of(data, bits) == [code for codes, _, _ in groups for code in codes]
        assert torch.equal(scale, torch.stack([n for _, *pair in groups for n in pair]))
        values = [
            float(minimum) + float(scale) * code
            for codes, scale, minimum in groups
            for code in codes
        ]
        expected = torch.tensor(values, dtype=torch.float64).float()
        assert torch.equal(dequantise(data, scale, torch.float32), expected)
        assert format_of(data, scale) == format
        assert quantisation.columns(data, scale) == 128
        assert quantisation.sizes(format, 128) == (data.shape[-1], scale.shape[-1])


@pytest.mark.parametrize("format", GROUPED)
def test_rows_that_are_special(format):
    """Constant rows are the constant, and no number of a group with NaN or inf is used."""
    x = torch.full((5, 64), 0.75)
    x[1] = 0.0
    x[1, ::2] = -0.0
    x[2, 3], x[3, 40], x[4, 63] = torch.nan, -torch.inf, 3e38
    data, scale = quantise(x, format)
    back = dequantise(data, scale, torch.float32)
    assert torch.equal(back[:2], x[:2])
    group = parts(format)[1]
    bad = ~x.isfinite() | (x.abs() > 65504)
    expected = bad.unflatten(-1, (-1, group)).any(-1)
    assert torch.equal(back.isnan(), expected.repeat_interleave(group, -1))
    assert (data.unflatten(-1, (64 // group, -1))[expected] == 0).all()


# --- The kernels. ---


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("number", (0, 1, 2, 3, 5, 8))
def test_append(number):
    """Bit for bit, also of rows that are special: in pages, and where rows are not aligned.

    The first three pairs have all formats, and the others each size of a code and of a group.
    """
    format, v_format = PAIRS[number]
    dtype = "float32" if number < 3 else "float16"
    pages = {"cache": "paged", "page": 5, "capacity": 65}
    where = pages if number < 3 else {"cache_layout": ("padded 3",)}
    formats = {"format": format, "v_format": v_format, "v_head_dim": 128}
    check_special(**formats, **where, dtype=dtype, seed=number)


@pytest.mark.parametrize("number", (1, 4, 7))
def test_prefill(number, device):
    """Each size of a code and of a group. test_hadamard.py decodes the other pairs."""
    format, v_format = PAIRS[number]
    case = SIZES | {"format": format, "v_format": v_format, "dtype": DTYPES[number // 3]}
    kept = {"kv_length": 75, "seqused_k": (75, 33), "batch": 2, "cache": "paged", "page": 5}
    held_cases.hold([held_cases.case(call="flash_fwd", q_length=40, **case, **kept)], device)


@pytest.mark.parametrize("number", (0, 4, 8))
def test_decode_step(number, device):
    format, v_format = PAIRS[number]
    case = {"format": format, "v_format": v_format, "dtype": DTYPES[number % 3], "length": 3}
    case |= {"cache": "paged", "cache_layout": ("order 021",), "rotary_columns": 64}
    held_cases.hold([step(**case, causal=True)], device)
