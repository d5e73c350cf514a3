"""Planted faults in the text of rope and rope_tables: the tests' own checks must see each."""

import pytest
import torch

from tests.helpers.mutants import each_unchanged, expect_caught, pairs, plant_among
from tests.rope.rope_check import check_rope, make_problem, make_tables
from torch_metal_attn import rope as rope_functions
from torch_metal_attn import simulate
from torch_metal_attn.runtime import extension, session

# What a fault changes in the shader's text, and the fault that the simulator then reports; None
# where only the numbers can show it.
MUTANTS = {
    "sign flipped": ("x * cosine - y * sine", "x * cosine + y * sine", None),
    "sine of y dropped": ("y * cosine + x * sine", "y * cosine", None),
    "cos and sin swapped": (
        "angles.cosines[i], params.sine_sign * angles.sines[i]",
        "params.sine_sign * angles.sines[i], angles.cosines[i]",
        None,
    ),
    "never rotated back": ("params.sine_sign * angles.sines[i]", "angles.sines[i]", None),
    "wrong partner": (": rotary_y_column(pair, pairs, false)", ": pair + VECTOR", "race"),
    "interleaved as halves": ("rotary_x_column(i, INTERLEAVED)", "rotary_x_column(i, 0)", None),
    "offset ignored": ("token + params.seqlen_offset;", "token;", None),
    "offset ignored with other offsets": ("token + params.seqlen_offset +", "token +", None),
    "offset of the first sequence": (
        "+ rows[batch * params.rows_batch_stride];",
        "+ rows[0];",
        None,
    ),
    "positions of the first sequence": (
        "rows[batch * params.rows_batch_stride + token",
        "rows[token",
        None,
    ),
    "position of the first token": ("+ token * params.rows_token_stride", "", None),
    "positions ignored": ("rows[batch * params.rows_batch_stride + token", "token; //", None),
    "cos of another row": (
        "row * params.cos_strides.row",
        "(row / 2) * params.cos_strides.row",
        None,
    ),
    "sin of another row": (
        "row * params.sin_strides.row",
        "(row / 2) * params.sin_strides.row",
        None,
    ),
    "first table for all": ("batch * params.cos_strides.batch", "0", None),
    "first angle for all": ("pair * params.sin_strides.column", "0", None),
    "first tail columns left out": ("destination[0] = source[0];", "", None),
    "last tail columns left out": ("c < min(column + UNIT_COLUMNS, head_dim)", "c < column", None),
    "tail columns not where they were": (
        "destination[1] = source[1]",
        "destination[1] = source[0]",
        None,
    ),
    "tail columns rotated": ("unit < params.pair_units", "true", "race"),
    "tail past the end": ("min(column + UNIT_COLUMNS, head_dim)", "column + 64", "race"),
    "k by q's strides": (
        "k_head * params.k_strides.head",
        "k_head * params.q_strides.head",
        "out_of_bounds",
    ),
    "k's result by q's": (
        "k_out_token + k_head * params.k_out_strides.head",
        "k_out_token + k_head * params.q_out_strides.row",
        "race",
    ),
    "k left out": ("head < params.heads)", "head < params.q_heads)", None),
    "last head left out": ("head < params.heads)", "head < params.heads - 1)", None),
    "heads of a thread but one left out": ("h < HEADS", "h < 1", None),
    "heads past the last": ("head < params.heads)", "true)", "race"),
    "token past the end": ("token >= params.length ||", "", "race"),
    "row outside read": ("row >= 0 && row < params.table_rows", "true", "out_of_bounds"),
    "row before the first read": ("row >= 0 &&", "", "out_of_bounds"),
    "row after the last read": (
        "row < params.table_rows",
        "row <= params.table_rows",
        "out_of_bounds",
    ),
}
TABLES_MUTANTS = {
    "sin for cos": ("precise::cos(angle)", "precise::sin(angle)", None),
    "sign of sin": ("precise::sin(angle)", "precise::sin(-angle)", None),
    "factor ignored": (
        "precise::sin(angle) * params.attention_factor",
        "precise::sin(angle)",
        None,
    ),
    "fast cos": ("precise::cos(angle)", "1.0f - 0.5f * angle * angle", None),
    "first section for all": ("section * params.section_stride", "0", None),
    "first batch for all": ("batch * params.batch_stride", "0", None),
    "first position for all": ("token * params.token_stride", "0", None),
    "first frequency for all": ("column * params.inv_freq_stride", "0", None),
    "column past the end": ("column >= params.columns ||", "", "out_of_bounds"),
}


def everything():
    """Tails on and off the vectors, every way to choose rows, q and k of different strides."""
    q, k, cos, sin = make_problem(
        batch=2, heads=5, kv_heads=2, length=13, head_dim=43, rotary_dim=16, dtype=torch.float16
    )
    options = [
        {"seqlen_offset": 3},
        {"seqlen_offset": 1, "seqlen_offsets": torch.tensor([2, 0], dtype=torch.int32)},
        {"positions": torch.arange(26).view(2, 13) % 17, "interleaved": True, "conjugate": True},
    ]
    for choice in options:
        check_rope(q, k, cos, sin, device="cpu", **choice)
    q, k, _, _ = make_problem(
        batch=2, heads=3, kv_heads=2, length=13, head_dim=48, rotary_dim=16, dtype=torch.float16
    )
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    for interleaved in (False, True):
        tables = make_tables(20, 16, batch=2)
        check_rope(q, k, *tables, seqlen_offset=7, interleaved=interleaved, device="cpu")


def shared_heads():
    """So many threads that each has several heads, the last group fewer."""
    q, k, cos, sin = make_problem(
        batch=2, heads=5, kv_heads=2, length=300, head_dim=128, rotary_dim=126
    )
    explained = extension.told(torch.ops.metal_attn.rope_explain(q, k, cos, sin))
    assert explained["defines"]["HEADS"] == "4"
    check_rope(q, k, cos, sin, device="cpu")


def rows_outside():
    """On the GPU a row outside gives NaN and is not read; tables end where their memory does."""
    q, k, cos, sin = make_problem(rows=9)
    for bad in (-1, 9, 2**20):
        positions = torch.arange(9)
        positions[4] = bad
        with session.raising():
            out, _ = torch.ops.metal_attn_simulator.rope(q, k, cos, sin, positions=positions)
        assert out[:, :, 4].isnan().all()


def all_tables():
    positions = torch.randint(0, 900, (3, 2, 35), generator=torch.Generator().manual_seed(0))
    inv_freq, _ = rope_functions.default(600)  # more columns than a threadgroup has threads
    cos, sin = rope_functions.tables(inv_freq, positions, attention_factor=1.3)
    angles = positions[..., None].float() * inv_freq
    torch.testing.assert_close(cos, 1.3 * angles.cos(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sin, 1.3 * angles.sin(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name, monkeypatch):
    old, new, fault = MUTANTS[name]
    plant_among(monkeypatch, "rope", old, new, pairs(MUTANTS))
    check = {"row": rows_outside, "heads": shared_heads}.get(name.split()[0], everything)
    expect_caught(check, fault=fault, kernel="rope")


@pytest.mark.parametrize("name", TABLES_MUTANTS)
def test_mutant_of_the_tables_is_caught(name, monkeypatch):
    old, new, fault = TABLES_MUTANTS[name]
    plant_among(monkeypatch, "rope_tables", old, new, pairs(TABLES_MUTANTS))
    expect_caught(all_tables, fault=fault, kernel="rope_tables")


def test_the_unchanged_kernels_pass():
    for _ in each_unchanged("rope", pairs(MUTANTS)):
        with simulate(check=True):
            everything()
            shared_heads()
            rows_outside()
    for _ in each_unchanged("rope_tables", pairs(TABLES_MUTANTS)):
        with simulate(check=True):
            all_tables()
