"""Quantised rows that are rotated by a Hadamard matrix: formula, kernels and caches."""

import pytest
import torch

from tests.attention import held_cases
from tests.helpers.cases import each_case
from tests.helpers.judged import arguments, judge
from tests.helpers.mutants import mutant_tests
from tests.helpers.steps import append, check_special, step
from torch_metal_attn import flash_attn_with_kvcache, quantisation, simulate, testing
from torch_metal_attn.quantisation import hadamard, quantise
from torch_metal_attn.testing.judge import normal

SIZES = quantisation.HADAMARD
flash_decode = torch.ops.metal_attn.flash_decode


def matrix(size):
    """Sylvester's orthonormal Hadamard matrix in float64."""
    signs = [[(-1) ** bin(i & j).count("1") for j in range(size)] for i in range(size)]
    return torch.tensor(signs, dtype=torch.float64) / size**0.5


@pytest.mark.parametrize("size", SIZES)
def test_hadamard_multiplies_by_the_matrix(size):
    x = normal(7, 3 * 128)
    exact = (x.double().unflatten(-1, (-1, size)) @ matrix(size)).flatten(-2)
    rotated = hadamard(x, size)
    torch.testing.assert_close(rotated.double(), exact, rtol=0, atol=2e-6)
    torch.testing.assert_close(hadamard(rotated, size), x, rtol=0, atol=2e-6)
    assert hadamard(x.half(), size).dtype == torch.float16
    assert hadamard(x[:0], size).shape == (0, 384)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(hadamard(x, size), rotated)


# Formats of K and V, the size of the rotation, and other fields.
PAGES = {"cache": "paged", "page": 5, "capacity": 65}
APPEND_CASES = [
    ("q8_0", "q4_0", 32, PAGES | {"head_dim": 96, "v_head_dim": 32}),
    ("q2_g32", "q3_g64", 64, {"v_head_dim": 128, "rotary_columns": 32}),
    ("q4_g64", "fp8_e4m3", 128, PAGES | {"head_dim": 128, "v_head_dim": 256}),
    ("fp8_e4m3", "q3_g32", 32, {"rotary_columns": 32}),
]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("format, v_format, hadamard, fields", APPEND_CASES)
def test_append(format, v_format, hadamard, fields):
    check_special(format=format, v_format=v_format, hadamard=hadamard, dtype="float32", **fields)


# The numbers of rows of q and of columns decide how rows are rotated: by SIMD lanes, or in matrix
# fragments of SIMD groups with different keys or columns. Formats are pairs of test_grouped.py.
DECODE_CASES = {
    "one row": ("q2_g32", "q3_g64", 64, {"v_head_dim": 128}),
    "one row, wide": ("q4_g32", "q2_g64", 128, {"hadamard": 128}),
    "lanes without columns": ("q8_0", "q4_g32", 64, {"v_head_dim": 96, "hadamard": 32}),
    "eight rows": ("q4_g64", "q4_0", 64, {"heads": 16}),
    "columns": ("q2_g64", "q8_0", 128, {"hadamard": 128, "heads": 8, "q_length": 4}),
    "columns, two blocks": ("fp8_e4m3", "q3_g32", 256, {"heads": 8}),
    "rows apart": ("q4_0", "q8_0", 64, {"heads": 40, "kv_heads": 1}),
}


def decode_fields(name):
    format, v_format, head_dim, fields = DECODE_CASES[name]
    sizes = {"heads": 2, "kv_heads": 2, "head_dim": head_dim, "v_head_dim": head_dim}
    return sizes | {"format": format, "v_format": v_format, "hadamard": 64} | fields


@pytest.mark.parametrize("name", DECODE_CASES)
def test_attention(name, device):
    number = list(DECODE_CASES).index(name)
    dtype = ("float16", "bfloat16", "float32")[number % 3]
    case = {"kv_length": 75, "causal": True, "q_length": 1, "dtype": dtype} | decode_fields(name)
    where = [{}, {"cache": "paged", "page": 5}, {"cache": "indexed"}]
    kept = {"batch": 2, "seqused_k": (75, 33), "call": "flash_decode"}
    split = {"num_splits": 2, "learnable_sink": "float32"} if number % 2 else {}
    held_cases.hold([held_cases.case(**case, **kept, **split, **where[number % 3])], device)


def test_flash_attn_with_kvcache(device):
    """One call has few queries, and two have so many that flash_fwd computes them."""
    common = {"call": "flash_attn_with_kvcache", "format": "q4_0", "hadamard": 64, "heads": 2}
    common |= {"kv_heads": 1, "head_dim": 64, "dtype": "float32", "causal": True}
    sizes = {"lengths": (3, 20), "capacity": 96, "rotary_columns": 32}
    steps = [step(length=n, **sizes, **common) for n in (2, 70)]
    old = held_cases.case(q_length=66, kv_length=90, seqused_k=(80,), **common)
    held_cases.hold([*steps, old], device)


def test_rows_that_fill_threadgroup_memory(device):
    """There are 20 float32 rows of latents, and memory to rotate fewer rows at a time."""
    latents = {"values_in_keys": True, "head_dim": 576, "v_head_dim": 512, "kv_heads": 1}
    fields = {"length": 5, "lengths": (7, 11), "capacity": 25, "dtype": "float32", "causal": True}
    held_cases.hold([step(**latents, **fields, format="q3_g64", hadamard=64)], device)


def call_append(hadamard, **fields):
    call = arguments(append(**{"format": "q4_0", "length": 2, "lengths": (0, 0)} | fields))
    torch.ops.metal_attn.append_kv(**call | {"hadamard": hadamard})


def call_decode(size, columns=64, format="q8_0"):
    k = torch.zeros(1, 1, 3, columns)
    data, scale = quantise(k, format) if format else (k, None)
    flash_decode(k, data, data, k_scale=scale, v_scale=scale, hadamard=size)


def prefill(**options):
    rows = torch.zeros(1, 70, 1, 64)
    flash_attn_with_kvcache(rows, rows, rows, **options)


@each_case(
    "call, message",
    [
        (lambda: hadamard(torch.zeros(3, 96), 64), "x has 96 columns; size=64 needs a multiple"),
        (lambda: hadamard(torch.zeros(3, 64), 16), "size is 16; it must be 0 .off., 32, 64"),
        (lambda: hadamard(torch.zeros(3, 96), 0), "size is 0; it must be one of 32, 64, 128"),
        (lambda: hadamard(torch.zeros(()), 32), "x has 0 columns"),
        (lambda: hadamard(torch.zeros(64).int(), 32), "x has dtype torch.int32"),
        (lambda: quantise(torch.zeros(3, 64), "q8_0", hadamard=16), "hadamard is 16; it must be 0"),
        (lambda: call_append(hadamard=48), "hadamard is 48; it must be 0 .off., 32, 64 or 128"),
        (
            lambda: call_append(hadamard=128),
            "k_cache has a head dim of 64; it must be a multiple of hadamard, which is 128",
        ),
        (
            lambda: call_append(v_head_dim=96, hadamard=64),
            "v_cache has a head dim of 96; it must be a multiple of hadamard",
        ),
        (
            lambda: call_append(format="", hadamard=64),
            "hadamard is 64 and k_cache is not quantised",
        ),
        (lambda: call_decode(-32), "hadamard is -32; it must be 0"),
        (lambda: call_decode(2**40), "hadamard is 1099511627776; it must be 0"),
        (
            lambda: call_decode(64, 96),
            "k has a head dim of 96; it must be a multiple of hadamard, which is 64",
        ),
        (lambda: call_decode(64, format=None), "hadamard is 64 and k is not quantised"),
        (lambda: prefill(hadamard=64), "hadamard is 64 and k_cache is not quantised"),
    ],
)
def test_invalid_arguments_are_refused(call, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        call()


def run_problem(name):
    if name == "append":
        formats = {"format": "q8_0", "v_format": "q4_0", "hadamard": 64}
        judge(append(**formats, v_head_dim=128, length=5, lengths=(3, 9)))
        return
    case = {"call": "flash_decode", "kv_length": 40, "dtype": "float16"} | decode_fields(name)
    with simulate(check=True):
        attention_case = testing.Attention(**case)
        result = testing.run(attention_case, torch.device("cpu"))
    assert result.status == "ok", result


test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(
    {
        "append": """
            append_kv: not rotated: if ({~HADAMARD => false~}) {
            append_kv: one distance left out: bit = {~1 => 2~}; bit < HADAMARD / 8
            append_kv: not orthonormal: HADAMARD == 64 ? {~0.125f => 0.25f~}
            append_kv: signs of the upper lanes: {~other - values[i] => values[i] - other~}
            append_kv: distances in a lane: distance = {~1 => 2~}; distance < COUNT
        """,
        "one row": """
            flash_decode: out not rotated:
                {~hadamard_unit(reinterpret_cast<thread float*>(sum), lane.index); =>~}
            flash_decode: q, signs of spans: value {~* hadamard_sign(n, span - first_span) =>~}
            flash_decode: q, columns in a lane: {~hadamard_values<SPAN_FRAGMENTS>(values); =>~}
            flash_decode: q, a lane's column: lane.index, {~row_lane(bit) => bit~}
        """,
        "eight rows": """
            flash_decode: sums of other keys left out: {~add_sums(i); =>~} } multiply_by_hadamard
            flash_decode: out, columns of another lane: lane.index, {~column_lane(4) => 4~}
            flash_decode: spans not joined: {~join_spans(out.fragments[i] + f, memory, lane); =>~}
        """,
        "columns, two blocks": """
            flash_decode: out, signs of spans: pair {~* hadamard_sign(n, span - first) =>~}
            flash_decode: out, spans of the block before: rows[{~(first + n) => n~} * SIMD_LANES
            flash_decode: no barrier:
                {~if (COLUMN_SIMDGROUPS > 1) { threadgroup_barrier(mem_flags::mem_threadgroup); }
                =>~} UNROLL
        """,
        "rows apart": """
            flash_decode: out, rows of the first SIMD groups:
                memory {~+ lane.row_simdgroup * V_SPANS * SIMD_LANES =>~};
        """,
    },
    "{}",
    run_problem,
)
