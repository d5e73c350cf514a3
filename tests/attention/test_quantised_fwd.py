"""flash_fwd with keys and values in another format than q: quantised, or in half precision."""

import math

import pytest
import torch

from tests.attention.flash_fwd_check import (
    check_flash_decode,
    check_flash_fwd,
    make_packed,
    make_qkv,
)
from tests.cache.kv_caches import FORMATS
from tests.helpers.mutants import mutant_tests
from torch_metal_attn import (
    explain,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_varlen_func,
)
from torch_metal_attn.quantisation import dequantise, quantise
from torch_metal_attn.testing.judge import ints


def every_code(kv_format):
    """Data (32, 2, 1, 32) that contain every code, and scales of very different sizes."""
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


@pytest.mark.parametrize(
    "kv_format, dtype", [*zip(FORMATS, (torch.float32, torch.float16, torch.bfloat16), strict=True)]
)
def test_values_have_the_bits_of_dequantise(kv_format, dtype, device):
    data, scale = every_code(kv_format)
    expected = dequantise(data, scale, dtype)
    fp8 = kv_format == "fp8_e4m3"
    keys, k_scale = quantise(torch.zeros(32, 2, 1, 64), kv_format, torch.ones(2) if fp8 else None)
    keys = keys.view(torch.uint8) if fp8 else keys
    out, _ = torch.ops.metal_attn.flash_fwd(
        *(x.to(device) for x in (torch.ones(32, 2, 1, 64, dtype=dtype), keys, data)),
        k_scale=k_scale.to(device),
        v_scale=scale.to(device),
        seqused_k=torch.ones(32).int().to(device),
    )
    torch.testing.assert_close(out.cpu(), expected, rtol=0.0, atol=0.0, equal_nan=True)


def test_scales_of_fp8(device):
    """Scales for k, v or both, per head or per head and sequence, with any strides."""
    q, k, v = make_qkv(3, 4, 2, kv_length=40, head_dim=64, v_head_dim=32, dtype=torch.float16)
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


FP8 = "fp8_e4m3", torch.tensor([0.5, 2.0])


@pytest.mark.parametrize("kv_format, scale", [("q4_0", None), FP8])
def test_packed_keys_are_quantised_after_concatenation(kv_format, scale, device):
    """Keys and values are concatenated, then quantised."""
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 64, "v_head_dim": 32, "dtype": torch.float16}
    q, k, v, *packing = make_packed([33, 7, 1], [40, 0, 65], batch=1, **sizes)
    stored = [quantise(x, kv_format, scale, heads_dim=1) for x in (k, v)]
    exact = [dequantise(*x, torch.float32, heads_dim=1) for x in stored]
    (keys, k_scale), (values, v_scale) = stored
    cache = keys, values, {"k_scale": k_scale, "v_scale": v_scale}
    check_flash_fwd(q, *exact, *packing, cache=cache, device=device, causal=True)


ops = torch.ops.metal_attn
# The tests below have float32 queries, and keys and values in half precision, as llama.cpp has.
CHECKS = {"flash_fwd": check_flash_fwd, "flash_decode": check_flash_decode}
FEW = {"heads": 4, "kv_heads": 2, "q_length": 3, "kv_length": 70, "head_dim": 72}


def operands(**shape):
    q, k, v = make_qkv(**FEW | shape)
    return q, k.half(), v.half()


@pytest.mark.parametrize("op", CHECKS)
def test_ops_accept_keys_in_half_precision(op):
    q, k, v = operands(head_dim=64)
    run = getattr(ops, op)
    torch.library.opcheck(run, (q, k, v), {"causal": True})
    explained = explain(run, q, k, v)
    assert explained.specialisation["ELEMENT"] == "float"
    assert explained.specialisation["KV_ELEMENT"] == "half"
    statistics = 4 * 3 * 4  # one float32 number per row of q
    assert explained.cost.bytes == 2 * q.nbytes + k.nbytes + v.nbytes + statistics


def test_gradients_are_refused_in_backward():
    q, k, v = operands()
    q.requires_grad_()
    out, lse = ops.flash_fwd(q, k, v)
    with pytest.raises(NotImplementedError, match=r"k and v in torch.float16 and q in torch.float"):
        out.sum().backward()
    with torch.no_grad(), pytest.raises(ValueError, match=r"k has dtype .*; they must be the same"):
        ops.flash_bwd(out, None, q, k, v, out, lse)


def test_functions_without_a_cache_need_one_dtype():
    """As in flash-attn. test_functional.py passes float32 queries to functions with a cache."""
    q, k, v = (x.transpose(1, 2) for x in operands(head_dim=64))
    for keys, values, name in ((k, v, "k"), (k.float(), v, "v")):
        with pytest.raises(ValueError, match=rf"^{name} has dtype float16 and q float32; .*same"):
            flash_attn_func(q, keys, values)
        with pytest.raises(ValueError, match=rf"^{name} has dtype float16 and q float32; .*same"):
            flash_attn_varlen_func(q[0], keys[0], values[0], ints(0, 3), ints(0, 70), 3, 70)
    with pytest.raises(ValueError, match=r"float16 and q float32; .*same"):
        flash_attn_kvpacked_func(q, torch.stack((k, v), 2))


MUTANTS = {
    "flash_fwd": """
        flash_fwd: queries rounded:
            {~held.fragments[i][HELD ? d : 0] = read(i, d => const Fragment<T> pair = read(i,
            d);held.fragments[i][HELD ? d : 0] = Fragment<T>(T(half(pair.x)), pair.y~});
    """,
    "flash_decode": """
        flash_decode: queries rounded: {~=> ELEMENT(half(~}queries.element(row.query, d){~=> ))~}
        flash_decode: one of two keys' columns: ELEMENT(unit.fragments[f].{~y => x~})
    """,
}

test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(
    MUTANTS, run=lambda op: CHECKS[op](*operands(head_dim=64, q_length=33), device="cpu")
)
