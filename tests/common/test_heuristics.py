"""The choice of flash_fwd's specialisation, a pure function seen through metal_attn_explain."""

import itertools

import pytest
import torch

from tests.helpers.cases import each_case
from torch_metal_attn.runtime import extension
from torch_metal_attn.tools.explain.ops import backward_launches

DTYPES = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat"}
F32, F16, BF16 = DTYPES
REGISTERS = 120  # of a thread's 128 on M1 and M2, what the back end of bench/targets.py allots
FURTHEST = 2**31 - 1024


def explain(q, k=None, v=None, **options):
    k = q if k is None else k
    packed = torch.ops.metal_attn_explain.flash_fwd(q, k, k if v is None else v, **options)
    return extension.launches(packed)[-1]


def choose(dtype, head_dim_qk, head_dim_v=None, q_length=100, kv_length=100, **options):
    q = torch.empty(1, 1, q_length, head_dim_qk, dtype=dtype)
    k = torch.empty(1, 1, kv_length, head_dim_qk, dtype=dtype)
    v = torch.empty(1, 1, kv_length, head_dim_v or head_dim_qk, dtype=dtype)
    return explain(q, k, v, **options)


def numbers(explanation):
    """The defines but for names of types."""
    defines = explanation["defines"].items()
    return {name: int(value) for name, value in defines if not name.endswith("ELEMENT")}


def block_rows(defines):
    shares = defines.get("COLUMN_SIMDGROUPS", 1)
    return 8 * defines["ROW_FRAGMENTS"] * defines["SIMDGROUPS"] // shares


@each_case(
    "dtype, head_dim_qk, head_dim_v",
    itertools.product(DTYPES, (1, 7, 64, 80, 127, 192, 256, 576), (3, 8, 136, 255, 257, 512)),
)
def test_every_choice_fits(dtype, head_dim_qk, head_dim_v):
    explanation = choose(dtype, head_dim_qk, head_dim_v)
    defines = numbers(explanation)
    assert explanation["defines"]["ELEMENT"] == DTYPES[dtype]
    assert (defines["HEAD_DIM_QK"], defines["HEAD_DIM_V"]) == (head_dim_qk, head_dim_v)
    slices = -(-head_dim_v // defines["V_SLICE"])
    assert defines["V_SLICE"] <= 256
    assert explanation["grid"] == [-(-100 // block_rows(defines)), slices, 1]
    assert explanation["threads"] == [32 * defines["SIMDGROUPS"], 1, 1]
    assert explanation["threadgroup_bytes"] <= 32768
    assert 0 < explanation["registers"] <= REGISTERS


# (dtype, D, Dv) -> (ROW_FRAGMENTS, BLOCK_K, SIMDGROUPS, COLUMN_SIMDGROUPS, where Q is, V_SLICE) on
# M1 and where nobody knows the GPU, and on M3 and later.
CHOSEN = {
    (BF16, 128, 128): ((2, 24, 4, 1, "threadgroup", 128), (2, 32, 4, 1, "registers", 128)),
    (F16, 192, 128): ((2, 16, 8, 2, "registers", 128), (2, 32, 8, 2, "registers", 128)),
    (F16, 256, 256): ((2, 16, 4, 2, "threadgroup", 256), (2, 24, 8, 2, "registers", 256)),
    (F32, 64, 64): ((2, 32, 4, 1, "again", 64), (2, 32, 4, 1, "registers", 64)),
    (F32, 128, 128): ((2, 16, 8, 2, "registers", 128), (2, 24, 4, 1, "again", 128)),
    (F32, 256, 256): ((2, 8, 8, 2, "again", 256), (2, 8, 8, 2, "registers", 256)),
    (F16, 576, 512): ((1, 8, 8, 2, "registers", 256), (1, 8, 8, 1, "registers", 256)),
    (F32, 64, 512): ((1, 16, 8, 1, "again", 256), (2, 16, 8, 2, "registers", 256)),
}


def tile(explanation):
    defines = numbers(explanation)
    place = "threadgroup" if defines.get("Q_IN_THREADGROUP") else "again"
    return (
        *(defines[n] for n in ("ROW_FRAGMENTS", "BLOCK_K", "SIMDGROUPS")),
        defines.get("COLUMN_SIMDGROUPS", 1),
        "registers" if defines["Q_IN_REGISTERS"] else place,
        defines["V_SLICE"],
    )


@pytest.mark.parametrize("problem", CHOSEN, ids=str)
def test_pinned_choices(problem, gpu):
    assert tile(choose(*problem)) == CHOSEN[problem][0]
    gpu("Apple M3 Pro")
    assert tile(choose(*problem)) == CHOSEN[problem][1]


def test_short_problems_are_cut_finer_on_large_gpus(cores):
    """So that all cores work. Where a launch takes longer than the kernel it does not matter."""

    def tiles(q_length, count):
        cores(count)
        return choose(F16, 128, q_length=q_length, kv_length=512, causal=True)["grid"][0]

    assert tiles(512, 76) >= 2 * tiles(512, 1)
    assert tiles(511, 76) == tiles(512, 1)


@pytest.mark.parametrize("head_dims", [(512, 64), (64, 512), (256, 256), (384, 384)])
def test_gradients_of_wide_heads_have_enough_registers(head_dims):
    q, v = (torch.empty(1, 1, 16, head_dim) for head_dim in head_dims)
    launches = backward_launches("flash_fwd", {"q": q, "k": q.clone(), "v": v})
    assert max(launch.get("registers", 0) for launch in launches) <= REGISTERS


FAMILIES = {
    **dict.fromkeys(("Apple M1", "Apple M1 Ultra", "Apple M2"), 120),
    **dict.fromkeys(("Apple M3 Pro", "Apple M4 Max", "Apple M5", "Apple M12"), 168),
    # What nobody knows is taken for the oldest.
    **dict.fromkeys(("", "Apple M", "Apple Mx", "Apple M1x", "Apple M0", "apple m3"), 120),
    **dict.fromkeys(("Apple A17 Pro", "AMD Radeon Pro 580", "Apple Paravirtual device"), 120),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_registers_are_known_by_the_name(name, gpu):
    gpu(name)
    assert f"of {FAMILIES[name]} registers a thread" in choose(F32, 128)["reason"]


# Options of 100 queries and 100 keys, and whether they hide a key.
BANDS = [
    ({}, 0),
    ({"causal": True, "q_offset": 98}, 1),
    ({"causal": True, "q_offset": 99}, 0),  # the first query sees the last key
    ({"window_size_left": 98, "q_offset": 0}, 1),
    ({"window_size_left": 99, "q_offset": 0}, 0),  # the last query sees the first key
    ({"window_size_left": 99, "q_offset": 1}, 1),
    ({"window_size_left": 2**63 - 1, "window_size_right": 2**63 - 1, "q_offset": FURTHEST}, 0),
    ({"window_size_left": 99, "q_offset": 0, "seqused_k": torch.tensor([100]).int()}, 1),
]


@each_case("options, band", BANDS)
def test_a_band_only_where_something_is_hidden(options, band):
    assert numbers(choose(F16, 64, **options)).get("BAND", 0) == band


def test_what_is_off_is_not_compiled_in():
    off = {"window_size_left": -5, "attention_chunk": 0, "softcap": 0.0, "dropout_p": 0.0}
    assert choose(F16, 64, causal=True, q_offset=99, **off) == choose(F16, 64)


def test_packed_grid_has_a_row_for_queries_of_no_sequence():
    explain_packed = torch.ops.metal_attn_explain.flash_varlen_fwd
    q = torch.empty(50, 6, 64, dtype=F16)
    ends = torch.tensor([0, 20, 20, 45], dtype=torch.int32)
    (explanation,) = extension.launches(explain_packed(q, q, q, ends, ends, 40, 25))
    assert explanation["grid"] == [-(-40 // block_rows(numbers(explanation))), 6, 3 + 1]
    (nothing,) = extension.launches(explain_packed(q, q, q, ends[:1], ends[:1], 0, 0))
    assert nothing["grid"] == [1, 6, 1], "rows of no sequence are written too"


def test_reason_gives_the_figures():
    reason = choose(BF16, 128)["reason"]
    assert "120 of 120 registers a thread" in reason
    assert "29440 of 32768 bytes of threadgroup memory" in reason
    assert "16 queries a SIMD group and Q in threadgroup memory" in reason
    assert "two SIMD groups, half the columns each" in choose(BF16, 256)["reason"]
