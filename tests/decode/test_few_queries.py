"""Calls of attention with few queries run the kernel of flash_decode, which splits the keys."""

import math

import pytest
import torch

from tests.attention.flash_fwd_check import make_qkv, rotary_tables
from torch_metal_attn import explain, flash_attn_func, scaled_dot_product_attention
from torch_metal_attn.with_kvcache import DECODE_QUERIES

ops = torch.ops.metal_attn


def kernels(function, *arguments, **options):
    """Those that a function launches, which stands in for a module."""
    module = torch.nn.Identity()
    module.forward = function
    rows = explain(module, *arguments, **options).rows
    return [row.explanation.kernel for row in rows]


def operands(heads, kv_heads, queries, head_dim, dtype=torch.half):
    """q, k and v of 8,192 keys, whose memory nothing touches."""
    q = torch.empty(1, heads, queries, head_dim, dtype=dtype)
    return q, *torch.empty(2, 1, kv_heads, 8192, head_dim, dtype=dtype)


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
