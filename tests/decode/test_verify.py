"""Decoding of sequences that differ in their number of queries, as speculation has them."""

import pytest
import torch

from tests.attention.flash_fwd_options import ints
from tests.attention.held_cases import hold
from tests.decode import flash_decode_problems as problems
from tests.helpers.cases import each_case
from tests.helpers.refused import refused_alike
from tests.helpers.steps import step, tensors_of
from torch_metal_attn import flash_attn_with_kvcache, simulate
from torch_metal_attn.testing.judge import on

ops = torch.ops.metal_attn


def test_packed_alone():
    """The unchanged kernels of test_flash_decode_mutants.py pass the other problems."""
    with simulate(check=True):
        problems.packed_alone()


def test_many_rows_of_a_kv_head(device):
    shape = {"heads": 8, "kv_heads": 1, "head_dim": 64, "dtype": torch.float16}
    check = problems.check_packed
    check((1, 64, 16, 4), (70, 64, 100, 9), device, shape=shape, causal=True, num_splits=2)


def test_steps_on_quantised_caches(device):
    """New rows of another number than the queries, in a format of keys and one of values."""
    made = step(
        packed=((3, 3), (0, 2), (5, 5), (1, 4)),
        lengths=(13, 20, 2, 9),
        cache="paged",
        format="q4_0",
        v_format="fp8_e4m3",
        rotary_columns=32,
        causal=True,
    )
    hold([made], device)


def test_with_kvcache(device):
    """flash-attn's function gives what the ops do, with new rows and without."""
    arguments, options = problems.packed_q((3, 0, 5), (20, 6, 33), spare=0, causal=True)
    q, k, v = on(device, dict(zip("qkv", arguments, strict=True))).values()
    k, v = k.nan_to_num(0), v.nan_to_num(0)
    expected = ops.flash_decode(q, k, v, **on(device, options))
    packing = on(device, {n: options[n] for n in ("cu_seqlens_q", "max_seqlen_q")})
    lengths = options["seqused_k"].to(device)
    rows = {"causal": True, "return_softmax_lse": True} | packing
    caches = k.transpose(1, 2), v.transpose(1, 2)
    found = flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths, **rows)
    assert all(map(torch.equal, found, expected))
    # The last keys as new ones.
    before = lengths - packing["cu_seqlens_q"].diff()
    ranges = [slice(*x) for x in zip(before.tolist(), lengths.tolist(), strict=True)]
    new = [torch.cat([x[b, s] for b, s in enumerate(ranges)]) for x in caches]
    for cache in caches:
        for b, s in enumerate(ranges):
            cache[b, s] = 7.0
    ends = {"cu_seqlens_k_new": packing["cu_seqlens_q"]}
    found = flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=before, **rows, **ends)
    assert all(map(torch.equal, found, expected))


@each_case(
    "change, message",
    [
        ({"cu_seqlens_q": ints(0, 3, 2)}, r"cu_seqlens_q\[2\] is 2 and the one before 3"),
        ({"cu_seqlens_q": ints(1, 3, 7)}, r"cu_seqlens_q\[0\] is 1; it must be 0"),
        ({"cu_seqlens_q": ints(0, 4, 8)}, "cu_seqlens_q ends at 8 of 7 rows"),
        ({"max_seqlen_q": 3}, "cu_seqlens_q has a sequence of 4 rows and max_seqlen_q is 3"),
        ({"cu_seqlens_q": ints(0, 7), "max_seqlen_q": 7}, "k has a batch of 2 and cu_seqlens_q"),
        ({"cu_seqlens_q": None}, "q has 3 dimensions"),
        ({"cu_seqlens_q": torch.tensor([0, 3, 7])}, "cu_seqlens_q has dtype int64"),
        (
            {"indices": torch.zeros(1, 1, 4, 2).int()},
            r"indices has shape \(1, 1, 4, 2\); it must be \(1 or 1, 1 or 2, 7, entries\)",
        ),
        (
            {"indices": torch.zeros(1, 1, 4, 2).int(), "q_block_size": 2},
            "q_block_size is 2 with cu_seqlens_q; it must be 1: packed queries have a list each",
        ),
    ],
)
def test_refused(change, message):
    arguments, options = problems.packed_q((3, 4), (60, 70), spare=0)
    with pytest.raises(ValueError, match=message):
        ops.flash_decode(*arguments, **options | change)


@each_case(
    "change, message",
    [
        ({"cu_seqlens_k_new": ints(0, 3, 3, 8)}, "cu_seqlens_k_new has shape"),
        ({"cu_seqlens_k_new": ints(0, 3, 2, 8, 9)}, r"cu_seqlens_k_new\[2\] is 2"),
        ({"cu_seqlens_k_new": ints(0, 3, 3, 8, 10)}, "cu_seqlens_k_new ends at 10 of 9 rows"),
        ({"cache_seqlens": ints(13, 20, 30, 9)}, r"cache_seqlens\[2\] is 30 and k has 5 new rows"),
        ({"cu_seqlens_q": None, "cu_seqlens_k_new": ints(0, 3, 3, 8, 9)}, "cu_seqlens_k_new is g"),
    ],
)
def test_refused_steps(change, message):
    """And the cache is as it was."""
    tensors = tensors_of(packed=((3, 3), (0, 0), (5, 5), (1, 1)), **problems.PACKED_STEP)
    before = {n: x.clone() for n, x in tensors.items()}
    with pytest.raises(ValueError, match=message):
        ops.decode_step(**tensors | change, max_seqlen_q=5)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(tensors[name].nan_to_num(-1), before[name].nan_to_num(-1))


def test_lists_of_packed_queries_have_no_gradient():
    arguments, options = problems.packed_q((3, 4), (60, 70), spare=0)
    leaves = [x.nan_to_num(0).requires_grad_() for x in arguments]
    out, _ = ops.flash_decode(*leaves, **options, indices=torch.zeros(1, 1, 7, 2).int())
    with pytest.raises(NotImplementedError, match="indices a batch without cu_seqlens_q"):
        out.sum().backward()


def test_alike_without_data():
    arguments, options = problems.packed_q((3, 4), (60, 70), spare=0)
    given = dict(zip("qkv", arguments, strict=True)) | options | {"max_seqlen_q": -1}

    def call(place):
        return lambda: ops.flash_decode(**on(place, given))

    refused_alike("max_seqlen_q is -1; it must be in 0", call("cpu"), call("meta"))
