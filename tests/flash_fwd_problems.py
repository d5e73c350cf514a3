"""Small problems, one or two features each, that show a fault in what they exercise."""

import math

import torch
from flash_fwd_check import (
    check_flash_fwd,
    check_flash_varlen_fwd,
    make_packed,
    make_qkv,
)
from flash_fwd_options import ints, random_mask, rotary_tables

# GQA, two query tiles or more, partial blocks of keys, a diagonal off the corner.
SHAPE = {"batch": 2, "heads": 4, "kv_heads": 2, "q_length": 77, "kv_length": 101, "head_dim": 16}


def dense(device, dtype=torch.float16, shape=None, **options):
    q, k, v = make_qkv(**SHAPE | (shape or {}), dtype=dtype)
    check_flash_fwd(q, k, v, **options, device=device)


def plain(device):
    shape = {"batch": 1, "head_dim": 64}
    dense(device, shape=shape, causal=True, q_offset=30)


def windows(device):
    for left, right, q_offset in ((20, 13, None), (30, 45, None), (20, 13, 5)):
        dense(device, window_size_left=left, window_size_right=right, q_offset=q_offset)


def chunks(device):
    """Chunks that begin behind the padding, and queries before the first of them."""
    chunk = {"attention_chunk": 21, "leftpad_k": ints(7, 40)}
    dense(device, **chunk)
    dense(device, **chunk, causal=True, q_offset=0)


def lengths(device):
    """With NaN in the memory of keys that do not exist."""
    q, k, v = make_qkv(**SHAPE, dtype=torch.float16)
    for b, (first, end) in enumerate([(5, 90), (35, 50)]):
        for tensor in (k, v):
            tensor[b, :, :first] = math.nan
            tensor[b, :, end:] = math.nan
    options = {"seqused_k": ints(90, 50), "leftpad_k": ints(5, 35)}
    check_flash_fwd(q, k, v, **options, device=device)


def masks(device):
    """Of any strides; of an even width, which is read in pairs."""
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


def rotary(device):
    """Both pairings, tables of each sequence, columns that stay, wide and narrow loads."""
    for interleaved, pairs in ((False, 4), (True, 4), (False, 7), (False, 8), (True, 8)):
        options = {"rotary_interleaved": interleaved}
        for seed, (side, length) in enumerate((("q", 77), ("k", 101))):
            cos, sin = rotary_tables(length, pairs, batch=2, seed=seed)
            options |= {f"{side}_rotary_cos": cos, f"{side}_rotary_sin": sin}
        dense(device, torch.float32, **options)


def slices_of_v(device):
    dense(device, shape={"batch": 1, "v_head_dim": 264}, causal=True)


def odd_head_dims(device):
    """Rows with NaN behind each, and behind the last a row of NaN."""
    tensors = []
    for tensor in make_qkv(**SHAPE | {"head_dim": 11, "v_head_dim": 5}, dtype=torch.float16):
        batch, heads, length, head_dim = tensor.shape
        rows = torch.full((batch, heads, length + 1, head_dim + 3), math.nan).half()
        rows[:, :, :length, :head_dim] = tensor
        tensors.append(rows[:, :, :length, :head_dim])
    check_flash_fwd(*tensors, device=device)


def packed(device):
    """With rows of no sequence, an empty sequence, and what counts from a sequence's first row."""
    q, k, v, *packing = make_packed(
        [40, 0, 77], [50, 3, 64], heads=4, kv_heads=2, head_dim=16, dtype=torch.float16
    )
    q = torch.cat([q, q[:9]])
    options = {"attn_mask": random_mask(3, 1, 77, 64), "window_size_left": 40, "causal": True}
    for side, length in (("q", 77), ("k", 64)):
        cos, sin = rotary_tables(length, 4)
        options |= {f"{side}_rotary_cos": cos, f"{side}_rotary_sin": sin}
    check_flash_varlen_fwd(q, k, v, *packing, **options, device=device)
