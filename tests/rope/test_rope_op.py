"""`metal_attn::rope`, `rope_` and `rope_tables` against float64, on the best device."""

import itertools
import math

import pytest
import torch

from tests.helpers.judged import judge
from tests.helpers.mutants import mutant_tests
from tests.rope.rope_check import check_close, check_rope, make_problem, make_tables, oracle
from torch_metal_attn import rope as rope_functions
from torch_metal_attn import simulate
from torch_metal_attn.runtime import extension, session
from torch_metal_attn.testing import Rotation, Tables
from torch_metal_attn.testing.tensors import DTYPES as NAMES

rope, rope_ = torch.ops.metal_attn.rope, torch.ops.metal_attn.rope_
rope_tables = torch.ops.metal_attn.rope_tables

DEFAULT_SIZES = {"batch": 2, "heads": 4, "kv_heads": 2, "length": 9, "head_dim": 16, "columns": 16}
ODD = [(1, 0), (2, 2), (7, 6), (33, 2), (128, 0), (1023, 1022)]
LAYOUTS = [("order 021",), ("order 2013", "padded 4"), ("order 3012",), ("padded 4",)]
NEXT_DTYPE = dict(zip(NAMES, [*NAMES][1:] + [*NAMES][:1], strict=True))
PLACES = ("", "offset", "offsets", "positions", "positions of each")
# For each number of columns in a vector: the dtypes of rope without and with `interleaved`, and the
# cases. rope_ runs in the next dtype of NAMES.
VECTORS = {
    1: (
        ("float16", "float32"),
        [{"length": 3, "heads": 3, "head_dim": d, "columns": c} for d, c in ODD]
        + [{"head_dim": 24, "layout": ("padded 1",)}],
    ),
    2: (("bfloat16", "float16"), [{"head_dim": 24, "layout": ("padded 2",)}]),
    4: (
        ("float32", "bfloat16"),
        [{"length": 3, "head_dim": d, "columns": c} for d, c in ((8, 8), (80, 32), (96, 96))]
        + [{"head_dim": 24, "layout": layout} for layout in LAYOUTS],
    ),
}
CASES = {
    **{
        f"vectors of {vector} in {dtype}": [
            row | {"dtype": dtype, "interleaved": interleaved} for row in rows
        ]
        for vector, (dtypes, rows) in VECTORS.items()
        for interleaved, dtype in zip((False, True), dtypes, strict=True)
    },
    "lengths": [
        {"batch": 1, "length": length, "place": "offset"} for length in (1, 7, 31, 33, 65, 1023)
    ],
    # The heads of q and k that threads share are in one group, in separate groups or in several.
    "heads": [
        {"heads": heads, "kv_heads": kv_heads}
        for heads, kv_heads in ((1, 1), (4, 4), (9, 3), (16, 1), (1, 5))
    ],
    "forms": [
        {"conjugate": conjugate, "interleaved": interleaved, "columns": columns}
        | ({"dtype": "bfloat16"} if interleaved else {})
        for conjugate in (False, True)
        for interleaved in (False, True)
        for columns in (0, 16)
    ],
    "places": [
        {"batch": 3, "place": place, "tables_by_sequence": by_sequence}
        for place in PLACES
        for by_sequence in (False, True)
    ],
    "no k": [{"alone": True}],
    # A source kernel: docs/design/source-kernels.md.
    "apply_rope_qk_inplace": [
        {"heads": 8, "length": length, "head_dim": n, "columns": n, "dtype": dtype, "place": place}
        for length, n, place in itertools.product((64, 256), (64, 128), ("", "offset"))
        for dtype in NAMES
    ],
    "empty": [
        {name: 0, "place": place}
        for name in ("batch", "length", "heads", "kv_heads")
        for place in PLACES
    ],
}
NOT_IN_PLACE = {
    "expanded": [{"layout": (f"repeated {dim}",)} for dim in (0, 1)],
    "gradients": [{"backward": True, "place": place, "columns": 8} for place in PLACES],
}


@pytest.mark.parametrize("subject", CASES)
def test_values(subject, device):
    for fields in CASES[subject]:
        case = DEFAULT_SIZES | fields
        next_dtype = {"dtype": NEXT_DTYPE[fields["dtype"]]} if "dtype" in fields else {}
        judge(Rotation("rope", **case), Rotation("rope_", **case | next_dtype), device=device)


def test_every_pair_of_dtypes(device):
    for number, (dtype, table_dtype) in enumerate(itertools.product(NAMES, NAMES)):
        case = {"dtype": dtype, "table_dtype": table_dtype, "place": "offset"}
        call = ("rope", "rope_")[number % 2]
        judge(Rotation(call, **DEFAULT_SIZES | case), device=device)


@pytest.mark.parametrize("subject", NOT_IN_PLACE)
def test_values_that_are_not_in_place(subject, device):
    judge(*(Rotation(**DEFAULT_SIZES | fields) for fields in NOT_IN_PLACE[subject]), device=device)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions_and_offsets_may_have_any_strides(dtype, device):
    """Positions and offsets may have any strides."""
    q, k, cos, sin = make_problem(rows=40)

    whole = torch.randint(40, (18, 18), dtype=dtype)
    one_for_all = whole[:1, :1].expand(2, 9)
    for positions in (whole[0, :9], whole[:1, :9], whole[:9, :2].T, whole[:2, ::2], one_for_all):
        check_rope(q, k, cos, sin, positions=positions, device=device)
    offsets = whole[0, :4].int()[::2] % 20
    check_rope(q, k, cos, sin, seqlen_offset=4, seqlen_offsets=offsets, device=device)


def rows_outside():
    """On the GPU a row outside the tables gives NaN and is not read. No memory follows them."""
    q, k, cos, sin = make_problem(head_dim=20, rotary_dim=16, rows=9)
    for bad in (-1, 9, 2**20, 2**40, -(2**63)):
        positions = torch.arange(9).repeat(2, 1)
        positions[1, 5] = bad
        with session.raising():
            outs = torch.ops.metal_attn_simulator.rope(q, k, cos, sin, positions=positions)
        positions[1, 5] = 5
        for x, out in zip((q, k), outs, strict=True):
            assert out[1, :, 5, :16].isnan().all()
            assert torch.equal(out[1, :, 5, 16:], x[1, :, 5, 16:])
            out[1, :, 5] = oracle(x, cos, sin, positions=positions)[1, :, 5].float()
            check_close(out, x, cos, sin, positions=positions)


class TestRowsOutside:
    def test_a_row_outside_is_nan_on_the_gpu(self):
        with simulate(check=True):
            rows_outside()

    @pytest.mark.parametrize("bad", [-1, 5, 2**31 - 1, -(2**31)])
    def test_an_offset_outside_is_nan_on_the_gpu(self, bad):
        q, k, cos, sin = make_problem(rows=9)
        offsets = torch.tensor([bad, 0], dtype=torch.int32)
        with simulate(check=True):
            out, _ = torch.ops.metal_attn_simulator.rope(q, k, cos, sin, seqlen_offsets=offsets)
        outside = ~torch.isin(torch.arange(9) + bad, torch.arange(9))
        assert out[0][:, outside].isnan().all()
        assert out[0][:, ~outside].isfinite().all()
        check_close(out[1:], q[1:], cos, sin)

    @pytest.mark.parametrize("simulated", [False, True])
    @pytest.mark.parametrize("op", [rope, rope_])
    @pytest.mark.parametrize(
        "options, message",
        [
            ({"positions": torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 13])}, "positions .* 0 to 13 of"),
            ({"positions": torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, -1])}, "positions .* -1 to 7 of"),
            ({"seqlen_offsets": torch.tensor([0, 5]).int()}, "seqlen_offsets .* 0 to 13 .* 0..12"),
            ({"seqlen_offsets": torch.tensor([-2, 1]).int()}, "seqlen_offsets .* -2 to 9 of"),
        ],
    )
    def test_a_row_outside_is_refused_on_the_cpu(self, options, message, op, simulated):
        q, k, cos, sin = make_problem()
        before = q.clone()
        with simulate() if simulated else torch.no_grad(), pytest.raises(ValueError, match=message):
            op(q, k, cos, sin, **options)
        assert torch.equal(q, before)


def test_columns_after_r_keep_their_bits(device):
    """The bits include signalling NaN, denormals and -0. One row is rotated by NaN."""
    q, _, cos, sin = make_problem(head_dim=23, rotary_dim=8, dtype=torch.bfloat16)
    bits = torch.arange(2 * 4 * 9 * 15, dtype=torch.int16).view(2, 4, 9, 15) * 29 - 32000
    q[..., 8:] = bits.view(torch.bfloat16)
    cos[3] = math.nan
    out, _ = rope(q.to(device), None, cos.to(device), sin.to(device))
    assert torch.equal(out[..., 8:].cpu().view(torch.int16), bits)
    assert out[:, :, 3, :8].isnan().all()
    q = q.to(device)
    rope_(q, None, cos.to(device), sin.to(device))
    assert torch.equal(q[..., 8:].cpu().view(torch.int16), bits)


def test_nan_and_infinity_stay_in_their_pair(device):
    q, _, cos, sin = make_problem(head_dim=16)
    q[0, 1, 2, 3], q[1, 0, 4, 9] = math.nan, math.inf
    out = rope(q.to(device), None, cos.to(device), sin.to(device))[0].cpu()
    touched = torch.zeros_like(out, dtype=torch.bool)
    touched[0, 1, 2, [3, 11]] = True
    touched[1, 0, 4, [1, 9]] = True
    assert not out[touched].isfinite().any()
    assert out[~touched].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_tables_at_positions_of_each_dtype_and_stride(dtype, device):
    inv_freq = torch.stack([rope_functions.default(16)[0]] * 2, -1).flatten()[::2].to(device)
    positions = torch.arange(60, dtype=dtype, device=device).view(3, 4, 5)
    if dtype == torch.float32:
        positions = positions / 8
    expected = positions.cpu()[..., None].float() * inv_freq.cpu()
    permuted = positions.permute(2, 0, 1)
    for view, angles in ((positions, expected), (permuted, expected.permute(2, 0, 1, 3))):
        cos, sin = rope_tables(inv_freq, view)
        torch.testing.assert_close(cos.cpu(), angles.cos(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(sin.cpu(), angles.sin(), rtol=1e-6, atol=1e-6)
    assert rope_tables(inv_freq, positions[:0])[0].shape == (0, 4, 5, 8)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("length", [64, 2048])
def test_precompute_rope_tables(length, head_dim, device):
    judge(*(Tables(dtype=n, length=length, head_dim=head_dim) for n in NAMES), device=device)


def everything():
    """Tails are aligned or not, rows are chosen in every way, and strides of q and k differ."""
    sizes = {"length": 13, "rotary_dim": 16, "dtype": torch.float16}
    q, k, cos, sin = make_problem(heads=5, head_dim=43, **sizes)
    for options in (
        {"seqlen_offset": 3},
        {"seqlen_offset": 1, "seqlen_offsets": torch.tensor([2, 0], dtype=torch.int32)},
        {"positions": torch.arange(26).view(2, 13) % 17, "interleaved": True, "conjugate": True},
    ):
        check_rope(q, k, cos, sin, device="cpu", **options)
    q, k, _, _ = make_problem(heads=3, head_dim=48, **sizes)
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    for interleaved in (False, True):
        tables = make_tables(20, 16, batch=2)
        check_rope(q, k, *tables, seqlen_offset=7, interleaved=interleaved, device="cpu")


def shared_heads():
    """With many tokens a thread has several heads. The last group has fewer heads."""
    q, k, cos, sin = make_problem(heads=5, length=300, head_dim=128, rotary_dim=126)
    (explained,) = extension.launches(torch.ops.metal_attn_explain.rope(q, k, cos, sin))
    assert explained["defines"]["HEADS"] == "4"
    check_rope(q, k, cos, sin, device="cpu")


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
        rope: row next_dtype the last read [out_of_bounds]: row {~< => <=~} params.table_rows
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
