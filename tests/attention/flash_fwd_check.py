"""Helpers for tests of the kernels: random inputs, and checks that allow twice torch's error."""

import math
from functools import partial

import torch

from torch_metal_attn import simulate
from torch_metal_attn.reference import attention
from torch_metal_attn.testing import Attention
from torch_metal_attn.testing.attention_problem import Problem
from torch_metal_attn.testing.attention_run import judge
from torch_metal_attn.testing.judge import ACCUMULATION, DTYPES, on
from torch_metal_attn.testing.oracle import visible_keys

ops = torch.ops.metal_attn
# Pairs of different dtypes, for the inputs and for a mask or a table.
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
    generator = torch.Generator().manual_seed(seed)
    angles = 6.3 * torch.rand(shape, generator=generator, dtype=torch.float64)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def random_mask(*shape, dtype=torch.bool, seed=3, hidden=0.4):
    """A bool mask, or an additive one with -inf where the bool mask is False."""
    generator = torch.Generator().manual_seed(seed)
    visible = torch.rand(shape, generator=generator) >= hidden
    if dtype == torch.bool:
        return visible
    return torch.randn(shape, generator=generator).to(dtype).masked_fill(~visible, -math.inf)


def hold(measures):
    wrong = [measure for measure in measures if not measure.ok]
    assert not wrong, wrong


def judged(q, k, v, results, options, packing=(), dout=None, dlse=None):
    """Measures out, lse and gradients by the policy of docs/numerics.md."""
    sequences = zip(*(ends.diff().tolist() for ends in packing[:2]), strict=True)
    dense = {"batch": len(q), "q_length": q.shape[2], "kv_length": k.shape[2]}
    case = Attention(
        call="flash_varlen_bwd" if packing else "flash_bwd",
        dtype=str(q.dtype).removeprefix("torch."),
        heads=q.shape[1],
        kv_heads=k.shape[1],
        packed=tuple(sequences) if packing else (),
        rotary="".join(side for side in "qk" if f"{side}_rotary_cos" in options),
        format="" if k.dtype == q.dtype else "q8_0",  # any format with rows rounded to q's dtype
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
    """Runs the op on `device`, checks its results against float64, and returns out and lse.

    packing: cu_seqlens and max_seqlens; torch's error is then measured for each sequence.
    cache: the op gets these (keys, values, options) instead of k and v, as for a paged cache.
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
    """Checks sinks with nearly all the weight, whose product with log2(e) is off by a millionth."""
    operands = [q.zero_(), k, v.fill_(1.0)]
    options["learnable_sink"] = torch.tensor([29.97, 31.03, 26.9, 30.5])
    out, _ = op(*(x.to(device) for x in operands), **on(device, options))
    exact, _ = attention(*operands, **options, compute_dtype=torch.float64)
    assert ((out.cpu().double() - exact).abs() <= ACCUMULATION * exact).all()


def check_either_precision(run):
    """Checks that a GPU that truncates float operands and one that rounds give the same bits."""
    results = []
    for mode in ("truncate", "round"):
        with simulate(check=True, relaxed_precision=mode):
            results.append(run())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def pack(sequences):
    """The operands of flash_varlen_fwd for sequences (q, k, v), each with a batch of 1."""
    q, k, v = zip(*sequences, strict=True)
    packed = [torch.cat([x[0].transpose(0, 1) for x in tensors]) for tensors in (q, k, v)]
    lengths = [[x.shape[2] for x in tensors] for tensors in (q, k)]
    cu_seqlens = [torch.tensor([0, *each]).cumsum(0).int() for each in lengths]
    return *packed, *cu_seqlens, *map(max, lengths)


def make_packed(q_lengths, kv_lengths, **shape):
    """Random q, k and v of sequences with these lengths, packed."""
    pairs = enumerate(zip(q_lengths, kv_lengths, strict=True))
    return pack(make_qkv(q_length=q, kv_length=k, seed=seed, **shape) for seed, (q, k) in pairs)
