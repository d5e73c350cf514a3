"""Small problems, one or two features each, that show a fault in what they exercise."""

from itertools import product

import torch

from tests.attention.flash_fwd_check import check_flash_fwd, check_large_sinks, make_qkv
from tests.attention.held_cases import FORWARD, PACKED, SIZES, case
from tests.cache.kv_caches import in_pages, quantised, with_nan_tails
from tests.helpers.judged import judge
from torch_metal_attn.testing.judge import ints

CPU = torch.device("cpu")
FEW = {"q_length": 20, "kv_length": 90}
PADDED = {f"{tensor}_layout": ("padded 3",) for tensor in "qkv"}


def dense(**fields):
    """GQA, two query tiles or more, partial blocks of keys."""
    return case(**SIZES | FORWARD | fields)


def large_sinks():
    qkv = make_qkv(**SIZES, head_dim=16)
    check_large_sinks(*qkv, causal=True, q_offset=-2, device=CPU)


def scales_of_fp8():
    """Odd rows in pages, with scales that differ by head and sequence."""
    lengths = [90, 50]
    q, k, v = make_qkv(**SIZES | FEW, head_dim=11, dtype=torch.float16)
    k, v = (with_nan_tails(x, lengths) for x in (k, v))
    scale = torch.tensor([[0.5, 2.0], [1.0, 30.0]])
    k, v, cache = quantised(k, v, "fp8_e4m3", scale=scale)
    cache = in_pages(cache, lengths, 16)
    check_flash_fwd(q, k, v, cache=cache, device=CPU, seqused_k=ints(*lengths))


def codes_of_fp8():
    """Every code as the value of one key, which comes out as it is."""
    data = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(16, 1, 1, 16)
    q, k, _ = make_qkv(batch=16, heads=1, q_length=1, kv_length=1, head_dim=16)
    out, _ = torch.ops.metal_attn.flash_fwd(q, k.to(torch.float8_e4m3fn), data)
    torch.testing.assert_close(out, data.float(), rtol=0.0, atol=0.0, equal_nan=True)


PROBLEMS = {
    # A diagonal off the corner.
    "plain": [dense(batch=1, head_dim=64, causal=True, q_offset=30)],
    "windows": [
        dense(window_size_left=left, window_size_right=right, q_offset=offset)
        for left, right, offset in ((20, 13, None), (30, 45, None), (20, 13, 5))
    ],
    # Chunks that begin behind the padding, and queries before the first of them.
    "chunks": [
        dense(attention_chunk=21, leftpad_k=(7, 40), **visible)
        for visible in ({}, {"causal": True, "q_offset": 0})
    ],
    "lengths": [dense(seqused_k=(90, 50), leftpad_k=(5, 35))],
    # With any strides, and with an even width, which is read in pairs.
    "masks": [
        dense(attn_mask="bool bhqk", mask_layout=("order 3210",)),
        *(dense(attn_mask="bool bhqk", kv_length=keys) for keys in (100, 101)),
    ],
    "biases": [
        dense(attn_bias="float32 bhqk"),
        dense(attn_mask="float16 bhqk", kv_length=100),
    ],
    "softcap": [dense(softcap=1.5, softmax_scale=0.5)],
    "alibi": [dense(dtype="float32", alibi_slopes="bh", q_offset=offset) for offset in (None, 60)],
    "sinks": [dense(dtype="float32", learnable_sink="float32", causal=True, q_offset=-2)],
    "large sinks": large_sinks,
    # Both pairings, and pairs of columns: wide and narrow loads. Where a fragment has columns of
    # one half alone, another one stays.
    "rotary": [
        dense(
            dtype="float32",
            rotary="qk",
            rotary_columns=columns,
            rotary_interleaved=interleaved,
            rotary_by_sequence=True,
            head_dim=24 if columns == 16 and not interleaved else 16,
        )
        for columns, interleaved in product((8, 14, 16), (False, True))
    ],
    "slices of v": [dense(batch=1, v_head_dim=264, causal=True)],
    # Two SIMD groups have half of the columns each.
    "shared rows": [dense(batch=1, head_dim=208, causal=True)],
    # Rows with NaN around each.
    "odd head dims": [
        dense(head_dim=11, v_head_dim=5, **PADDED, **rotary)
        for rotary in ({}, {"rotary": "q", "rotary_columns": 8})
    ],
    # One of them empty, spare rows, and options that count from a first row.
    "packed": [
        case(
            **PACKED | FORWARD,
            attn_mask="bool bqk",
            window_size_left=40,
            rotary="qk",
            rotary_columns=8,
        )
    ],
    # Pages of 3 keys, so that a sequence has more than a SIMD group holds; k is rotated.
    "pages": [
        dense(
            q_length=20,
            kv_length=320,
            cache="paged",
            page=3,
            seqused_k=(31, 300),
            rotary="k",
            rotary_columns=16,
        )
    ],
    # With windows, so that walks begin after the first pages.
    "pages of packed": [
        case(
            **PACKED | FORWARD | {"packed": ((40, 50), (77, 300)), "dtype": "float32"},
            cache="paged",
            page=24,
            window_size_left=30,
        )
    ],
    "indices": [dense(cache="indexed")],
    # Float32 queries read 4 columns at a time, which are half of a word of codes.
    "halves of words": [dense(**FEW, dtype="float32", head_dim=64, format="q2_g64")],
    "formats": [
        dense(**FEW, head_dim=64, cache="paged", format=kv_format, seqused_k=(90, 50))
        for kv_format in ("q8_0", "q4_0", "q3_g32")
    ],
    "scales of fp8": scales_of_fp8,
    "codes of fp8": codes_of_fp8,
}


def run(problem):
    """One of PROBLEMS, or a function."""
    problem = PROBLEMS.get(problem, problem)
    if callable(problem):
        problem()
    else:
        judge(*problem)
