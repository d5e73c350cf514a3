"""Shared by the kernel's tests: problems, and the comparison of ops with torch's error."""

import math
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

from torch_metal_attn.reference import attention, rotate, varlen_attention
from torch_metal_attn.testing.judge import ROUNDING
from torch_metal_attn.testing.tf32 import as_multiplied, tf32_rounding

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Of the inputs, and of a bias, a mask or a sink: each dtype once on both sides.
PAIRS_OF_DTYPES = list(zip(DTYPES, [*DTYPES[1:], DTYPES[0]], strict=True))
# Unit roundoff of the output's dtype.
# Rounding of float32 accumulation, relative to the largest output: torch's own error can be exactly
# zero on small inputs.
ACCUMULATION = 2**-21


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


def visible_keys(q, k, options):
    """Bool (B, Hq, Lq, Lk): query i sees key j. Written out apart from the reference's rules."""
    (batch, heads, q_length, _), kv_length = q.shape, k.shape[2]
    lengths = per_sequence(options.get("seqused_k"), batch, kv_length)
    first_keys = per_sequence(options.get("leftpad_k"), batch, 0)
    mask = options.get("attn_mask")
    left, right = options.get("window_size_left", -1), options.get("window_size_right", -1)
    chunk, offset = options.get("attention_chunk", 0), options.get("q_offset")
    visible = torch.zeros(batch, heads, q_length, kv_length, dtype=torch.bool)
    for b, (length, first) in enumerate(zip(lengths, first_keys, strict=True)):
        for i in range(q_length):
            position = i + (length - q_length if offset is None else offset)
            start = max(first, position - left) if left >= 0 else first
            stop = min(length, position + right + 1) if right >= 0 else length
            if options.get("causal", False):
                stop = min(stop, position + 1)
            if chunk:
                chunk_start = first + (position - first) // chunk * chunk
                start, stop = max(start, chunk_start), min(stop, chunk_start + chunk)
            visible[b, :, i, max(start, 0) : max(stop, 0)] = True
    if mask is not None and mask.dtype == torch.bool:
        visible &= mask
    return visible


def per_sequence(values, batch, otherwise):
    return [otherwise] * batch if values is None else values.tolist()


def torch_error(q, k, v, options):
    """Largest error of torch's own attention in the inputs' dtype, over rows that see a key.

    It has visibility and scale only: biases, caps and sinks are left out of its problem, which is
    otherwise the same. `composed_error` has them.
    """
    visible = visible_keys(q, k, options)
    sees_any = visible.any(-1)
    if not sees_any.any():
        return 0.0
    scale = options.get("softmax_scale")
    exact = [tensor.double().nan_to_num() for tensor in (q, k, v)]
    rounded = [tensor.nan_to_num().to(q.dtype) for tensor in (q, k, v)]
    for i, side in enumerate("qk"):
        if options.get(f"{side}_rotary_cos") is not None:
            tables = options[f"{side}_rotary_cos"], options[f"{side}_rotary_sin"]
            interleaved = options.get("rotary_interleaved", False)
            exact[i] = rotate(exact[i], *tables, interleaved)
            rounded[i] = rotate(rounded[i].float(), *tables, interleaved).to(q.dtype)
    oracle, _ = attention(*exact, softmax_scale=scale, attn_mask=visible)
    with as_multiplied():
        out = torch_sdpa(*rounded, attn_mask=visible, scale=scale, enable_gqa=True)
    return (out.double() - oracle)[sees_any].abs().max().item()


def composed_error(composed, oracle):
    """Largest error of the same attention composed of torch's operations on float32."""
    if composed.numel() == 0:
        return 0.0
    return (composed.double() - oracle).nan_to_num().abs().max().item()


def operand_rounding(dtype, rounded=True):
    """Unit roundoff of what a product takes; 0 if that is rows which were not rounded."""
    return max(ROUNDING[dtype] if rounded else 0.0, tf32_rounding(dtype))


def on(device, options):
    return {
        name: value.to(device) if torch.is_tensor(value) else value
        for name, value in options.items()
    }


def assert_close_to_oracle(out, lse, oracle, oracle_lse, error, options, kv_dtype):
    """`out` within twice torch's error of the oracle, `lse` within float32's rounding.

    Rows that were rotated or dequantised are rounded to their dtype before the product, and all
    rows to TF32's bits if that is allowed.
    """
    rounded = kv_dtype != out.dtype or any("rotary" in name for name in options)
    rounding = max(1e-5, 4 * operand_rounding(out.dtype, rounded))
    if out.numel() == 0:
        return
    slack = ROUNDING[out.dtype] * oracle.abs() + ACCUMULATION * oracle.abs().max()
    assert ((out.double() - oracle).abs() <= 2 * error + slack).all()
    hidden = oracle_lse == -math.inf
    assert (lse[hidden] == -math.inf).all()
    torch.testing.assert_close(
        lse[~hidden].double(), oracle_lse[~hidden].double(), rtol=rounding, atol=rounding
    )


def check_flash_decode(q, k, v, *, device, num_splits=0, **options):
    """`check_flash_fwd` of flash_decode."""
    op = partial(torch.ops.metal_attn.flash_decode, num_splits=num_splits)
    return check_flash_fwd(q, k, v, device=device, op=op, **options)


def check_flash_fwd(q, k, v, *, device, cache=None, op=torch.ops.metal_attn.flash_fwd, **options):
    """Runs the op on `device` and holds it to twice torch's error against float64.

    cache: what the op is given for k and v, and the options that tell how they are kept there.
    """
    keys, values, where = (k, v, {}) if cache is None else cache
    out, lse = op(q.to(device), keys.to(device), values.to(device), **on(device, options | where))
    out, lse = out.cpu(), lse.cpu()
    oracle, oracle_lse = attention(q, k, v, **options, compute_dtype=torch.float64)
    assert out.dtype == q.dtype
    assert out.shape == (*q.shape[:3], v.shape[3])
    assert lse.dtype == torch.float32
    assert lse.shape == q.shape[:3]
    with as_multiplied():
        composed, _ = attention(q, k, v, **options)
    error = max(torch_error(q, k, v, options), composed_error(composed, oracle))
    assert_close_to_oracle(out, lse, oracle, oracle_lse, error, options, k.dtype)
    assert (out[~visible_keys(q, k, options).any(-1)] == 0).all()
    return out, lse


def check_large_sinks(q, k, v, *, device, op=torch.ops.metal_attn.flash_fwd, **options):
    """Keys that are alike, beside sinks that have nearly all weight: each share is exact.

    The products of these sinks with log2(e) round off a millionth of a share.
    """
    operands = [q.zero_(), k, v.fill_(1.0)]
    options["learnable_sink"] = torch.tensor([29.97, 31.03, 26.9, 30.5])
    out, _ = op(*(x.to(device) for x in operands), **on(device, options))
    oracle, _ = attention(*operands, **options, compute_dtype=torch.float64)
    assert ((out.cpu().double() - oracle).abs() <= ACCUMULATION * oracle).all()


def pack(sequences):
    """Sequences of (B=1, H, L, D) tensors as (T, H, D), with cu_seqlens and the longest length."""
    lengths = [sequence.shape[2] for sequence in sequences]
    packed = torch.cat([sequence[0].transpose(0, 1) for sequence in sequences])
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    return packed, cu_seqlens, max(lengths)


def make_packed(q_lengths, kv_lengths, **shape):
    """q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k of normal data."""
    sequences = [
        make_qkv(q_length=q_length, kv_length=kv_length, seed=seed, **shape)
        for seed, (q_length, kv_length) in enumerate(zip(q_lengths, kv_lengths, strict=True))
    ]
    q, cu_seqlens_q, max_seqlen_q = pack([q for q, _, _ in sequences])
    k, cu_seqlens_k, max_seqlen_k = pack([k for _, k, _ in sequences])
    v, _, _ = pack([v for _, _, v in sequences])
    return q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k


def check_flash_varlen_fwd(q, k, v, *packing, device, cache=None, **options):
    """`check_flash_fwd` for packed sequences; torch's error is that of each sequence alone."""
    keys, values, where = (k, v, {}) if cache is None else cache
    arguments = (q, keys, values, *packing)
    out, lse = torch.ops.metal_attn.flash_varlen_fwd(
        *(value.to(device) if torch.is_tensor(value) else value for value in arguments),
        **on(device, options | where),
    )
    out, lse = out.cpu(), lse.cpu()
    oracle, oracle_lse = varlen_attention(q, k, v, *packing, **options, compute_dtype=torch.float64)
    assert out.dtype == q.dtype
    assert out.shape == (*q.shape[:2], v.shape[2])
    assert lse.dtype == torch.float32
    assert lse.shape == (q.shape[1], q.shape[0])
    q_ends, k_ends = packing[0].tolist(), packing[1].tolist()
    plain = {name: options[name] for name in ("softmax_scale",) if name in options}
    error = max(
        (
            torch_error(
                q[None, q_ends[b] : q_ends[b + 1]].transpose(1, 2),
                k[None, k_ends[b] : k_ends[b + 1]].transpose(1, 2),
                v[None, k_ends[b] : k_ends[b + 1]].transpose(1, 2),
                plain,
            )
            for b in range(len(q_ends) - 1)
        ),
        default=0.0,
    )
    with as_multiplied():
        composed, _ = varlen_attention(q, k, v, *packing, **options)
    error = max(error, composed_error(composed, oracle))
    assert_close_to_oracle(out, lse, oracle, oracle_lse, error, options, k.dtype)
    return out, lse
