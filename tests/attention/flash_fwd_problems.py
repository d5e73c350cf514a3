"""Small problems, one or two features each, that show a fault in what they exercise."""

import math

import torch

from tests.attention.flash_fwd_check import (
    check_flash_fwd,
    check_flash_varlen_fwd,
    check_large_sinks,
    make_packed,
    make_qkv,
)
from tests.attention.flash_fwd_options import ints, random_mask, rotary_tables
from tests.cache.kv_caches import in_pages, paged, quantised, with_nan_tails

# GQA, two query tiles or more, partial blocks of keys, a diagonal off the corner.
SHAPE = {"batch": 2, "heads": 4, "kv_heads": 2, "q_length": 77, "kv_length": 101, "head_dim": 16}


def dense(device, dtype=torch.float16, shape=None, **options):
    q, k, v = make_qkv(**SHAPE | (shape or {}), dtype=dtype)
    check_flash_fwd(q, k, v, **options, device=device)


def plain(device, dtype=torch.float16):
    shape = {"batch": 1, "head_dim": 64}
    dense(device, dtype, shape, causal=True, q_offset=30)


def windows(device):
    for left, right, q_offset in ((20, 13, None), (30, 45, None), (20, 13, 5)):
        dense(device, window_size_left=left, window_size_right=right, q_offset=q_offset)


def chunks(device):
    """Chunks that begin behind the padding, and queries before the first of them."""
    chunk = {"attention_chunk": 21, "leftpad_k": ints(7, 40)}
    dense(device, **chunk)
    dense(device, **chunk, causal=True, q_offset=0)


def lengths(device):
    """Lengths, with NaN in the memory of keys that do not exist."""
    q, k, v = make_qkv(**SHAPE, dtype=torch.float16)
    for b, (first, end) in enumerate([(5, 90), (35, 50)]):
        for tensor in (k, v):
            tensor[b, :, :first] = math.nan
            tensor[b, :, end:] = math.nan
    options = {"seqused_k": ints(90, 50), "leftpad_k": ints(5, 35)}
    check_flash_fwd(q, k, v, **options, device=device)


def masks(device):
    """Masks with any strides, and with an even width, which is read in pairs."""
    mask = random_mask(101, 2, 77, 4).permute(1, 3, 2, 0)
    dense(device, attn_mask=mask)
    dense(device, shape={"kv_length": 100}, attn_mask=random_mask(2, 4, 77, 100))
    dense(device, shape={"kv_length": 101}, attn_mask=random_mask(2, 4, 77, 101))


def biases(device):
    bias = 3 * torch.randn(2, 4, 77, 101, generator=torch.Generator().manual_seed(0))
    dense(device, attn_bias=bias)
    dense(device, shape={"kv_length": 100}, attn_mask=bias[..., :100].contiguous().half())


def softcap(device):
    dense(device, softcap=1.5, softmax_scale=0.5)


def alibi(device):
    slopes = torch.rand(2, 4, generator=torch.Generator().manual_seed(0)) / 4
    for q_offset in (None, 60):
        dense(device, torch.float32, alibi_slopes=slopes, q_offset=q_offset)


def sinks(device):
    sink = torch.tensor([3.0, 1.0, -1.0, 5.0])
    dense(device, torch.float32, learnable_sink=sink, causal=True, q_offset=-2)


def large_sinks(device):
    check_large_sinks(*make_qkv(**SHAPE), causal=True, q_offset=-2, device=device)


# Interleaved or not, and pairs of columns: wide and narrow loads.
TABLES = ((False, 4), (True, 4), (False, 7), (True, 7), (False, 8), (True, 8))


def rotary(device, dtype=torch.float32, tables=TABLES):
    """Both pairings, tables of each sequence, columns that stay."""
    for interleaved, pairs in tables:
        options = {"rotary_interleaved": interleaved}
        for seed, (side, length) in enumerate((("q", 77), ("k", 101))):
            cos, sin = rotary_tables(length, pairs, batch=2, seed=seed)
            options |= {f"{side}_rotary_cos": cos, f"{side}_rotary_sin": sin}
        # Where a fragment has columns of one half alone, another one stays.
        shape = {"head_dim": 24} if pairs == 8 and not interleaved else {}
        dense(device, dtype, shape=shape, **options)


def slices_of_v(device):
    dense(device, shape={"batch": 1, "v_head_dim": 264}, causal=True)


def shared_rows(device):
    """Two SIMD groups have half of the columns each."""
    dense(device, shape={"batch": 1, "head_dim": 208}, causal=True)


def odd_head_dims(device, dtype=torch.float16):
    """Rows with NaN behind each, and behind the last a row of NaN; q also rotated."""
    tensors = []
    for tensor in make_qkv(**SHAPE | {"head_dim": 11, "v_head_dim": 5}, dtype=dtype):
        batch, heads, length, head_dim = tensor.shape
        rows = torch.full((batch, heads, length + 1, head_dim + 3), math.nan, dtype=dtype)
        rows[:, :, :length, :head_dim] = tensor
        tensors.append(rows[:, :, :length, :head_dim])
    cos, sin = rotary_tables(77, 4)
    for options in ({}, {"q_rotary_cos": cos, "q_rotary_sin": sin}):
        check_flash_fwd(*tensors, **options, device=device)


def packed(device, dtype=torch.float16):
    """Packed sequences, one of them empty, spare rows, and options that count from a first row."""
    q, k, v, *packing = make_packed(
        [40, 0, 77], [50, 3, 64], heads=4, kv_heads=2, head_dim=16, dtype=dtype
    )
    q = torch.cat([q, q[:9]])
    options = {"attn_mask": random_mask(3, 1, 77, 64), "window_size_left": 40, "causal": True}
    for side, length in (("q", 77), ("k", 64)):
        cos, sin = rotary_tables(length, 4)
        options |= {f"{side}_rotary_cos": cos, f"{side}_rotary_sin": sin}
    check_flash_varlen_fwd(q, k, v, *packing, **options, device=device)


def pages(device):
    """Pages of 3 keys, so that a sequence has more than a SIMD group holds; k is rotated."""
    lengths = [31, 300]
    q, k, v = make_qkv(**SHAPE | {"q_length": 20, "kv_length": 320}, dtype=torch.float16)
    k, v = (with_nan_tails(x, lengths) for x in (k, v))
    *caches, where = paged(k, v, lengths, 3)
    capacity = where["block_table"].shape[1] * 3
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, capacity - 320)) for x in (k, v))
    cos, sin = rotary_tables(capacity, 8)
    options = {"seqused_k": ints(*lengths), "k_rotary_cos": cos, "k_rotary_sin": sin}
    check_flash_fwd(q, k, v, cache=(*caches, where), device=device, **options)


def pages_of_packed(device, dtype=torch.float32):
    """Packed sequences in pages, with windows, so that walks begin after the first pages."""
    lengths = [50, 300]
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 16}
    q, k, v, *packing = make_packed([40, 77], lengths, **shape, dtype=dtype)
    dense = torch.full((2, 2, 2, 300, 16), math.nan, dtype=dtype)
    for whole, x in zip(dense, (k, v), strict=True):
        for b, part in enumerate(x.split(lengths)):
            whole[b, :, : lengths[b]] = part.transpose(0, 1)
    cache = paged(*dense, lengths, 24)
    check_flash_varlen_fwd(
        q, k, v, *packing, cache=cache, device=device, causal=True, window_size_left=30
    )


def indices(device):
    q, k, v = make_qkv(**SHAPE, dtype=torch.float16)
    cache = k.flip(0), v.flip(0), {"cache_batch_idx": ints(1, 0)}
    check_flash_fwd(q, k, v, cache=cache, device=device)


def formats(device, dtype=torch.float16):
    """In pages, with scales that differ by block, head and sequence; of odd rows in fp8."""
    lengths = [90, 50]
    for kv_format, columns in (("q8_0", 64), ("q4_0", 64), ("fp8_e4m3", 11), ("q3_g32", 64)):
        shape = SHAPE | {"q_length": 20, "kv_length": 90, "head_dim": columns}
        q, k, v = make_qkv(**shape, dtype=dtype)
        k[..., :32] *= 4.0
        scale = torch.tensor([[0.5, 2.0], [1.0, 30.0]]) if kv_format == "fp8_e4m3" else None
        k, v = (with_nan_tails(x, lengths) for x in (k, v))
        k, v, cache = quantised(k, v, kv_format, scale=scale)
        cache = in_pages(cache, lengths, 16)
        check_flash_fwd(q, k, v, cache=cache, device=device, seqused_k=ints(*lengths))


def halves_of_words(device):
    """Float32 queries read 4 columns at a time, which are half of a word of codes."""
    q, k, v = make_qkv(**SHAPE | {"q_length": 20, "kv_length": 40, "head_dim": 64})
    k, v, cache = quantised(k, v, "q2_g64")
    check_flash_fwd(q, k, v, cache=cache, device=device)


def codes_of_fp8(device):
    """Every code as the value of one key, which comes out as it is."""
    data = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(16, 1, 1, 16)
    q, k, _ = make_qkv(batch=16, heads=1, q_length=1, kv_length=1, head_dim=16)
    out, _ = torch.ops.metal_attn.flash_fwd(
        *(x.to(device) for x in (q, k.to(torch.float8_e4m3fn), data))
    )
    torch.testing.assert_close(out.cpu(), data.float(), rtol=0.0, atol=0.0, equal_nan=True)
