"""The choice of flash_fwd's specialisation, a pure function seen through flash_fwd_explain."""

import json
import math

import pytest
import torch

import torch_metal_attn  # noqa: F401

DTYPES = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat"}
HALVES = [torch.float16, torch.bfloat16]
HEAD_DIMS = [8, 16, 24, 32, 40, 64, 72, 80, 96, 112, 120, 128, 136, 160, 192, 248, 256]

REGISTER_BUDGET = 116
THREADGROUP_BYTES = 32768


def explain(q, k=None, v=None, **options):
    k = q if k is None else k
    return json.loads(
        torch.ops.metal_attn.flash_fwd_explain(q, k, k if v is None else v, **options)
    )


def choose(dtype, head_dim_qk, head_dim_v=None, q_length=100, kv_length=100, **options):
    q = torch.empty(1, 1, q_length, head_dim_qk, dtype=dtype)
    k = torch.empty(1, 1, kv_length, head_dim_qk, dtype=dtype)
    v = torch.empty(1, 1, kv_length, head_dim_v or head_dim_qk, dtype=dtype)
    return explain(q, k, v, **options)


def numbers(explanation):
    return {name: int(value) for name, value in explanation["defines"].items() if name != "ELEMENT"}


def tile_registers(dtype, d, dv, rows, block_k, q_in_registers):
    """32-bit registers of one thread: two of the 64 elements of each 8 x 8 fragment."""
    accumulators = rows * (dv // 8 + 1) * 2  # and a block's share of one column fragment
    chains = 2 if d > 128 else 1  # of a dot product, each with its own scores
    scores = chains * rows * block_k // 8 * 2
    return accumulators + scores + q_in_registers * rows * d // 8 * (dtype.itemsize // 2)


def tile_bytes(dtype, d, dv, block_k):
    """Rows are padded to an odd multiple of 8 elements."""
    return block_k * ((d | 8) + (dv | 8)) * dtype.itemsize


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim_v", [8, 64, 128, 136, 256])
@pytest.mark.parametrize("head_dim_qk", HEAD_DIMS)
def test_every_choice_is_the_best_that_fits(dtype, head_dim_qk, head_dim_v):
    explanation = choose(dtype, head_dim_qk, head_dim_v)
    defines = numbers(explanation)
    assert explanation["defines"]["ELEMENT"] == DTYPES[dtype]
    assert (defines["HEAD_DIM_QK"], defines["HEAD_DIM_V"]) == (head_dim_qk, head_dim_v)
    rows, block_k = defines["ROW_FRAGMENTS"], defines["BLOCK_K"]
    assert rows in (1, 2)
    assert block_k in (8, 16, 32)

    fitting = [k for k in (8, 16, 32) if tile_bytes(dtype, head_dim_qk, head_dim_v, k) <= 32768]
    assert block_k == max(fitting)
    expected_bytes = tile_bytes(dtype, head_dim_qk, head_dim_v, block_k)
    assert explanation["threadgroup_bytes"] == expected_bytes <= THREADGROUP_BYTES

    def registers(rows, q_in_registers):
        return tile_registers(dtype, head_dim_qk, head_dim_v, rows, block_k, q_in_registers)

    two_rows = max(head_dim_qk, head_dim_v) <= 128 and registers(2, True) <= REGISTER_BUDGET
    assert rows == (2 if two_rows else 1)
    assert defines["Q_IN_REGISTERS"] == (registers(rows, True) <= REGISTER_BUDGET)
    assert explanation["registers"] == registers(rows, defines["Q_IN_REGISTERS"])
    assert explanation["registers"] <= REGISTER_BUDGET


# (dtype, D, Dv) -> (ROW_FRAGMENTS, BLOCK_K, Q_IN_REGISTERS, registers, threadgroup bytes), by hand.
BY_HAND = {
    (torch.bfloat16, 128, 128): (2, 32, 1, 116, 17408),
    (torch.float16, 64, 64): (2, 32, 1, 68, 9216),
    (torch.float16, 32, 32): (2, 32, 1, 44, 5120),
    (torch.float16, 136, 136): (1, 32, 1, 69, 17408),
    (torch.float16, 192, 128): (1, 32, 1, 74, 21504),
    (torch.float16, 248, 248): (1, 32, 1, 111, 31744),
    (torch.float16, 256, 256): (1, 16, 1, 106, 16896),
    (torch.float32, 64, 64): (2, 32, 1, 84, 18432),
    (torch.float32, 80, 80): (2, 32, 1, 100, 22528),
    (torch.float32, 96, 96): (2, 32, 1, 116, 26624),
    (torch.float32, 104, 104): (1, 32, 1, 62, 26624),
    (torch.float32, 128, 128): (1, 16, 1, 70, 17408),
    (torch.float32, 192, 192): (1, 16, 1, 106, 25600),
    (torch.float32, 256, 256): (1, 8, 0, 70, 16896),
}


@pytest.mark.parametrize("problem", BY_HAND, ids=str)
def test_worked_examples(problem):
    explanation = choose(*problem)
    defines = numbers(explanation)
    assert BY_HAND[problem] == (
        defines["ROW_FRAGMENTS"],
        defines["BLOCK_K"],
        defines["Q_IN_REGISTERS"],
        explanation["registers"],
        explanation["threadgroup_bytes"],
    )


@pytest.mark.parametrize("q_length", [1, 31, 32, 33, 64, 65, 1000])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_grid_covers_the_queries(q_length, head_dim):
    q = torch.empty(3, 6, q_length, head_dim, dtype=torch.float16)
    explanation = explain(q, q[:, :2], q[:, :2])
    defines = numbers(explanation)
    block_q = 8 * defines["ROW_FRAGMENTS"] * defines["SIMDGROUPS"]
    assert explanation["grid"] == [math.ceil(q_length / block_q), 6, 3]
    assert explanation["threads"] == [32 * defines["SIMDGROUPS"], 1, 1]
    assert explanation["kernel"] == "flash_fwd"
    assert explanation["backend"] == "simulator"


@pytest.mark.parametrize(
    ("q_length", "kv_length", "offset", "causal"),
    [
        (100, 100, None, 0),
        (100, 100, 0, 1),
        (100, 100, 98, 1),
        (100, 100, 99, 0),  # the first query sees the last key
        (1, 100, 99, 0),  # decoding
        (100, 1, 0, 0),
        (100, 100, -1, 1),
        (100, 100, -(2**63), 1),
        (100, 100, 2**63 - 1, 0),
    ],
)
def test_mask_only_where_something_is_hidden(q_length, kv_length, offset, causal):
    explanation = choose(
        torch.float16,
        64,
        q_length=q_length,
        kv_length=kv_length,
        causal=offset is not None,
        q_offset=offset,
    )
    assert numbers(explanation)["CAUSAL"] == causal


def wide(q, k, v):
    return numbers(explain(q, k, v))["WIDE_LOADS"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("narrow", ["k", "v"])
def test_wide_loads_need_aligned_rows_of_k_and_v(dtype, narrow):
    q = torch.empty(2, 2, 16, 32, dtype=dtype)
    chunk = 16 // dtype.itemsize
    good = torch.empty(2, 2, 16, 32 + chunk, dtype=dtype)
    assert wide(q, good[..., :32], good[..., :32]) == 1

    def check(bad):
        assert wide(q, *((bad, q) if narrow == "k" else (q, bad))) == 0

    check(torch.empty(2, 2, 16, 33, dtype=dtype)[..., :32])  # row stride
    check(torch.empty(2, 2, 16 * 32 + 1, dtype=dtype)[..., :512].view(2, 2, 16, 32))  # head stride
    check(torch.empty(2, 1025, dtype=dtype)[:, :1024].view(2, 2, 16, 32))  # batch stride
    check(torch.empty(2049, dtype=dtype)[1:].view(2, 2, 16, 32))  # first element


def test_wide_loads_do_not_ask_it_of_q():
    q = torch.empty(2, 2, 16, 33, dtype=torch.float16)[..., :32]
    assert wide(q, *(torch.empty(2, 2, 16, 32, dtype=torch.float16) for _ in "kv")) == 1


def test_strides_of_dimensions_of_one_do_not_matter():
    k = torch.empty(2048, dtype=torch.float16).as_strided((1, 1, 16, 32), (7, 3, 32, 1))
    assert wide(k, k, k) == 1


def test_broadcast_heads_can_be_wide():
    q = torch.empty(2, 4, 16, 32, dtype=torch.float16)
    k = torch.empty(2, 1, 16, 32, dtype=torch.float16).expand(2, 4, 16, 32)
    assert wide(q, k, k) == 1


@pytest.mark.parametrize(
    ("q_shape", "kv_length", "reason"),
    [
        ((0, 2, 8, 64), 8, "q is empty"),
        ((1, 2, 0, 64), 8, "q is empty"),
        ((1, 2, 8, 64), 0, "there are no keys"),
    ],
)
def test_empty_problems_say_that_nothing_is_launched(q_shape, kv_length, reason):
    k = torch.empty(q_shape[0], 2, kv_length, 64)
    explanation = explain(torch.empty(q_shape), k)
    assert explanation["grid"] == [0, 0, 0]
    assert reason in explanation["reason"]


def test_reason_gives_the_figures():
    reason = choose(torch.bfloat16, 128)["reason"]
    assert "116 of 116 tile registers" in reason
    assert "17408 of 32768 bytes of threadgroup memory" in reason
    assert "16 queries a SIMD group and Q in registers" in reason
