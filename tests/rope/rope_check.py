"""What the tests of rope share: problems, layouts, and the judge that holds the ops to float64."""

import math

import torch

from torch_metal_attn.reference import rotate
from torch_metal_attn.testing.judge import near, normal, on, worst_of

rope, rope_ = torch.ops.metal_attn.rope, torch.ops.metal_attn.rope_

LAYOUTS = {
    "length batch head": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "last stride 2": lambda x: torch.stack([x, x * math.nan], -1).flatten(-2)[..., ::2],
    "cut out of NaN": lambda x: torch.nn.functional.pad(x, (4, 4, 1, 2, 1, 0), value=math.nan)[
        :, 1:, 1:-2, 4:-4
    ],
    "one element off": lambda x: torch.nn.functional.pad(x, (1, 0), value=math.nan)[..., 1:],
}


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
    rows, pairs = rows_of(x, **options), cos.shape[-1]
    rotation = torch.complex(gathered(cos, rows).double(), gathered(sin, rows).double())
    rotation = rotation.conj() if options.get("conjugate") else rotation
    parts, rest = x.double().tensor_split([2 * pairs], dim=-1)
    interleaved = options.get("interleaved")
    parts = parts.unflatten(-1, (pairs, 2)) if interleaved else parts.unflatten(-1, (2, pairs)).mT
    rotated = torch.view_as_real(torch.view_as_complex(parts.contiguous()) * rotation)
    return torch.cat([(rotated if interleaved else rotated.mT).flatten(-2), rest], -1)


def check_close(out, x, cos, sin, **options):
    """Holds `out` to twice torch's error against float64; the columns behind R are equal."""
    assert out.dtype == x.dtype
    assert out.shape == x.shape
    if out.numel() == 0:
        return
    expected = oracle(x, cos, sin, **options)
    rows = rows_of(x, **options)
    tables = [gathered(table, rows)[:, 0].to(x.dtype) for table in (cos, sin)]
    tables[1] = -tables[1] if options.get("conjugate") else tables[1]
    own = rotate(x, *tables, options.get("interleaved", False)) if cos.shape[-1] else x
    measure = near("the rotated tensor", out, expected, worst_of([(own, expected)]))
    assert measure.ok, measure
    rest = slice(2 * cos.shape[-1], None)
    assert torch.equal(out[..., rest], x[..., rest])


def check_rope(q, k, cos, sin, *, device, **options):
    """Runs `rope` and `rope_` on `device`, holds both to the oracle, and returns rope's results."""
    on_device = on(device, options)
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
