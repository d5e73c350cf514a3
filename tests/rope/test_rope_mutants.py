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
    everything: """
        rope: sign flipped: x * cosine {~- => +~} y * sine
        rope: sine of y dropped: y * cosine {~+ x * sine =>~}
        rope: cos and sin swapped:
            {~angles.cosines[i], =>~} params.sine_sign * angles.sines[i]{~=> , angles.cosines[i]~}
        rope: never rotated back: {~params.sine_sign * =>~} angles.sines[i]
        rope: wrong partner [race]: : {~rotary_y_column(pair, pairs, false) => pair + VECTOR~}
        rope: interleaved as halves: rotary_x_column(i, {~INTERLEAVED => 0~})
        rope: offset ignored: token {~+ params.seqlen_offset =>~};
        rope: offset ignored with other offsets: {~row => token~} + rows[
        rope: offset of the first sequence: row + rows[{~batch * params.rows_batch_stride => 0~}];
        rope: positions of the first sequence: rows[{~batch * params.rows_batch_stride + =>~} token
        rope: position of the first token: {~+ token * params.rows_token_stride =>~}
        rope: positions as offsets: row = {~ROWS_ARE_POSITIONS => row == -1~}
        rope: cos of another row: {~row => (row / 2)~} * params.cos_strides.row
        rope: sin of another row: {~row => (row / 2)~} * params.sin_strides.row
        rope: first table for all: {~batch * params.cos_strides.batch => 0~}
        rope: first angle for all: {~pair * params.sin_strides.column => 0~}
        rope: first tail columns left out: {~destination[0] = source[0]; =>~}
        rope: last tail columns left out: c < {~min(column + UNIT_COLUMNS, head_dim) => column~}
        rope: tail columns not where they were: destination[1] = source[{~1 => 0~}]
        rope: tail columns rotated [race]: {~unit < params.pair_units => true~}
        rope: tail past the end [race]: {~min(column + UNIT_COLUMNS, head_dim) => column + 64~}
        rope: k by q's strides [out_of_bounds]: k_head * params.{~k_strides => q_strides~}.head
        rope: k's result by q's [race]:
            k_out_token + k_head * params.{~k_out_strides.head => q_out_strides.row~}
        rope: k left out: head < params.{~heads => q_heads~})
        rope: last head left out: head < params.heads{~=> - 1~})
        rope: token past the end [race]: {~token >= params.length || =>~}
    """,
    shared_heads: """
        rope: heads of a thread but one left out: h < {~HEADS => 1~}
        rope: heads past the last [race]: {~head < params.heads => true~})
    """,
    rows_outside: """
        rope: row outside read [out_of_bounds]: {~row >= 0 && row < params.table_rows => true~}
        rope: row before the first read [out_of_bounds]: {~row >= 0 && =>~}
        rope: row after the last read [out_of_bounds]: row {~< => <=~} params.table_rows
    """,
    all_tables: """
        rope_tables: sin for cos: precise::{~cos => sin~}(angle)
        rope_tables: sign of sin: precise::sin({~=> -~}angle)
        rope_tables: factor ignored: precise::sin(angle) {~* params.attention_factor =>~}
        rope_tables: fast cos: {~precise::cos(angle) => 1.0f - 0.5f * angle * angle~}
        rope_tables: first section for all: {~section * params.section_stride => 0~}
        rope_tables: first batch for all: {~batch * params.batch_stride => 0~}
        rope_tables: first position for all: {~token * params.token_stride => 0~}
        rope_tables: first frequency for all: {~column * params.inv_freq_stride => 0~}
        rope_tables: column past the end [out_of_bounds]: {~column >= params.columns || =>~}
    """,
}

test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(MUTANTS)
