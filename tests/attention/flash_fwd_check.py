"""Shared by the kernels' tests: problems as tensors, and ops held to twice torch's error."""

import math
from functools import partial

import torch

from torch_metal_attn import simulate
from torch_metal_attn.reference import attention
from torch_metal_attn.testing import Attention
from torch_metal_attn.testing.attention_problem import Problem
from torch_metal_attn.testing.attention_run import judge
from torch_metal_attn.testing.judge import ACCUMULATION, DTYPES, ROUNDING, near, near_statistic, on
from torch_metal_attn.testing.oracle import visible_keys

ops = torch.ops.metal_attn
# Dtypes of the inputs and of a bias, a mask or a sink: each once on both sides.
PAIRS_OF_DTYPES = list(zip(DTYPES, [*DTYPES[1:], DTYPES[0]], strict=True))


def make_qkv(
    batch=1,
    heads=2,
    kv_heads=None,
    q_length=33,
    kv_length=65,
    head_dim=32,
    v_head_dim=None,
    dtype=torch.float32,
    seed=0,
):
    """Normal q (B, H, Lq, D), k (B, Hkv, Lk, D), v (B, Hkv, Lk, Dv) on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    kv_heads = heads if kv_heads is None else kv_heads
    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    shapes = [
        (batch, heads, q_length, head_dim),
        (batch, kv_heads, kv_length, head_dim),
        (batch, kv_heads, kv_length, v_head_dim),
    ]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def rotary_tables(length, pairs, *, batch=None, dtype=torch.float32, seed=0):
    shape = (length, pairs) if batch is None else (batch, length, pairs)
    angles = 6.3 * torch.rand(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return angles.cos().to(dtype), angles.sin().to(dtype)


def random_mask(*shape, dtype=torch.bool, seed=3, hidden=0.4):
    """Bool, or additive with -inf where the bool one would be False."""
    generator = torch.Generator().manual_seed(seed)
    visible = torch.rand(shape, generator=generator) >= hidden
    if dtype == torch.bool:
        return visible
    return torch.randn(shape, generator=generator).to(dtype).masked_fill(~visible, -math.inf)


def hold(measures):
    wrong = [measure for measure in measures if not measure.ok]
    assert not wrong, wrong


def hold_results(out, lse, exact, exact_lse, error, options, kv_dtype):
    """`out` within twice torch's error of the oracle, `lse` within float32's rounding."""
    assert (lse.dtype, lse.shape) == (torch.float32, exact_lse.shape)
    # Rows that were rotated or dequantised are rounded to their dtype before the product.
    rounded = kv_dtype != out.dtype or any("rotary" in name for name in options)
    rounding = max(1e-5, 4 * ROUNDING[out.dtype] * rounded)
    hold([near("out", out, exact, error), near_statistic("softmax_lse", lse, exact_lse, rounding)])


def judged(q, k, v, results, options, packing=(), dout=None, dlse=None):
    """Measures of out, lse and gradients for these tensors, by the policy of docs/numerics.md."""
    sequences = zip(*(ends.diff().tolist() for ends in packing[:2]), strict=True)
    dense = {"batch": len(q), "q_length": q.shape[2], "kv_length": k.shape[2]}
    case = Attention(
        call="flash_varlen_bwd" if packing else "flash_bwd",
        dtype=str(q.dtype).removeprefix("torch."),
        heads=q.shape[1],
        kv_heads=k.shape[1],
        packed=tuple(sequences) if packing else (),
        rotary="".join(side for side in "qk" if f"{side}_rotary_cos" in options),
        format="" if k.dtype == q.dtype else "q8_0",  # rows that are rounded to q's dtype
        dropout_p=options.get("dropout_p", 0.0),
        backward=dout is not None,
        strict=True,
        **({} if packing else dense),
    )
    options = {"softmax_scale": None, "softcap": 0.0} | options
    problem = Problem(q, k, v, packing, options, [], {}, dout, dlse, None)
    return judge(case, problem, results)


def check_flash_decode(q, k, v, *, device, num_splits=0, **options):
    op = partial(ops.flash_decode, num_splits=num_splits)
    return check_flash_fwd(q, k, v, device=device, op=op, **options)


def check_flash_fwd(q, k, v, *packing, device, cache=None, op=None, **options):
    """Runs the op on `device` and holds it to twice torch's error against float64.

    packing: of packed sequences; torch's error is then that of each sequence alone.
    cache: the op's arguments for k and v, and the options of their storage.
    """
    keys, values, where = (k, v, {}) if cache is None else cache
    arguments = on(device, dict(enumerate((q, keys, values, *packing)))).values()
    op = op or (ops.flash_varlen_fwd if packing else ops.flash_fwd)
    out, lse = (x.cpu() for x in op(*arguments, **on(device, options | where)))
    hold(judged(q, k, v, (out, lse), options, packing))
    if not packing:
        assert (out[~visible_keys(q, k, options).any(-1)] == 0).all()
    return out, lse


def check_large_sinks(q, k, v, *, device, op=ops.flash_fwd, **options):
    """Sinks with nearly all weight, whose products with log2(e) round off a millionth of it."""
    operands = [q.zero_(), k, v.fill_(1.0)]
    options["learnable_sink"] = torch.tensor([29.97, 31.03, 26.9, 30.5])
    out, _ = op(*(x.to(device) for x in operands), **on(device, options))
    exact, _ = attention(*operands, **options, compute_dtype=torch.float64)
    assert ((out.cpu().double() - exact).abs() <= ACCUMULATION * exact).all()


def check_either_precision(run):
    """The bits are the same if the GPU truncates float operands or rounds them."""
    results = []
    for mode in ("truncate", "round"):
        with simulate(check=True, relaxed_precision=mode):
            results.append(run())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def pack(sequences):
    """Sequences of (B=1, H, L, D) tensors as (T, H, D), with cu_seqlens and the longest length."""
    lengths = [sequence.shape[2] for sequence in sequences]
    packed = torch.cat([sequence[0].transpose(0, 1) for sequence in sequences])
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    return packed, cu_seqlens, max(lengths)


def unpacked(q, k, v, packing):
    """Each sequence's tensors, (1, H, L, D); q may be any tensors that have its rows."""
    ends = [packing[0].tolist(), packing[1].tolist()]
    for b in range(len(ends[0]) - 1):
        rows, keys = (slice(of[b], of[b + 1]) for of in ends)
        yield (
            *(x[None, rows].transpose(1, 2) for x in q),
            *(x[None, keys].transpose(1, 2) for x in (k, v)),
        )


def make_packed(q_lengths, kv_lengths, **shape):
    """q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k of normal data."""
    sequences = [
        make_qkv(q_length=q_length, kv_length=kv_length, seed=seed, **shape)
        for seed, (q_length, kv_length) in enumerate(zip(q_lengths, kv_lengths, strict=True))
    ]
    (q, ends_q, longest_q), (k, ends_k, longest_k), (v, *_) = map(
        pack, zip(*sequences, strict=True)
    )
    return q, k, v, ends_q, ends_k, longest_q, longest_k
