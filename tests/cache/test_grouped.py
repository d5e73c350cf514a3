"""Formats with a scale and a minimum per group, and K and V in different formats."""

import pytest

from tests.attention import held_cases
from tests.helpers.steps import check_special, step

# Formats of K and V. Each format is once K's and once V's.
PAIRS = [
    *(("q2_g32", "q3_g64"), ("q3_g32", "q4_g64"), ("q4_g32", "q2_g64"), ("q2_g64", "q8_0")),
    *(("q3_g64", "fp8_e4m3"), ("q4_g64", "q4_0"), ("q8_0", "q4_g32"), ("q4_0", "q2_g32")),
    ("fp8_e4m3", "q3_g32"),
]
DTYPES = ("float16", "bfloat16", "float32")
SIZES = {"heads": 4, "kv_heads": 2, "head_dim": 64, "v_head_dim": 128}


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("number", (0, 1, 2, 3, 5, 8))
def test_append(number):
    """Three pairs have all grouped formats. The other pairs have each size of code and group."""
    format, v_format = PAIRS[number]
    dtype = "float32" if number < 3 else "float16"
    pages = {"cache": "paged", "page": 5, "capacity": 65}
    where = pages if number < 3 else {"cache_layout": ("padded 3",)}
    formats = {"format": format, "v_format": v_format, "v_head_dim": 128}
    check_special(**formats, **where, dtype=dtype, seed=number)


@pytest.mark.parametrize("number", (1, 4, 7))
def test_prefill(number, device):
    """These pairs have each size of code and group. test_hadamard.py decodes the other pairs."""
    format, v_format = PAIRS[number]
    case = SIZES | {"format": format, "v_format": v_format, "dtype": DTYPES[number // 3]}
    cache = {"kv_length": 75, "seqused_k": (75, 33), "batch": 2, "cache": "paged", "page": 5}
    held_cases.hold([held_cases.case(call="flash_fwd", q_length=40, **case, **cache)], device)


@pytest.mark.parametrize("number", (0, 4, 8))
def test_decode_step(number, device):
    format, v_format = PAIRS[number]
    case = {"format": format, "v_format": v_format, "dtype": DTYPES[number % 3], "length": 3}
    case |= {"cache": "paged", "cache_layout": ("order 021",), "rotary_columns": 64}
    held_cases.hold([step(**case, causal=True)], device)
