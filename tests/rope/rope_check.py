"""Helpers for tests of rope: problems, layouts, and the check against float64."""

import math

import torch

from torch_metal_attn.reference import rotate
from torch_metal_attn.testing.judge import near, normal, on, worst_of

rope, rope_ = torch.ops.metal_attn.rope, torch.ops.metal_attn.rope_

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


def make_tables(rows, rotary_dim, batch=None):
    """cos and sin of random angles, (rows, R / 2), or with a batch."""
    shape = (rows,) if batch is None else (batch, rows)
    angles = 3 * normal(*shape, rotary_dim // 2, seed=7)
    return angles.cos(), angles.sin()


def make_problem(
    batch=2,
    heads=4,
    kv_heads=2,
    length=9,
    head_dim=16,
    rotary_dim=None,
    dtype=torch.float32,
    rows=None,
):
    rotary_dim = head_dim // 2 * 2 if rotary_dim is None else rotary_dim
    q = normal(batch, heads, length, head_dim, dtype=dtype)
    k = normal(batch, kv_heads, length, head_dim, dtype=dtype, seed=1)
    return q, k, *make_tables(rows or length + 4, rotary_dim)


def rows_of(q, positions=None, seqlen_offset=0, seqlen_offsets=None, **_):
    batch, length = q.shape[0], q.shape[2]
    if positions is not None:
        return positions.long().expand(batch, length)
    first = torch.zeros(batch, 1, dtype=torch.int64) + seqlen_offset
    if seqlen_offsets is not None:
        first = first + seqlen_offsets.long()[:, None]
    return first + torch.arange(length)


def tables_of(x, cos, sin, dtype, **options):
    """cos and sin of each token of x, (B, L, R / 2)."""
    rows = rows_of(x, **options)
    batch = torch.arange(rows.shape[0])[:, None]
    cos, sin = (
        (t.expand(len(rows), *t.shape[1:])[batch, rows] if t.dim() == 3 else t[rows]).to(dtype)
        for t in (cos, sin)
    )
    return cos, -sin if options.get("conjugate") else sin


def oracle(x, cos, sin, **options):
    if not cos.shape[-1]:
        return x.double()
    tables = tables_of(x, cos, sin, torch.float64, **options)
    return rotate(x.double(), *tables, options.get("interleaved", False))


def check_close(out, x, cos, sin, **options):
    """Checks that `out` has at most twice torch's error. Columns after R must be equal."""
    assert (out.dtype, out.shape) == (x.dtype, x.shape)
    if out.numel() == 0:
        return
    expected = oracle(x, cos, sin, **options)
    tables = tables_of(x, cos, sin, x.dtype, **options)
    in_torch = rotate(x, *tables, options.get("interleaved", False)) if cos.shape[-1] else x
    measure = near("the rotated tensor", out, expected, worst_of([(in_torch, expected)]))
    assert measure.ok, measure
    rest = slice(2 * cos.shape[-1], None)
    assert torch.equal(out[..., rest], x[..., rest])


def check_rope(q, k, cos, sin, *, device, **options):
    """Runs `rope` and `rope_` on `device`, and checks both."""
    on_device = on(device, options)
    q_here, k_here, *tables = (x.to(device, copy=True) for x in (q, k, cos, sin))
    outs = rope(q_here, k_here, *tables, **on_device)
    assert rope_(q_here, k_here, *tables, **on_device) is None
    for x, out, in_place in zip((q, k), outs, (q_here, k_here), strict=True):
        check_close(out.cpu(), x, cos, sin, **options)
        assert torch.equal(in_place, out)
