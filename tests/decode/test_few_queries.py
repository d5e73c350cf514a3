"""flash_fwd runs the kernel of flash_decode for few queries, or to fill the GPU by splits."""

import functools
import math

import pytest
import torch

from tests.attention.flash_fwd_check import (
    check_flash_fwd,
    check_large_sinks,
    make_qkv,
    rotary_tables,
)
from tests.helpers.mutants import plant
from torch_metal_attn import (
    explain,
    flash_attn_func,
    flash_attn_with_kvcache,
    scaled_dot_product_attention,
    simulate,
)
from torch_metal_attn.with_kvcache import DECODE_QUERIES

ops = torch.ops.metal_attn


def kernels(function, *arguments, **options):
    """Those that a function launches, which stands in for a module."""
    module = torch.nn.Identity()
    module.forward = function
    rows = explain(module, *arguments, **options).rows
    return [row.explanation.kernel for row in rows]


def operands(heads, kv_heads, queries, head_dim, dtype=torch.half, keys=8192):
    """q, k and v, each one row that is expanded, for calls that are not computed."""
    q = torch.empty(head_dim, dtype=dtype).expand(1, heads, queries, -1)
    return q, *[torch.empty(head_dim, dtype=dtype).expand(1, kv_heads, keys, -1) for _ in range(2)]


def blhd(queries):
    return [x.transpose(1, 2) for x in make_qkv(q_length=queries, kv_length=90)]


@pytest.mark.parametrize("queries", [1, DECODE_QUERIES, DECODE_QUERIES + 1])
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_kernel(queries, needs_gradient):
    q, k, v = make_qkv(q_length=queries, kv_length=90)
    q.requires_grad_(needs_gradient)
    first = "flash_decode" if queries <= DECODE_QUERIES else "flash_fwd"
    mask = torch.ones(queries, 90, dtype=torch.bool)
    for options in ({}, {"causal": True, "q_offset": 0}, {"attn_mask": mask}):
        assert kernels(ops.flash_fwd, q, k, v, **options) == [first]
    for options in ({}, {"is_causal": True}, {"attn_mask": mask}):
        actual = kernels(scaled_dot_product_attention, q, k, v, enable_gqa=True, **options)
        assert actual == [first]
    for options in ({}, {"causal": True}, {"softcap": 3.0}):
        assert kernels(flash_attn_func, *blhd(queries), **options) == [first]


def test_options_that_only_flash_fwd_has():
    q, k, v = make_qkv(q_length=1, kv_length=90, head_dim=64)
    cos, sin = rotary_tables(90, 8)
    state = torch.zeros(2, dtype=torch.int64)
    for options in (
        {"k_rotary_cos": cos, "k_rotary_sin": sin},
        {"dropout_p": 0.5, "rng_state": state},
    ):
        assert kernels(ops.flash_fwd, q, k, v, **options) == ["flash_fwd"]


def test_keys_are_split_over_the_gpu(cores):
    """flash_fwd would have 32 threadgroups, with one of eight SIMD groups at work."""
    cores(32)
    q, k, v = operands(32, 32, 1, 128)
    explanation = explain(ops.flash_fwd, q, k, v)
    assert explanation.kernel == "flash_decode"
    assert math.prod(explanation.grid) >= 64


# (heads, KV heads, queries, head dim), dtype and the splits on 20 cores.
SPLITS = {
    # 512 threads of 102.5 registers: 4 threadgroups of a core.
    "Apple M2 Max": [((32, 8, 1, 128), torch.half, 10)],
    # 24 SIMD groups: 6 threadgroups; or 2 that take 26 KB each.
    "Apple M4 Pro": [((32, 8, 1, 128), torch.half, 15), ((8, 8, 64, 64), torch.float32, 5)],
}


@pytest.mark.parametrize("name", SPLITS)
def test_splits_follow_from_what_a_core_holds(name, gpu, cores):
    gpu(name)
    cores(20)
    for shape, dtype, splits in SPLITS[name]:
        assert explain(ops.flash_decode, *operands(*shape, dtype)).grid[0] == splits


# (heads, KV heads, queries, head dim, dtype, keys) and the cores that flash_fwd does not fill.
SPLIT = [
    ((8, 8, 256, 128, torch.half, 32768), 80),  # 32 threadgroups
    ((32, 32, 128, 128, torch.half, 8192), 40),  # 64
    ((8, 8, 64, 128, torch.bfloat16, 4096), 10),  # 8
]
WHOLE = [
    ((32, 8, 128, 128, torch.half, 8192), 10),  # 64 on 10 cores: 91 % of 7 waves
    ((12, 12, 197, 128, torch.half, 2048), 40),  # flash_decode would have one split
    ((8, 8, 513, 128, torch.half, 32768), 80),
    ((8, 8, 64, 128, torch.half, 2047), 80),
    ((4, 4, 64, 264, torch.half, 8192), 80),
]


@pytest.mark.parametrize("kernel, calls", [("flash_decode", SPLIT), ("flash_fwd", WHOLE)])
def test_more_queries_are_split_to_fill_the_gpu(kernel, calls, cores):
    for sizes, count in calls:
        cores(count)
        assert kernels(ops.flash_fwd, *operands(*sizes)) == [kernel], (sizes, count)


def test_calls_that_are_not_split(cores, gpu):
    cores(80)
    q, k, v = operands(8, 8, 256, 128)
    assert kernels(ops.flash_fwd, q, k, v, causal=True, window_size_left=99) == ["flash_fwd"]
    # Blocks that the mask hides are skipped.
    mask = torch.ones(256, 8192, dtype=torch.bool)
    assert kernels(ops.flash_fwd, q, k, v, attn_mask=mask) == ["flash_fwd"]
    gpu("Apple M5")
    assert kernels(ops.flash_fwd, q, k, v) == ["flash_fwd_tensor"]


def test_values_of_splits(cores):
    cores(80)
    shape = {"batch": 1, "heads": 2, "kv_heads": 1, "q_length": 40, "kv_length": 2100}
    with simulate(check=True) as run:
        check_flash_fwd(*make_qkv(**shape, head_dim=64), device="cpu", causal=True)
    assert [launch.kernel for launch in run.launches] == ["flash_decode", "merge_splits"]


@pytest.mark.parametrize("keys, num_splits", [(90, 0), (90, 1), (90, 3), (2048, 1)])
def test_a_number_of_splits_holds_for_many_queries(keys, num_splits):
    """flash_fwd has no such argument, and may split only calls with as many keys."""
    q, k, v = (x.transpose(1, 2) for x in make_qkv(q_length=70, kv_length=keys))
    with simulate(record=True) as run:
        flash_attn_with_kvcache(q, k, v, num_splits=num_splits)
    decodes = num_splits > 1 or (keys, num_splits) == (2048, 1)
    assert run.recorded[0].kernel == ("flash_decode" if decodes else "flash_fwd")
    assert not decodes or run.recorded[0].threadgroups[0] == num_splits


def mean_of_splits(num_splits):
    """Each key has the lowest bias, whose rounding hides the number of a split's keys."""
    q, k = make_qkv(batch=1, heads=1, kv_heads=1, q_length=1, kv_length=513, head_dim=64)[:2]
    v = torch.zeros_like(k)
    v[:, :, -1] = 1
    bias = torch.full((1, 513), torch.finfo(torch.float32).min)
    with simulate(check=True):
        out, lse = ops.flash_decode(0 * q, k, v, attn_bias=bias, num_splits=num_splits)
    torch.testing.assert_close(out, torch.full_like(out, 1 / 513), rtol=1e-5, atol=0.0)
    assert lse.isfinite().all()


@pytest.mark.parametrize("num_splits", [1, 2, 17])
def test_splits_count_by_their_keys(num_splits):
    mean_of_splits(num_splits)


@pytest.mark.parametrize(
    "family, sums",
    [
        ("merge", ("(own_lse) * own_sum", "(own_lse)")),
        ("flash_decode", ("[params.lse_sum_offset] = sum", "[params.lse_sum_offset] = 1")),
    ],
)
def test_sums_of_splits_that_are_dropped_are_caught(family, sums, monkeypatch):
    plant(monkeypatch, family, *sums)
    with pytest.raises(AssertionError):
        mean_of_splits(17)


@pytest.mark.parametrize("num_splits", [1, 2, 3])
def test_sinks_of_splits(num_splits):
    """Large sinks, whose rounding every row shares, and sinks that overflow in base 2."""
    decode = functools.partial(ops.flash_decode, num_splits=num_splits)
    shape = {"batch": 2, "heads": 4, "kv_heads": 2, "q_length": 5, "kv_length": 90}
    with simulate(check=True):
        check_large_sinks(*make_qkv(**shape, head_dim=64), op=decode, device="cpu")
    q, k, v = make_qkv(batch=1, heads=1, kv_heads=1, q_length=1, kv_length=40, head_dim=64)
    lowest = torch.finfo(torch.float32).min
    hidden = torch.zeros(1, 40, dtype=torch.bool)
    with simulate(check=True):
        out, lse = decode(q, k, v, learnable_sink=torch.tensor([3e38]))
        assert (out == 0).all()
        assert lse.item() > 2e38
        bias = torch.full((1, 40), lowest)
        out, _ = decode(q, k, v, attn_bias=bias, learnable_sink=torch.tensor([lowest]))
        torch.testing.assert_close(out, v.sum(2, keepdim=True) / 41, rtol=1e-5, atol=1e-6)
        _, lse = decode(q, k, v, attn_mask=hidden, learnable_sink=torch.tensor([lowest]))
        assert -math.inf < lse.item() < -2e38
