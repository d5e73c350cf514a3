"""Planted faults in the text of rope and rope_tables: the tests' own checks must see each."""

import torch

from tests.helpers.mutants import mutant_tests
from tests.rope.rope_check import check_rope, make_problem, make_tables
from torch_metal_attn import rope as rope_functions
from torch_metal_attn.runtime import extension, session


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
    (explained,) = extension.launches(torch.ops.metal_attn_explain.rope(q, k, cos, sin))
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


MUTANTS = {
    everything: {
        "sign flipped": ("rope", "x * cosine - y * sine", "x * cosine + y * sine"),
        "sine of y dropped": ("rope", "y * cosine + x * sine", "y * cosine"),
        "cos and sin swapped": (
            "rope",
            "angles.cosines[i], params.sine_sign * angles.sines[i]",
            "params.sine_sign * angles.sines[i], angles.cosines[i]",
        ),
        "never rotated back": ("rope", "params.sine_sign * angles.sines[i]", "angles.sines[i]"),
        "wrong partner": (
            "rope",
            ": rotary_y_column(pair, pairs, false)",
            ": pair + VECTOR",
            "race",
        ),
        "interleaved as halves": (
            "rope",
            "rotary_x_column(i, INTERLEAVED)",
            "rotary_x_column(i, 0)",
        ),
        "offset ignored": ("rope", "token + params.seqlen_offset;", "token;"),
        "offset ignored with other offsets": ("rope", "row + rows[", "token + rows["),
        "offset of the first sequence": (
            "rope",
            "row + rows[batch * params.rows_batch_stride];",
            "row + rows[0];",
        ),
        "positions of the first sequence": (
            "rope",
            "rows[batch * params.rows_batch_stride + token",
            "rows[token",
        ),
        "position of the first token": ("rope", "+ token * params.rows_token_stride", ""),
        "positions as offsets": ("rope", "row = ROWS_ARE_POSITIONS", "row = row == -1"),
        "cos of another row": (
            "rope",
            "row * params.cos_strides.row",
            "(row / 2) * params.cos_strides.row",
        ),
        "sin of another row": (
            "rope",
            "row * params.sin_strides.row",
            "(row / 2) * params.sin_strides.row",
        ),
        "first table for all": ("rope", "batch * params.cos_strides.batch", "0"),
        "first angle for all": ("rope", "pair * params.sin_strides.column", "0"),
        "first tail columns left out": ("rope", "destination[0] = source[0];", ""),
        "last tail columns left out": (
            "rope",
            "c < min(column + UNIT_COLUMNS, head_dim)",
            "c < column",
        ),
        "tail columns not where they were": (
            "rope",
            "destination[1] = source[1]",
            "destination[1] = source[0]",
        ),
        "tail columns rotated": ("rope", "unit < params.pair_units", "true", "race"),
        "tail past the end": (
            "rope",
            "min(column + UNIT_COLUMNS, head_dim)",
            "column + 64",
            "race",
        ),
        "k by q's strides": (
            "rope",
            "k_head * params.k_strides.head",
            "k_head * params.q_strides.head",
            "out_of_bounds",
        ),
        "k's result by q's": (
            "rope",
            "k_out_token + k_head * params.k_out_strides.head",
            "k_out_token + k_head * params.q_out_strides.row",
            "race",
        ),
        "k left out": ("rope", "head < params.heads)", "head < params.q_heads)"),
        "last head left out": ("rope", "head < params.heads)", "head < params.heads - 1)"),
        "token past the end": ("rope", "token >= params.length ||", "", "race"),
    },
    shared_heads: {
        "heads of a thread but one left out": ("rope", "h < HEADS", "h < 1"),
        "heads past the last": ("rope", "head < params.heads)", "true)", "race"),
    },
    rows_outside: {
        "row outside read": (
            "rope",
            "row >= 0 && row < params.table_rows",
            "true",
            "out_of_bounds",
        ),
        "row before the first read": ("rope", "row >= 0 &&", "", "out_of_bounds"),
        "row after the last read": (
            "rope",
            "row < params.table_rows",
            "row <= params.table_rows",
            "out_of_bounds",
        ),
    },
    all_tables: {
        "sin for cos": ("rope_tables", "precise::cos(angle)", "precise::sin(angle)"),
        "sign of sin": ("rope_tables", "precise::sin(angle)", "precise::sin(-angle)"),
        "factor ignored": (
            "rope_tables",
            "precise::sin(angle) * params.attention_factor",
            "precise::sin(angle)",
        ),
        "fast cos": ("rope_tables", "precise::cos(angle)", "1.0f - 0.5f * angle * angle"),
        "first section for all": ("rope_tables", "section * params.section_stride", "0"),
        "first batch for all": ("rope_tables", "batch * params.batch_stride", "0"),
        "first position for all": ("rope_tables", "token * params.token_stride", "0"),
        "first frequency for all": ("rope_tables", "column * params.inv_freq_stride", "0"),
        "column past the end": ("rope_tables", "column >= params.columns ||", "", "out_of_bounds"),
    },
}

test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(MUTANTS)
