"""`metal_attn::rope`, `rope_` and `rope_tables` against float64, on the best device.

Without an Apple GPU the shader text runs in the simulator, with every check on.
"""

import json
import math
import mmap
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_metal_attn import rope as rope_functions
from torch_metal_attn import simulate

rope, rope_ = torch.ops.metal_attn.rope, torch.ops.metal_attn.rope_
rope_tables = torch.ops.metal_attn.rope_tables

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Unit roundoff of the output's dtype, and of the arithmetic, relative to the largest output.
ROUNDING = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}
ARITHMETIC = 2**-23


def normal(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def make_tables(rows, rotary_dim, dtype=torch.float32, batch=None):
    """cos and sin of angles that are no multiples of one another: (rows, R / 2) or with a batch."""
    shape = (rows,) if batch is None else (batch, rows)
    angles = 3 * normal(*shape, rotary_dim // 2, seed=7)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def make_problem(
    batch=2,
    heads=4,
    kv_heads=2,
    length=9,
    head_dim=16,
    rotary_dim=None,
    dtype=torch.float32,
    table_dtype=torch.float32,
    rows=None,
    seed=0,
):
    """q, k, cos and sin on the CPU."""
    rotary_dim = head_dim // 2 * 2 if rotary_dim is None else rotary_dim
    q = normal(batch, heads, length, head_dim, dtype=dtype, seed=seed)
    k = normal(batch, kv_heads, length, head_dim, dtype=dtype, seed=seed + 1)
    cos, sin = make_tables(length + 4 if rows is None else rows, rotary_dim, table_dtype)
    return q, k, cos, sin


def rows_of(q, positions=None, seqlen_offset=0, seqlen_offsets=None, **_):
    batch, length = q.shape[0], q.shape[2]
    if positions is not None:
        return positions.long().expand(batch, length)
    first = torch.zeros(batch, 1, dtype=torch.int64) + seqlen_offset
    if seqlen_offsets is not None:
        first = first + seqlen_offsets.long()[:, None]
    return first + torch.arange(length)


def gathered(table, rows):
    """(B, 1, L, R / 2)."""
    tables = table if table.dim() == 3 else table[None]
    tables = tables.expand(rows.shape[0], *tables.shape[1:])
    return torch.stack([one[row] for one, row in zip(tables, rows, strict=True)])[:, None]


def oracle(x, cos, sin, **options):
    """The definition, as a product of complex numbers, in float64."""
    rows = rows_of(x, **options)
    turn = torch.complex(gathered(cos, rows).double(), gathered(sin, rows).double())
    turn = turn.conj() if options.get("conjugate") else turn
    rotary_dim = 2 * cos.shape[-1]
    if options.get("interleaved"):
        first, second = x[..., 0:rotary_dim:2], x[..., 1:rotary_dim:2]
    else:
        first, second = x[..., :rotary_dim].double().tensor_split(2, dim=-1)
    turned = torch.complex(first.double(), second.double()) * turn
    out = x.double().clone()
    if options.get("interleaved"):
        out[..., 0:rotary_dim:2], out[..., 1:rotary_dim:2] = turned.real, turned.imag
    else:
        out[..., : rotary_dim // 2] = turned.real
        out[..., rotary_dim // 2 : rotary_dim] = turned.imag
    return out


def torch_rope(x, cos, sin, **options):
    """What models do in torch, in x's own dtype."""
    rows = rows_of(x, **options)
    cos, sin = gathered(cos, rows).to(x.dtype), gathered(sin, rows).to(x.dtype)
    sin = -sin if options.get("conjugate") else sin
    turned, rest = x[..., : 2 * cos.shape[-1]], x[..., 2 * cos.shape[-1] :]
    if options.get("interleaved"):
        partner = torch.stack((-turned[..., 1::2], turned[..., 0::2]), -1).flatten(-2)
        cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    else:
        first, second = turned.tensor_split(2, dim=-1)
        partner = torch.cat((-second, first), -1)
        cos, sin = cos.repeat(1, 1, 1, 2), sin.repeat(1, 1, 1, 2)
    return torch.cat((turned * cos + partner * sin, rest), -1)


def check_close(out, x, cos, sin, **options):
    """Holds `out` to twice torch's error against float64; the columns behind R are equal."""
    assert out.dtype == x.dtype
    assert out.shape == x.shape
    if out.numel() == 0:
        return
    expected = oracle(x, cos, sin, **options)
    bound = 2 * (torch_rope(x, cos, sin, **options).double() - expected).abs().max()
    slack = ROUNDING[x.dtype] * expected.abs() + ARITHMETIC * expected.abs().max()
    assert ((out.double() - expected).abs() <= bound + slack).all()
    rest = slice(2 * cos.shape[-1], None)
    assert torch.equal(out[..., rest], x[..., rest])


def to(device, options):
    return {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in options.items()}


def check_rope(q, k, cos, sin, *, device, **options):
    """Runs `rope` and `rope_` on `device`, holds both to the oracle, and returns rope's results."""
    on_device = to(device, options)
    inputs = [None if x is None else x.to(device) for x in (q, k, cos, sin)]
    q_out, k_out = rope(*inputs, **on_device)
    check_close(q_out.cpu(), q, cos, sin, **options)
    if k is None:
        assert k_out.shape == (0,)
    else:
        check_close(k_out.cpu(), k, cos, sin, **options)
    in_place = [None if x is None else x.clone() for x in inputs[:2]]
    assert rope_(*in_place, *inputs[2:], **on_device) is None
    assert torch.equal(in_place[0], q_out)
    assert k is None or torch.equal(in_place[1], k_out)
    return q_out, k_out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "head_dim, rotary_dim",
    [
        *((1, 0), (2, 2), (6, 4), (7, 6), (8, 8), (31, 30), (33, 2), (64, 64), (65, 16)),
        *((80, 32), (96, 96), (128, 128), (128, 0), (256, 64), (576, 64), (1023, 1022)),
    ],
)
def test_head_dims(head_dim, rotary_dim, dtype, interleaved, device):
    q, k, cos, sin = make_problem(
        length=3, head_dim=head_dim, rotary_dim=rotary_dim, dtype=dtype, heads=3, kv_heads=1
    )
    check_rope(q, k, cos, sin, interleaved=interleaved, device=device)


@pytest.mark.parametrize("table_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_of_the_tables(dtype, table_dtype, device):
    q, k, cos, sin = make_problem(dtype=dtype, table_dtype=table_dtype)
    check_rope(q, k, cos, sin, seqlen_offset=2, device=device)


@pytest.mark.parametrize("length", [1, 7, 31, 33, 65, 1023])
def test_lengths(length, device):
    q, k, cos, sin = make_problem(batch=1, length=length, dtype=torch.float16)
    check_rope(q, k, cos, sin, seqlen_offset=4, device=device)


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (4, 4), (9, 3), (16, 1), (1, 5), (0, 2)])
def test_heads(heads, kv_heads, device):
    """q's and k's heads in the same groups of heads a thread, in none and in several."""
    q, k, cos, sin = make_problem(heads=heads, kv_heads=kv_heads)
    check_rope(q, k, cos, sin, device=device)


def test_many_heads_a_thread(device):
    """Enough threads that heads are shared out: the tables are loaded once for several."""
    q, k, cos, sin = make_problem(batch=1, heads=17, kv_heads=3, length=1500, head_dim=64)
    explained = json.loads(torch.ops.metal_attn.rope_explain(q, k, cos, sin))
    assert explained["defines"]["HEADS"] == "3"
    check_rope(q, k, cos, sin, device=device)


@pytest.mark.parametrize("conjugate", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_turning_back(conjugate, interleaved, device):
    q, k, cos, sin = make_problem()
    options = {"interleaved": interleaved, "device": device}
    turned, _ = check_rope(q, k, cos, sin, conjugate=conjugate, **options)
    back, _ = check_rope(turned.cpu(), None, cos, sin, conjugate=not conjugate, **options)
    torch.testing.assert_close(back.cpu(), q, rtol=1e-5, atol=1e-5)


def test_relative_positions(device):
    """What rotary embeddings are for: products depend on the difference of positions only."""
    q, k, _, _ = make_problem(length=1, kv_heads=4, head_dim=64)
    inv_freq, _ = rope_functions.default(64)
    cos, sin = rope_functions.tables(inv_freq, 100)

    def product(q_position, k_position):
        (q_turned, _), (k_turned, _) = (
            rope(x.to(device), None, cos.to(device), sin.to(device), seqlen_offset=position)
            for x, position in ((q, q_position), (k, k_position))
        )
        return (q_turned * k_turned).sum(-1).cpu()

    torch.testing.assert_close(product(40, 33), product(7, 0), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(product(40, 33), product(8, 0), atol=0.1)


def positions_of(kind, batch, length, rows, dtype):
    generator = torch.Generator().manual_seed(3)

    def random(*shape):
        return torch.randint(0, rows, shape, generator=generator, dtype=dtype)

    return {
        "L": random(length),
        "1 L": random(1, length),
        "B L": random(batch, length),
        "transposed": random(length, batch).T,
        "every second": random(batch, 2 * length)[:, ::2],
        "one for all": random(1, 1).expand(batch, length),
    }[kind]


class TestPositions:
    KINDS = ("L", "1 L", "B L", "transposed", "every second", "one for all")

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    @pytest.mark.parametrize("kind", KINDS)
    def test_shapes(self, kind, dtype, device):
        q, k, cos, sin = make_problem(rows=40)
        positions = positions_of(kind, 2, 9, 40, dtype)
        check_rope(q, k, cos, sin, positions=positions, device=device)

    def test_offset_of_each_sequence(self, device):
        q, k, cos, sin = make_problem(batch=3, rows=40)
        for offsets in ([0, 31, 7], [5, 5, 0]):
            seqlen_offsets = torch.tensor(offsets, dtype=torch.int32)
            check_rope(q, k, cos, sin, seqlen_offsets=seqlen_offsets, device=device)
        offsets = torch.tensor([9, 0, -1, 0, 3, 0], dtype=torch.int32)[::2]
        check_rope(q, k, cos, sin, seqlen_offset=4, seqlen_offsets=offsets, device=device)

    @pytest.mark.parametrize("batch", [1, 2])
    def test_tables_of_each_sequence(self, batch, device):
        q, k, _, _ = make_problem()
        cos, sin = make_tables(30, 16, batch=batch)
        positions = positions_of("B L", 2, 9, 30, torch.int64)
        check_rope(q, k, cos, sin, device=device)
        check_rope(q, k, cos, sin, positions=positions, device=device)

    @pytest.mark.parametrize("bad", [-1, 13, 2**40, -(2**63)])
    def test_a_row_outside_is_nan_on_the_gpu(self, bad):
        """The kernel itself, in the simulator, which faults on an access outside."""
        q, k, cos, sin = make_problem(head_dim=20, rotary_dim=16)
        positions = torch.arange(9).repeat(2, 1)
        positions[1, 5] = bad
        with simulate(check=True):
            outs = torch.ops.metal_attn_simulator.rope(q, k, cos, sin, positions=positions)
        positions[1, 5] = 5
        for x, out in zip((q, k), outs, strict=True):
            assert out[1, :, 5, :16].isnan().all()
            assert torch.equal(out[1, :, 5, 16:], x[1, :, 5, 16:])
            out[1, :, 5] = oracle(x, cos, sin, positions=positions)[1, :, 5].float()
            check_close(out, x, cos, sin, positions=positions)

    @pytest.mark.parametrize("bad", [-1, 5, 2**31 - 1, -(2**31)])
    def test_an_offset_outside_is_nan_on_the_gpu(self, bad):
        q, k, cos, sin = make_problem(rows=9)
        offsets = torch.tensor([bad, 0], dtype=torch.int32)
        with simulate(check=True):
            out, _ = torch.ops.metal_attn_simulator.rope(q, k, cos, sin, seqlen_offsets=offsets)
        rows = torch.arange(9) + bad
        outside = (rows < 0) | (rows >= 9)
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
        ids=["beyond", "before", "offset beyond", "offset before"],
    )
    def test_a_row_outside_is_refused_on_the_cpu(self, options, message, op, simulated):
        q, k, cos, sin = make_problem()
        before = q.clone()
        with simulate() if simulated else torch.no_grad(), pytest.raises(ValueError, match=message):
            op(q, k, cos, sin, **options)
        assert torch.equal(q, before)


LAYOUTS = {
    "contiguous": lambda x: x,
    "batch length head": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "length batch head": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "last stride 2": lambda x: torch.stack([x, x * math.nan], -1).flatten(-2)[..., ::2],
    "columns first": lambda x: x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
    "cut out of NaN": lambda x: torch.nn.functional.pad(x, (4, 4, 1, 2, 1, 0), value=math.nan)[
        :, 1:, 1:-2, 4:-4
    ],
    "one element off": lambda x: torch.nn.functional.pad(x, (1, 0), value=math.nan)[..., 1:],
    "two elements off": lambda x: torch.nn.functional.pad(x, (2, 4), value=math.nan)[..., 2:-4],
}


class TestStrides:
    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_of_q_and_k(self, layout, dtype, interleaved, device):
        q, k, cos, sin = make_problem(head_dim=24, rotary_dim=16, dtype=dtype)
        on_device = [x.to(device) for x in (q, k, cos, sin)]
        expected = rope(*on_device, interleaved=interleaved)
        check_close(expected[0].cpu(), q, cos, sin, interleaved=interleaved)
        views = [LAYOUTS[layout](x) for x in on_device[:2]]
        results = rope(*views, *on_device[2:], interleaved=interleaved)
        rope_(*views, *on_device[2:], interleaved=interleaved)
        for view, result, value in zip(views, results, expected, strict=True):
            assert torch.equal(result, value)
            assert torch.equal(view, value)
            assert result.stride(-1) == 1

    @pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "columns first"])
    def test_of_the_tables(self, layout, device):
        q, k, _, _ = make_problem()
        cos, sin = make_tables(24, 16, batch=2)
        views = [LAYOUTS[layout](t[:, None])[:, 0].to(device) for t in (cos, sin)]
        results = rope(q.to(device), k.to(device), *views, seqlen_offset=3)
        for x, result in zip((q, k), results, strict=True):
            check_close(result.cpu(), x, cos, sin, seqlen_offset=3)

    def test_expanded(self, device):
        q, k, cos, sin = (x.to(device) for x in make_problem(batch=1, heads=1, kv_heads=1))
        wide_q, wide_k = q.expand(3, 4, -1, -1), k.expand(3, 2, -1, -1)
        wide_cos, wide_sin = (t.expand(3, -1, -1) for t in (cos, sin))
        expected = rope(q, k, cos, sin)
        for wide, one in zip(rope(wide_q, wide_k, wide_cos, wide_sin), expected, strict=True):
            assert torch.equal(wide, one.expand_as(wide))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_packed_projection_in_place(self, dtype, device):
        """q and k are parts of one tensor, as models have them; v and all else keep their bits."""
        packed = normal(2, 33, 6 + 2 + 2, 64, dtype=dtype).to(device)
        before = packed.cpu().clone()
        cos, sin = make_tables(40, 32)
        q, k = packed[:, :, :6].transpose(1, 2), packed[:, :, 6:8].transpose(1, 2)
        rope_(q, k, cos.to(device), sin.to(device), seqlen_offset=7)
        old_q, old_k = before[:, :, :6].transpose(1, 2), before[:, :, 6:8].transpose(1, 2)
        check_close(q.cpu(), old_q, cos, sin, seqlen_offset=7)
        check_close(k.cpu(), old_k, cos, sin, seqlen_offset=7)
        assert torch.equal(packed[:, :, 8:].cpu(), before[:, :, 8:])

    def test_layouts_of_packed_projections(self, device):
        """Each way in which q and k share a tensor without sharing an element."""
        cos, sin = (t.to(device) for t in make_tables(5, 8))
        packed = normal(2, 5, 6, 8).to(device)
        parts = {
            "k before q": (packed[:, :, 2:6], packed[:, :, :2]),
            "turn about": (packed[:, :, 0::2], packed[:, :, 1::2]),
            "one head of k": (packed[:, :, :5], packed[:, :, 5:]),
            "halves of a batch": (packed[:1], packed[1:]),
        }
        for name, (q, k) in parts.items():
            q, k = q.transpose(1, 2), k.transpose(1, 2)
            expected = rope(q, k, cos, sin)
            rope_(q, k, cos, sin)
            assert torch.equal(q, expected[0]), name
            assert torch.equal(k, expected[1]), name

    def test_more_than_2_to_31_elements(self):
        """Offsets beyond 32 bits, in sparse memory; without checks, which would copy it."""
        far = 2**31 + 64
        no_reserve = 0x4000 if sys.platform == "linux" else 0x40  # older Pythons have no name
        flags = mmap.MAP_PRIVATE | no_reserve
        with mmap.mmap(-1, 2 * (far + 4096), flags=flags) as memory:
            flat = torch.frombuffer(memory, dtype=torch.float16)
            values, k, cos, sin = make_problem(length=2, head_dim=8, dtype=torch.float16)
            for strides in ((far, 64, 8, 1), (64, far // 4, 8, 1), (64, 8, far, 1)):
                q = flat.as_strided(values.shape, strides)
                q.copy_(values)
                with simulate():
                    out, _ = rope(q, None, cos, sin)
                    check_close(out, values, cos, sin)
                    rope_(q, k, cos, sin)
                assert torch.equal(q, out)
                q.zero_()
            table = flat.as_strided((6, 4), (far // 8, 1))
            with simulate():
                table.copy_(cos.half())
                out, _ = rope(values, None, table, sin.half(), seqlen_offset=4)
                check_close(out, values, cos.half(), sin.half(), seqlen_offset=4)
            del q, table, flat


class TestInPlaceOverlap:
    @pytest.mark.parametrize(
        "q",
        [
            torch.zeros(1, 1, 5, 8).expand(2, 2, 5, 8),
            torch.zeros(2, 4, 1, 8).expand(2, 4, 5, 8),
            torch.zeros(2, 4, 5, 1).expand(2, 4, 5, 8),
            torch.zeros(400).as_strided((2, 4, 5, 8), (160, 40, 4, 1)),
            torch.zeros(400).as_strided((2, 4, 5, 8), (1, 40, 8, 1)),
        ],
        ids=["batch and heads", "length", "columns", "rows overlap", "batch steps by 1"],
    )
    def test_itself(self, q):
        cos, sin = make_tables(5, 8)
        with pytest.raises(ValueError, match=r"q has .* elements may share memory.*q\.clone\(\)"):
            rope_(q, None, cos, sin)

    def test_each_other(self, device):
        cos, sin = (t.to(device) for t in make_tables(5, 8))
        q = torch.zeros(2, 4, 5, 8, device=device)
        flat = torch.zeros(400, device=device)
        for k in (q, q[:, 1:], q[:, :1], q.transpose(0, 1)[1:3].transpose(0, 1)):
            with pytest.raises(ValueError, match="k may share elements with q"):
                rope_(q, k, cos, sin)
        a = flat.as_strided((1, 4, 5, 8), (160, 40, 8, 1))
        b = flat.as_strided((1, 4, 5, 8), (160, 40, 8, 1), 4)
        with pytest.raises(ValueError, match="k may share elements with q"):
            rope_(a, b, cos, sin)

    @pytest.mark.parametrize("name", ["cos", "sin", "positions", "seqlen_offsets"])
    def test_what_it_reads(self, name, device):
        q = torch.zeros(2, 4, 5, 8, device=device)
        cos, sin = (t.to(device) for t in make_tables(5, 8))
        inside = q.view(-1)[:20].view(5, 4)
        arguments = {"cos": cos, "sin": sin}
        if name in arguments:
            arguments[name] = inside
        elif name == "positions":
            arguments[name] = q.view(-1)[:5].view(torch.int32)
        else:
            arguments[name] = q.view(-1)[:2].view(torch.int32)
        with pytest.raises(ValueError, match=rf"{name} lies in the memory of q"):
            rope_(q, None, **arguments)


def test_columns_behind_r_keep_their_bits(device):
    """Signalling NaN, denormals and -0 too, in rows that are turned by NaN as well."""
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


class TestEmpty:
    @pytest.mark.parametrize(
        "shape",
        [{"batch": 0}, {"length": 0}, {"heads": 0}, {"kv_heads": 0}, {"heads": 0, "kv_heads": 0}],
        ids=str,
    )
    def test_of_q_and_k(self, shape, device):
        q, k, cos, sin = make_problem(**shape)
        check_rope(q, k, cos, sin, device=device)
        length = q.shape[2]
        for positions in (torch.arange(length), torch.zeros(q.shape[0], length).int()):
            check_rope(q, k, cos, sin, positions=positions, device=device)
        offsets = torch.zeros(q.shape[0], dtype=torch.int32)
        check_rope(q, k, cos, sin, seqlen_offsets=offsets, device=device)

    def test_of_the_tables(self, device):
        q, k, cos, sin = make_problem(length=0, rows=0)
        check_rope(q, k, cos, sin, device=device)
        q, k, _, _ = make_problem()
        cos, sin = make_tables(9, 0)
        check_rope(q, k, cos, sin, device=device)
        check_rope(q, k, cos, sin, interleaved=True, device=device)

    def test_no_k(self, device):
        q, _, cos, sin = make_problem(dtype=torch.float16)
        _, nothing = check_rope(q, None, cos, sin, device=device)
        assert (nothing.dtype, nothing.device.type) == (q.dtype, device.type)


@given(
    batch=st.integers(1, 3),
    heads=st.integers(1, 5),
    kv_heads=st.none() | st.integers(1, 3),
    length=st.integers(0, 40),
    head_dim=st.integers(1, 80),
    rotary=st.floats(0, 1),
    interleaved=st.booleans(),
    conjugate=st.booleans(),
    rows=st.sampled_from(["offset", "offsets", *TestPositions.KINDS]),
    table_batched=st.booleans(),
    layout=st.sampled_from(sorted(LAYOUTS)),
    dtype=st.sampled_from(DTYPES),
    table_dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
)
def test_any_problem(
    device,
    batch,
    heads,
    kv_heads,
    length,
    head_dim,
    rotary,
    interleaved,
    conjugate,
    rows,
    table_batched,
    layout,
    dtype,
    table_dtype,
    seed,
):
    rotary_dim = int(rotary * head_dim) // 2 * 2
    q = LAYOUTS[layout](normal(batch, heads, length, head_dim, dtype=dtype, seed=seed))
    k = None
    if kv_heads is not None:
        k = LAYOUTS[layout](normal(batch, kv_heads, length, head_dim, dtype=dtype, seed=seed + 1))
    table_rows = length + 1 + seed % 13
    cos, sin = make_tables(table_rows, rotary_dim, table_dtype, batch if table_batched else None)
    generator = torch.Generator().manual_seed(seed)
    spare = table_rows - length
    if rows == "offset":
        options = {"seqlen_offset": seed % (spare + 1)}
    elif rows == "offsets":
        offsets = torch.randint(0, spare + 1, (batch,), generator=generator, dtype=torch.int32)
        options = {"seqlen_offset": -3, "seqlen_offsets": offsets + 3}
    else:
        options = {"positions": positions_of(rows, batch, length, table_rows, torch.int64)}
    options |= {"interleaved": interleaved, "conjugate": conjugate}
    check_rope(q, k, cos, sin, device=device, **options)


def test_q_and_k_are_one_dispatch():
    q, k, cos, sin = make_problem()
    with simulate() as run:
        rope(q, k, cos, sin)
        rope_(q, k, cos, sin)
    assert [launch.kernel for launch in run.launches] == ["rope", "rope"]


def test_two_runs_give_the_same_bits(device):
    q, k, cos, sin = (x.to(device) for x in make_problem(dtype=torch.float16))
    first, second = rope(q, k, cos, sin), rope(q, k, cos, sin)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


class TestTables:
    @pytest.mark.parametrize("dtype", [None, *DTYPES])
    @pytest.mark.parametrize("shape", [(1,), (33,), (1, 65), (2, 9), (3, 2, 7), (0,), (2, 0)])
    def test_against_float64(self, shape, dtype, device):
        inv_freq, _ = rope_functions.default(48)
        positions = torch.randint(-50, 5000, shape, generator=torch.Generator().manual_seed(0))
        cos, sin = (
            t.cpu()
            for t in rope_tables(
                inv_freq.to(device), positions.to(device), attention_factor=1.3, dtype=dtype
            )
        )
        assert cos.dtype == sin.dtype == (dtype or torch.float32)
        assert cos.shape == sin.shape == (*shape, 24)
        assert cos.is_contiguous()
        angles = positions[..., None] * inv_freq.double()
        rounded = positions[..., None] * inv_freq  # where torch's own error comes from
        for table, function in ((cos, torch.cos), (sin, torch.sin)):
            expected = 1.3 * function(angles)
            own = (1.3 * function(rounded)).to(table.dtype)
            bound = 2 * (own - expected).abs().max() if own.numel() else 0
            slack = ROUNDING[table.dtype] * expected.abs() + ARITHMETIC
            assert ((table.double() - expected).abs() <= bound + slack).all()

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
    def test_positions_of_each_dtype_and_stride(self, dtype, device):
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

    def test_no_frequencies(self, device):
        inv_freq = torch.zeros(0, device=device)
        cos, sin = rope_tables(inv_freq, torch.arange(4, device=device))
        assert cos.shape == sin.shape == (4, 0)


# Kernels of the source documents, by name, at their shapes and through our ops.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("length", [64, 256])
def test_apply_rope_qk_inplace(length, head_dim, dtype, device):
    """q of 8 heads and k of 2, in place, with tables of a whole context; at an offset too."""
    inv_freq, factor = rope_functions.default(head_dim, 10000.0)
    cos, sin = rope_functions.tables(inv_freq, 512, attention_factor=factor)
    for offset in (0, 200):
        q = normal(1, 8, length, head_dim, dtype=dtype)
        k = normal(1, 2, length, head_dim, dtype=dtype, seed=1)
        turned_q, turned_k = q.to(device, copy=True), k.to(device, copy=True)
        rope_(turned_q, turned_k, cos.to(device), sin.to(device), seqlen_offset=offset)
        check_close(turned_q.cpu(), q, cos, sin, seqlen_offset=offset)
        check_close(turned_k.cpu(), k, cos, sin, seqlen_offset=offset)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("length", [64, 2048])
def test_precompute_rope_tables(length, head_dim, device):
    """cos and sin of every position below a length, base 10000, against float64."""
    inv_freq, _ = rope_functions.default(head_dim, 10000.0)
    cos, sin = rope_functions.tables(inv_freq.to(device), length)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angles = torch.arange(length, dtype=torch.float64)[:, None] * 10000.0**-exponents
    assert cos.shape == sin.shape == (length, head_dim // 2)
    own = (torch.arange(length)[:, None] * inv_freq).cos().double() - angles.cos()
    bound = 2 * own.abs().max() + ARITHMETIC
    assert (cos.cpu().double() - angles.cos()).abs().max() <= bound
    assert (sin.cpu().double() - angles.sin()).abs().max() <= bound
