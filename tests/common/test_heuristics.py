"""The choice of flash_fwd's specialisation, a pure function seen through flash_fwd_explain."""

import itertools
import math

import pytest
import torch

from tests.helpers.cases import each_case
from torch_metal_attn.runtime import extension

DTYPES = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat"}
HALVES = [torch.float16, torch.bfloat16]
HEAD_DIMS = [1, 7, 8, 16, 24, 33, 40, 64, 80, 96, 112, 120, 127, 128, 136, 192, 248, 256, 257, 576]
V_HEAD_DIMS = [3, 8, 64, 128, 136, 255, 256, 257, 264, 384, 511, 512]

REGISTERS = 120  # of a thread's 128 on M1 and M2, what the back end of bench/targets.py allots
THREADGROUP_BYTES = 32768


def explain(q, k=None, v=None, **options):
    k = q if k is None else k
    return extension.told(
        torch.ops.metal_attn.flash_fwd_explain(q, k, k if v is None else v, **options)
    )


def choose(dtype, head_dim_qk, head_dim_v=None, q_length=100, kv_length=100, **options):
    q = torch.empty(1, 1, q_length, head_dim_qk, dtype=dtype)
    k = torch.empty(1, 1, kv_length, head_dim_qk, dtype=dtype)
    v = torch.empty(1, 1, kv_length, head_dim_v or head_dim_qk, dtype=dtype)
    return explain(q, k, v, **options)


def numbers(explanation):
    """The defines but for names of types."""
    defines = explanation["defines"].items()
    return {name: int(value) for name, value in defines if not name.endswith("ELEMENT")}


def fragments(columns):
    return -(-columns // 8)


def slice_of(dv):
    """At most 256 columns of v a threadgroup, alike in all slices but the last."""
    slices = -(-dv // 256)
    return 8 * -(-fragments(dv) // slices)


def chunks(defines, bytes_of_q):
    """16-byte chunks that a lane keeps of its columns of 8 rows of q."""
    own = fragments(defines["HEAD_DIM_QK"]) // defines.get("COLUMN_SIMDGROUPS", 1)
    return -(-own * bytes_of_q // 8)


def memory(defines, itemsize):
    """Rows of tiles are padded to an odd multiple of 8 elements."""
    k_columns, v_columns = 8 * fragments(defines["HEAD_DIM_QK"]) | 8, defines["V_SLICE"] | 8
    lanes = 32 * defines["SIMDGROUPS"] * defines["ROW_FRAGMENTS"]
    shared = defines.get("COLUMN_SIMDGROUPS", 1) > 1
    columns = max(k_columns, v_columns) if shared else k_columns + v_columns
    kept = 16 * lanes * chunks(defines, itemsize) if defines.get("Q_IN_THREADGROUP") else 0
    parts = lanes * defines["BLOCK_K"] // 8 * 8 if shared else 0
    return defines["BLOCK_K"] * columns * itemsize + kept + parts


def block_rows(defines):
    shares = defines.get("COLUMN_SIMDGROUPS", 1)
    return 8 * defines["ROW_FRAGMENTS"] * defines["SIMDGROUPS"] // shares


def cost(defines, itemsize):
    """What a thread loads for 32 keys and 8 queries, and 12 a block."""
    d, v_slice = fragments(defines["HEAD_DIM_QK"]), defines["V_SLICE"] // 8
    shares, rows = defines.get("COLUMN_SIMDGROUPS", 1), defines["ROW_FRAGMENTS"]
    again = d * (1 if itemsize == 4 else 2)
    if defines["Q_IN_REGISTERS"]:
        again = 0
    elif defines.get("Q_IN_THREADGROUP"):
        again = shares * chunks(defines, itemsize)
    columns = d + v_slice
    staged = 16 * columns * itemsize * 8 / block_rows(defines)
    exchanged = 16 if shares > 1 else 0
    blocks = 32 / defines["BLOCK_K"] * (again + 12 * shares)
    slices = -(-defines["HEAD_DIM_V"] // defines["V_SLICE"])
    return slices * (4 * columns / rows + staged + exchanged + blocks)


@pytest.mark.parametrize("dtype", DTYPES)
@each_case("head_dim_qk, head_dim_v", itertools.product(HEAD_DIMS, V_HEAD_DIMS))
def test_every_choice_fits(dtype, head_dim_qk, head_dim_v):
    explanation = choose(dtype, head_dim_qk, head_dim_v)
    defines = numbers(explanation)
    assert explanation["defines"]["ELEMENT"] == DTYPES[dtype]
    assert (defines["HEAD_DIM_QK"], defines["HEAD_DIM_V"]) == (head_dim_qk, head_dim_v)
    v_slice = defines["V_SLICE"]
    slices = -(-head_dim_v // v_slice)
    assert v_slice <= 256
    assert (slices - 1) * v_slice < head_dim_v <= slices * v_slice
    assert explanation["grid"][1] == slices
    assert defines["ROW_FRAGMENTS"] in (1, 2)
    assert defines["BLOCK_K"] in (8, 16, 24, 32)
    assert explanation["threadgroup_bytes"] == memory(defines, dtype.itemsize)
    assert explanation["threadgroup_bytes"] <= THREADGROUP_BYTES
    assert 0 < explanation["registers"] <= REGISTERS


# (dtype, D, Dv) -> (ROW_FRAGMENTS, BLOCK_K, SIMDGROUPS, COLUMN_SIMDGROUPS, where Q is, V_SLICE) on
# M1 and where nobody knows the GPU, and on M3 and later.
CHOSEN = {
    (torch.bfloat16, 128, 128): (
        (2, 24, 4, 1, "threadgroup", 128),
        (2, 32, 4, 1, "registers", 128),
    ),
    (torch.float16, 64, 64): ((2, 32, 4, 1, "registers", 64), (2, 32, 4, 1, "registers", 64)),
    (torch.float16, 96, 96): ((2, 32, 4, 1, "threadgroup", 96), (2, 32, 4, 1, "registers", 96)),
    (torch.float16, 136, 136): ((1, 32, 8, 1, "registers", 136), (2, 16, 4, 1, "registers", 136)),
    (torch.float16, 192, 128): ((2, 16, 8, 2, "registers", 128), (2, 32, 8, 2, "registers", 128)),
    (torch.float16, 248, 248): ((1, 16, 4, 1, "threadgroup", 248), (1, 32, 8, 1, "registers", 248)),
    (torch.float16, 256, 256): ((2, 16, 4, 2, "threadgroup", 256), (2, 24, 8, 2, "registers", 256)),
    (torch.float32, 64, 64): ((2, 32, 4, 1, "again", 64), (2, 32, 4, 1, "registers", 64)),
    (torch.float32, 96, 96): ((2, 16, 4, 1, "again", 96), (2, 24, 4, 1, "registers", 96)),
    (torch.float32, 128, 128): ((2, 16, 8, 2, "registers", 128), (2, 24, 4, 1, "again", 128)),
    (torch.float32, 256, 256): ((2, 8, 8, 2, "again", 256), (2, 8, 8, 2, "registers", 256)),
    (torch.bfloat16, 3, 7): ((2, 32, 4, 1, "registers", 8), (2, 32, 4, 1, "registers", 8)),
    (torch.float16, 576, 512): ((1, 8, 8, 2, "registers", 256), (1, 8, 8, 1, "registers", 256)),
    (torch.float32, 576, 512): ((1, 8, 8, 1, "again", 256), (2, 8, 8, 2, "again", 256)),
    (torch.bfloat16, 512, 64): ((2, 24, 4, 1, "again", 64), (2, 16, 8, 2, "registers", 64)),
    (torch.float32, 64, 512): ((1, 16, 8, 1, "again", 256), (2, 16, 8, 2, "registers", 256)),
}


def tile(defines):
    place = "threadgroup" if defines.get("Q_IN_THREADGROUP") else "again"
    return (
        *(defines[n] for n in ("ROW_FRAGMENTS", "BLOCK_K", "SIMDGROUPS")),
        defines.get("COLUMN_SIMDGROUPS", 1),
        "registers" if defines["Q_IN_REGISTERS"] else place,
        defines["V_SLICE"],
    )


@pytest.mark.parametrize("problem", CHOSEN, ids=str)
def test_worked_examples(problem, gpu):
    """Also: a GPU with more registers never has a tile that costs more."""
    careful, roomy = CHOSEN[problem]
    here = numbers(choose(*problem))
    assert tile(here) == careful
    gpu("Apple M3 Pro")
    there = numbers(choose(*problem))
    assert tile(there) == roomy
    assert cost(there, problem[0].itemsize) <= cost(here, problem[0].itemsize)


def test_short_problems_are_cut_finer_on_large_gpus(cores):
    """So that all cores work. Where a launch takes longer than the kernel it does not matter."""

    def tiles(q_length, count):
        cores(count)
        given = {"q_length": q_length, "kv_length": 512, "causal": True}
        return choose(torch.float16, 128, **given)["grid"][0]

    assert tiles(512, 76) >= 2 * tiles(512, 1)
    assert tiles(511, 76) == tiles(512, 1)


@pytest.mark.parametrize("head_dims", [(512, 64), (64, 512), (256, 256), (384, 384)])
def test_gradients_of_wide_heads_have_enough_registers(head_dims):
    q, v = (torch.empty(1, 1, 16, head_dim) for head_dim in head_dims)
    plan = extension.told(torch.ops.metal_attn.flash_bwd_plan(q, q.clone(), v))
    assert max(plan[f"flash_bwd_{kernel}"]["registers"] for kernel in ("dq", "dkv")) <= REGISTERS


FAMILIES = {
    **{f"Apple M1{kind}": 7 for kind in ("", " Pro", " Max", " Ultra")},
    "Apple M2": 8,
    **dict.fromkeys(("Apple M3 Pro", "Apple M4", "Apple M4 Max"), 9),
    **dict.fromkeys(("Apple M5", "Apple M6 Ultra", "Apple M12"), 10),
    **dict.fromkeys(("", "Apple", "Apple M", "Apple Mx", "Apple A17 Pro", "AMD Radeon Pro 580"), 7),
    **dict.fromkeys(("Apple M1x", "Apple M0", "Apple Paravirtual device", "apple m3"), 7),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_family_is_known_by_the_name(name, gpu):
    """What nobody knows is taken for the oldest."""
    gpu(name)
    limit = 120 if FAMILIES[name] < 9 else 168
    assert f"of {limit} registers a thread" in choose(torch.float32, 128)["reason"]


@pytest.mark.parametrize("q_length", [1, 31, 32, 33, 64, 65, 1000])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_grid_covers_the_queries(q_length, head_dim):
    q = torch.empty(3, 6, q_length, head_dim, dtype=torch.float16)
    explanation = explain(q, q[:, :2], q[:, :2])
    defines = numbers(explanation)
    block_q = block_rows(defines)
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
        (100, 100, -(2**31) + 1024, 1),
        (100, 100, 2**31 - 1024, 0),
    ],
)
def test_causal_band_only_where_something_is_hidden(q_length, kv_length, offset, causal):
    explanation = choose(
        torch.float16,
        64,
        q_length=q_length,
        kv_length=kv_length,
        causal=offset is not None,
        q_offset=offset,
    )
    assert numbers(explanation).get("BAND", 0) == causal


@pytest.mark.parametrize(
    ("left", "right", "offset", "band"),
    [
        (-1, -1, 0, 0),
        (98, -1, 0, 1),
        (99, -1, 0, 0),  # the last query sees the first key
        (99, -1, 1, 1),
        (100, -1, 1, 0),
        (-1, 98, 0, 1),
        (-1, 99, 0, 0),  # the first query sees the last key
        (-1, 99, -1, 1),
        (-1, 100, -1, 0),
        (99, 99, None, 0),  # bottom-right of a square: 0
        (98, 99, None, 1),
        (2**63 - 1, 2**63 - 1, 2**31 - 1024, 0),
        (2**63 - 1, 2**63 - 1, -(2**31) + 1024, 0),
        (0, -1, -99, 0),  # no query stands behind a key
        (0, -1, -98, 1),
    ],
)
def test_window_band_only_where_something_is_hidden(left, right, offset, band):
    windows = {"window_size_left": left, "window_size_right": right, "q_offset": offset}
    explanation = choose(torch.float16, 64, **windows)
    assert numbers(explanation).get("BAND", 0) == band
    used = choose(torch.float16, 64, **windows, seqused_k=torch.tensor([100]).int())
    assert numbers(used).get("BAND", 0) == (left >= 0 or right >= 0), "lengths are the device's"


# What each option adds to the defines.
ANGLES = {f"{side}_rotary_{f}": torch.ones(100, 16) for side in "qk" for f in ("cos", "sin")}
FEATURES = {
    "chunk": ({"attention_chunk": 7}, {"CHUNKED": "1"}),
    "seqused_k": ({"seqused_k": torch.tensor([100]).int()}, {"SEQUSED_K": "1"}),
    "leftpad_k": ({"leftpad_k": torch.tensor([0]).int()}, {"LEFTPAD_K": "1"}),
    "mask": (
        {"attn_mask": torch.ones(100, 100, dtype=torch.bool)},
        {"MASK": "1", "MASK_PAIRS": "1"},
    ),
    "additive mask": (
        {"attn_mask": torch.ones(100, 100).bfloat16()},
        {"BIAS": "1", "BIAS_PAIRS": "1", "BIAS_ELEMENT": "bfloat"},
    ),
    "bias": (
        {"attn_bias": torch.ones(100, 100)},
        {"BIAS": "1", "BIAS_PAIRS": "1", "BIAS_ELEMENT": "float"},
    ),
    "softcap": ({"softcap": 30.0}, {"SOFTCAP": "1"}),
    "alibi": ({"alibi_slopes": torch.ones(1)}, {"ALIBI": "1"}),
    "sink": ({"learnable_sink": torch.ones(1).half()}, {"SINK": "1", "SINK_ELEMENT": "half"}),
    "dropout": ({"dropout_p": 0.1, "rng_state": torch.tensor([1, 2])}, {"DROPOUT": "1"}),
    "rotary of q": (
        {name: table for name, table in ANGLES.items() if name.startswith("q")},
        {
            "Q_ROTARY": "1",
            "ROTARY_ELEMENT": "float",
            "ROTARY_DIM": "32",
            "ROTARY_INTERLEAVED": "0",
            "WIDE_ROTARY": "1",
        },
    ),
    "rotary of both": (
        ANGLES | {"rotary_interleaved": True},
        {
            "Q_ROTARY": "1",
            "K_ROTARY": "1",
            "ROTARY_ELEMENT": "float",
            "ROTARY_DIM": "32",
            "ROTARY_INTERLEAVED": "1",
            "WIDE_ROTARY": "1",
        },
    ),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_is_compiled_in_where_it_is_on(feature):
    """And changes nothing else of the choice."""
    options, defines = FEATURES[feature]
    plain, explanation = choose(torch.float16, 64), choose(torch.float16, 64, **options)
    assert explanation["defines"] == plain["defines"] | defines
    assert explanation["grid"] == plain["grid"]
    assert not set(defines) & set(plain["defines"])


def test_what_is_off_is_not_compiled_in():
    off = choose(
        torch.float16,
        64,
        causal=True,
        q_offset=99,
        window_size_left=-5,
        attention_chunk=0,
        softcap=0.0,
    )
    assert off == choose(torch.float16, 64)


def pairs(mask, kv_length=8):
    return numbers(choose(torch.float16, 64, q_length=4, kv_length=kv_length, attn_mask=mask))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16, torch.float32])
def test_pairs_of_keys_need_aligned_rows(dtype):
    name = "MASK_PAIRS" if dtype == torch.bool else "BIAS_PAIRS"
    whole = torch.zeros(4, 16, dtype=dtype)
    assert pairs(whole[:, :8])[name] == 1
    assert pairs(whole[:, 2:10])[name] == 1
    assert pairs(whole[:1, :8])[name] == 1
    assert pairs(whole[0, :8])[name] == 1
    assert pairs(whole[:, 1:9])[name] == 0  # first element
    assert pairs(torch.zeros(4, 9, dtype=dtype)[:, :8])[name] == 0  # rows
    assert pairs(whole[:, ::2])[name] == 0  # keys
    assert pairs(whole[:, :1])[name] == 0  # one key for all
    assert pairs(whole[:, :7], kv_length=7)[name] == 0  # a key without a neighbour
    assert pairs(torch.zeros(8, 4, dtype=dtype).T)[name] == 0


def wide_rotary(dtype, columns, table_dtype=torch.float32, offset=0, interleaved=False):
    table = torch.zeros(8 * columns + offset, dtype=table_dtype)[offset:].view(8, columns)
    explanation = choose(
        dtype,
        64,
        q_length=8,
        kv_length=8,
        k_rotary_cos=table,
        k_rotary_sin=torch.zeros(8, columns, dtype=table_dtype),
        rotary_interleaved=interleaved,
    )
    assert ("k rotated element by element" in explanation["reason"]) == (
        "WIDE_ROTARY" not in explanation["defines"]
    )
    return "WIDE_ROTARY" in explanation["defines"]


def test_wide_rotary_needs_whole_chunks_of_pairs():
    assert wide_rotary(torch.float16, 32)
    assert wide_rotary(torch.float16, 8)
    assert not wide_rotary(torch.float16, 4)  # the partners of a chunk are in it
    assert wide_rotary(torch.float16, 4, interleaved=True)
    assert wide_rotary(torch.float32, 4)
    assert not wide_rotary(torch.float16, 12)
    assert wide_rotary(torch.float16, 12, interleaved=True)
    assert not wide_rotary(torch.float16, 7)
    assert not wide_rotary(torch.float16, 32, offset=1)
    assert wide_rotary(torch.float16, 32, torch.float16)
    assert not wide_rotary(torch.float16, 32, torch.float16, offset=4)


def test_packed_grid_has_a_row_for_queries_of_no_sequence():
    q = torch.empty(50, 6, 64, dtype=torch.float16)
    ends = torch.tensor([0, 20, 20, 45], dtype=torch.int32)
    explanation = extension.told(
        torch.ops.metal_attn.flash_varlen_fwd_explain(q, q, q, ends, ends, 40, 25)
    )
    defines = numbers(explanation)
    assert defines["VARLEN"] == 1
    block_q = block_rows(defines)
    assert explanation["grid"] == [math.ceil(40 / block_q), 6, 3 + 1]
    nothing = extension.told(
        torch.ops.metal_attn.flash_varlen_fwd_explain(q, q, q, ends[:1], ends[:1], 0, 0)
    )
    assert nothing["grid"] == [1, 6, 1], "rows of no sequence are written too"


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
        ((1, 0, 8, 64), 8, "q is empty"),
    ],
)
def test_empty_problems_say_that_nothing_is_launched(q_shape, kv_length, reason):
    k = torch.empty(q_shape[0], q_shape[1], kv_length, 64)
    explanation = explain(torch.empty(q_shape), k)
    assert explanation["grid"] == [0, 0, 0]
    assert reason in explanation["reason"]


def test_reason_gives_the_figures():
    reason = choose(torch.bfloat16, 128)["reason"]
    assert "120 of 120 registers a thread" in reason
    assert "29440 of 32768 bytes of threadgroup memory" in reason
    assert "16 queries a SIMD group and Q in threadgroup memory" in reason
    assert "two SIMD groups, half the columns each" in choose(torch.bfloat16, 256)["reason"]
