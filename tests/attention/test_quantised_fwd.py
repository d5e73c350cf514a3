"""flash_fwd of quantised keys and values: every code, scales, rows that are not aligned.

Values by format, dtype, page and feature are rows of test_values.py.
"""

import math

import pytest
import torch

from tests.attention.flash_fwd_check import check_flash_fwd, make_packed, make_qkv
from tests.cache.kv_caches import FORMATS, quantised
from torch_metal_attn.quantisation import dequantise, quantise

SHAPE = {"heads": 4, "kv_heads": 2, "head_dim": 64, "v_head_dim": 32}
HALF = SHAPE | {"dtype": torch.float16}
# float16 is in the other tests of each format.
FORMATS_AND_DTYPES = list(zip(FORMATS, (torch.float32, torch.float16, torch.bfloat16), strict=True))


def scale_of(kv_format, *shape, seed=0):
    """None but for fp8_e4m3, whose scale is given."""
    if kv_format != "fp8_e4m3":
        return None
    return 0.3 + torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def every_code(kv_format):
    """Data and scale (32, 2, 1, 32) of values in which every code is, with scales of any size."""
    generator = torch.Generator().manual_seed(0)
    if kv_format == "fp8_e4m3":
        data = torch.arange(256, dtype=torch.uint8).repeat(8).view(32, 2, 1, 32)
        return data, 0.01 + 3 * torch.rand(32, 2, generator=generator)
    steps = torch.randn(32, 2, 1, 1, generator=generator).exp().half()
    steps[3], steps[4, 0] = math.nan, 0.0
    steps[5] = 2.0**-24
    if kv_format == "q8_0":
        data = torch.arange(-128, 128, dtype=torch.int8).repeat(8).view(32, 2, 1, 32)
    else:
        data = torch.arange(256, dtype=torch.uint8).repeat(4).view(32, 2, 1, 16)
    return data, steps


@pytest.mark.parametrize("kv_format, dtype", FORMATS_AND_DTYPES)
def test_values_have_the_bits_of_dequantise(kv_format, dtype, device):
    """If there is one key, the output is its value."""
    data, scale = every_code(kv_format)
    expected = dequantise(data, scale, dtype)
    keys, k_scale = quantise(torch.zeros(32, 2, 1, 64), kv_format, scale_of(kv_format, 2))
    if kv_format == "fp8_e4m3":
        keys = keys.view(torch.uint8)
    out, _ = torch.ops.metal_attn.flash_fwd(
        *(x.to(device) for x in (torch.ones(32, 2, 1, 64, dtype=dtype), keys, data)),
        k_scale=k_scale.to(device),
        v_scale=scale.to(device),
        seqused_k=torch.ones(32).int().to(device),
    )
    torch.testing.assert_close(out.cpu(), expected, rtol=0.0, atol=0.0, equal_nan=True)


def test_scales_of_fp8(device):
    """One a head, one a head and sequence, of any strides, on one side or both; data as bytes."""
    q, k, v = make_qkv(batch=3, kv_length=40, **HALF)
    some = torch.rand(3, 5, 2)[:, 2] + 0.5
    for k_scale, v_scale in [
        (torch.rand(2) + 0.5, torch.rand(3, 2) + 0.5),
        (some, torch.tensor([0.7]).expand(3, 2)),
        (None, some),
        (some, None),
    ]:
        exact, stored = [], []
        for x, scale in ((k, k_scale), (v, v_scale)):
            data, _ = quantise(x, "fp8_e4m3", scale)
            exact.append(dequantise(data, scale, torch.float32))
            stored.append(data if scale is None else data.view(torch.uint8))
        cache = *stored, {"k_scale": k_scale, "v_scale": v_scale}
        check_flash_fwd(q, *exact, cache=cache, device=device)


@pytest.mark.parametrize("kv_format", ["q4_0", "fp8_e4m3"])
def test_packed(kv_format, device):
    """Keys and values packed one sequence after the other, quantised as they are."""
    lengths = [40, 0, 65]
    q, k, v, *packing = make_packed([33, 7, 1], lengths, **HALF)
    k, v, cache = quantised(k, v, kv_format, scale=scale_of(kv_format, 2))
    check_flash_fwd(q, k, v, *packing, cache=cache, device=device, causal=True)
