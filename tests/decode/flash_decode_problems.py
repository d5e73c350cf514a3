"""Small problems that show a fault of flash_decode in what they exercise."""

import ctypes
import math
from functools import partial

import pytest
import torch

from tests.attention.flash_fwd_check import (
    check_flash_decode,
    check_large_sinks,
    hold_results,
    make_qkv,
)
from tests.attention.flash_fwd_options import ints, random_mask, rotary_tables
from tests.attention.test_flash_fwd_device_lengths import after_the_checks
from tests.cache.kv_caches import paged, quantised, with_nan_tails
from tests.helpers import shader_params
from tests.helpers.steps import check_step, tensors_of
from torch_metal_attn import simulate
from torch_metal_attn.reference import varlen_attention
from torch_metal_attn.simulator import engine
from torch_metal_attn.testing.judge import on, worst_of

ops = torch.ops.metal_attn
# GQA, two steps over the keys and a part of one, spans of columns that are not full.
SHAPE = {"batch": 2, "heads": 4, "kv_heads": 2, "q_length": 3, "kv_length": 300, "head_dim": 72}
HALF = {"dtype": torch.float16}


def dense(shape=None, num_splits=1, dtype=torch.float16, **options):
    q, k, v = make_qkv(**SHAPE | (shape or {}), dtype=dtype)
    check_flash_decode(q, k, v, device="cpu", num_splits=num_splits, **options)


def plain():
    """SIMD groups with different keys."""
    dense(causal=True)
    dense(causal=True, q_offset=30)


def splits():
    """Two with keys and one without."""
    dense(num_splits=3, causal=True)


def columns():
    """SIMD groups with different columns of the same keys."""
    dense({"batch": 1, "heads": 32, "kv_heads": 1, "q_length": 1, "head_dim": 128})


def row_groups():
    """SIMD groups with other rows: whole, in part and without any; columns that are not full."""
    for q_length, heads in ((40, 2), (33, 8)):
        shape = {"heads": heads, "q_length": q_length, "kv_length": 75}
        dense(shape, causal=True, learnable_sink=torch.linspace(-2.0, 3.0, heads))
    dense({"heads": 16, "kv_heads": 1, "q_length": 4, "kv_length": 70}, num_splits=2)
    # A SIMD group has a span of values, and none of the keys.
    dense({"heads": 2, "q_length": 33, "kv_length": 20, "head_dim": 32, "v_head_dim": 33})


def row_groups_of_codes():
    """Four such SIMD groups, the last with few rows, and scales that differ by key and span."""
    q, k, v = make_qkv(1, 25, 1, 4, 45, 64, v_head_dim=96, **HALF)
    k, v = (
        x * torch.rand(1, 1, 45, x.shape[-1] // 32).add(0.1).repeat_interleave(32, 3)
        for x in (k, v)
    )
    k, v, cache = quantised(k, v, "q8_0")
    for scale in cache[2].values():
        scale[:, :, :3] = math.nan
        scale[:, :, 40:] = math.nan
    options = {"leftpad_k": ints(3), "seqused_k": ints(40)}
    check_flash_decode(q, k, v, cache=cache, **options, device="cpu", num_splits=1)


def vectors():
    """One and two rows, summed up by lanes, with units of values that are not all there."""
    dense({"batch": 1, "q_length": 1})
    q, k, v = make_qkv(1, 2, 2, 1, 70, 128, **HALF)
    v[:, :, :5] = v[:, :, 60:] = math.inf
    options = {"leftpad_k": ints(5), "seqused_k": ints(60)}
    check_flash_decode(q, k, v, **options, device="cpu", num_splits=1)
    # The last key's, which keys behind it repeat with weight 0.
    v[:, :, 5:60] = math.inf
    out, _ = ops.flash_decode(q, k, v, **options, num_splits=1)
    assert (out == math.inf).all()
    # Of a SIMD group's keys whose weights are 0 in float32. As in PyTorch, 0 * inf is NaN.
    q, k, v = make_qkv(**SHAPE | {"batch": 1, "heads": 2, "q_length": 2}, **HALF)
    v[:, :, 0] = math.inf
    k[:, :, :8] = -50.0 * q.sum(2, keepdim=True)
    out, _ = ops.flash_decode(q, k[:, :, :32], v[:, :, :32], num_splits=1)
    assert out.isnan().all()
    # Of a key that the first query does not see.
    out, _ = ops.flash_decode(q, k, v, causal=True, q_offset=-1, num_splits=1)
    assert (out[:, :, 0] == 0).all()


def vector_scales():
    """Of the spans of codes that a lane has, NaN where there is no key."""
    q, k, v = make_qkv(1, 2, 2, 1, 45, 64, **HALF)
    size = torch.rand(1, 2, 45, 2).add(0.1).repeat_interleave(32, 3)
    k, v, cache = quantised(k, v * size, "q8_0")
    cache[2]["v_scale"][:, :, :3] = math.nan
    options = {"leftpad_k": ints(3), "seqused_k": ints(40)}
    check_flash_decode(q, k, v, cache=cache, **options, device="cpu")


def columns_unevenly():
    """Eleven spans of three SIMD groups; fifteen and eight of four."""
    shape = {"batch": 1, "q_length": 1, "kv_length": 70}
    dense(shape | {"head_dim": 352})
    dense(shape | {"head_dim": 480, "v_head_dim": 256})


def tiles():
    """Four tiles of rows, for SIMD groups with their own keys and with their own columns."""
    shape = {"batch": 1, "heads": 8, "kv_heads": 1, "q_length": 16, "kv_length": 150}
    dense(shape | {"head_dim": 32}, causal=True, window_size_left=20)
    dense(shape | {"head_dim": 128}, num_splits=2, causal=True)


def lengths():
    """Lengths, with NaN in the memory of keys that do not exist."""
    q, k, v = make_qkv(**SHAPE, **HALF)
    for b, (first, end) in enumerate([(5, 290), (35, 50)]):
        for tensor in (k, v):
            tensor[b, :, :first] = math.nan
            tensor[b, :, end:] = math.nan
    options = {"seqused_k": ints(290, 50), "leftpad_k": ints(5, 35)}
    check_flash_decode(q, k, v, **options, device="cpu")


def infinite_value():
    """The last key's value. Keys after it repeat it with weight 0, and 0 * inf is NaN."""
    q, k, v = make_qkv(**SHAPE, **HALF)
    v[:, :, -1] = math.inf
    out, _ = ops.flash_decode(q, k, v, num_splits=1)
    assert (out == math.inf).all()


def windows():
    """A tile whose queries see different first and last blocks; in float32, with few keys."""
    few = {"q_length": 16, "head_dim": 32}
    for left, right, q_offset in ((20, 13, None), (3, 2, 100), (40, 0, 5)):
        window = {"window_size_left": left, "window_size_right": right, "q_offset": q_offset}
        dense(few, dtype=torch.float32, **window)


def nothing():
    """Queries before the first key."""
    dense({"q_length": 5}, causal=True, q_offset=-3)


def sinks():
    """Sinks of different heads that share a KV head; merging the splits adds them too."""
    sink = torch.tensor([3.0, 1.0, -1.0, 5.0])
    for num_splits in (1, 2):
        dense(num_splits=num_splits, dtype=torch.float32, learnable_sink=sink)


def large_sinks():
    op = partial(torch.ops.metal_attn.flash_decode, num_splits=1)
    check_large_sinks(*make_qkv(**SHAPE), op=op, device="cpu")


def rules():
    """Biases and masks of each head's own, and slopes."""
    dense(attn_bias=random_mask(2, 4, 3, 300, dtype=torch.float32))
    dense(alibi_slopes=torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]]))


def latent():
    """MLA: values in the rows of keys, NaN where those do not exist; columns shared or not."""
    for heads, head_dim, v_head_dim in ((4, 64, 48), (12, 96, 64), (32, 576, 512)):
        q, k, _ = make_qkv(1, heads, 1, 1, 60, head_dim, **HALF)
        k[:, :, 37:] = math.nan
        k[:, :, :5] = math.nan
        options = {"seqused_k": ints(37), "leftpad_k": ints(5)}
        check_flash_decode(q, k, k[..., :v_head_dim], **options, device="cpu")


def rotary():
    cos, sin = rotary_tables(3, 8, batch=2)
    dense(dtype=torch.float32, q_rotary_cos=cos, q_rotary_sin=sin)


def pages():
    """Pages with so few keys that a sequence has more of them than a SIMD group holds."""
    in_pages(1, {"head_dim": 64})
    in_pages(3, SHARED_COLUMNS)


def whole_pages():
    """The same, in which no eight keys lie in two."""
    in_pages(16, {"head_dim": 128})
    in_pages(8, {"head_dim": 64})
    in_pages(8, SHARED_COLUMNS)


SHARED_COLUMNS = {"heads": 32, "kv_heads": 1, "head_dim": 128}


def in_pages(page, shape):
    used = [31, 600]
    q, k, v = make_qkv(**SHAPE | shape | {"q_length": 1, "kv_length": 600}, **HALF)
    k, v = (with_nan_tails(x, used) for x in (k, v))
    cache = paged(k, v, used, page)
    check_flash_decode(q, k, v, cache=cache, device="cpu", seqused_k=ints(*used), num_splits=1)


def missing_pages():
    """Before a window, in the block where it begins; and where only the kernel sees them.

    Also of latents: what is masked out of the products of a key is multiplied as a value.
    """
    used = [400, 300]
    latents = {"heads": 12, "kv_heads": 1, "head_dim": 96}
    for page, shape, v_head_dim in (
        (3, {"head_dim": 64}, None),
        (3, SHARED_COLUMNS, None),
        (8, SHARED_COLUMNS, None),
        (3, latents, 64),
        (8, latents | {"heads": 4}, 64),
    ):
        q, k, v = make_qkv(**SHAPE | shape | {"q_length": 1, "kv_length": 400}, **HALF)
        v = k[..., :v_head_dim] if v_head_dim else v
        *caches, where = paged(k, with_nan_tails(v, used), used, page)
        # What is read in the place of a missing page is NaN.
        caches = [torch.cat([torch.full_like(x[:1], math.nan), x]) for x in caches]
        if v_head_dim:
            caches[1] = caches[0][..., :v_head_dim]
        table = where["block_table"].add_(1)
        for row, length in zip(table, used, strict=True):
            row[: (length - 51) // page] = -1
        options = {"window_size_left": 50, "seqused_k": ints(*used), "num_splits": 1}
        check_flash_decode(*(q, k, v), cache=(*caches, where), device="cpu", causal=True, **options)
        run = partial(ops.flash_decode, q, *caches, **where, causal=True, **options)
        for cache in caches:
            cache[0] = 0.0
        bad = table[1].clone()
        bad[299 // page] = -1
        check_alone(run, table, bad.tolist())


def no_pages():
    """A cache without a page, of which the kernel alone sees that a sequence has keys."""
    q, *_ = make_qkv(2, 2, 2, 1, 1, 64, **HALF)
    cache = torch.empty(0, 2, 16, 64, **HALF)
    used = ints(0, 0)
    table = torch.full((2, 3), 7).int()
    check_alone(
        partial(ops.flash_decode, q, cache, cache, block_table=table, seqused_k=used), used, 5
    )


def scales_of_spans():
    """Scales that differ by key and span, and are NaN where there is no key."""
    q, k, v = make_qkv(1, 4, 2, 2, 45, 64, **HALF)
    size = torch.rand(2, 1, 2, 45, 2).add(0.1).repeat_interleave(32, 4)
    k, v, cache = quantised(k * size[0], v * size[1], "q8_0")
    for scale in cache[2].values():
        scale[:, :, :3] = math.nan
        scale[:, :, 40:] = math.nan
    options = {"leftpad_k": ints(3), "seqused_k": ints(40)}
    check_flash_decode(q, k, v, cache=cache, **options, device="cpu")


def codes_of_odd_rows():
    """Of fp8, behind whose last column another row begins, or nothing."""
    q, k, v = make_qkv(1, 4, 2, 1, 45, 20, **HALF)
    k, v, cache = quantised(k, v, "fp8_e4m3")
    check_flash_decode(q, k, v, cache=cache, device="cpu", num_splits=1)


def indices():
    q, k, v = make_qkv(**SHAPE, **HALF)
    cache = k.flip(0), v.flip(0), {"cache_batch_idx": ints(1, 0)}
    check_flash_decode(q, k, v, cache=cache, device="cpu")


def lists():
    """Of keys in any order, twice and not at all, by KV head and sequence; two rows of tiles."""
    entries = torch.randint(-1, 300, (2, 2, 3, 70)).int()
    dense(indices=entries, causal=True, q_offset=200)
    entries[:, :, 1] = -1
    dense({"heads": 2}, num_splits=2, indices=entries[:1, :1])
    # A SIMD group has two fragments of keys.
    dense({"heads": 32}, indices=entries[:, :1])
    # More rows of a list than a tile has.
    dense({"heads": 80, "head_dim": 200}, indices=entries[:, :1])


def lists_of_blocks():
    """For two queries each, of which the second sees more; the last block is not full."""
    entries = torch.randint(-1, 38, (1, 1, 2, 9)).int()
    entries[0, 0, :, 0] = 37
    entries[0, 0, :, 1] = 13  # with the first query's first key
    options = {"indices": entries, "kv_block_size": 8, "q_block_size": 2}
    dense(causal=True, **options)
    dense(window_size_left=40, q_offset=150, **options)


def lists_in_pages():
    """Of lengths that differ, with NaN in all other rows."""
    used = [31, 290]
    q, k, v = make_qkv(**SHAPE, **HALF)
    k, v = (with_nan_tails(x, used) for x in (k, v))
    options = {"seqused_k": ints(*used), "indices": torch.randint(-1, 290, (2, 1, 3, 40)).int()}
    for page in (3, 16):
        cache = paged(k, v, used, page)
        check_flash_decode(q, k, v, cache=cache, device="cpu", **options)


def lists_of_hidden_keys():
    """Their values are NaN, and so are those of the first key; one list has nothing else."""
    q, k, v = make_qkv(**SHAPE, **HALF)
    v[:, :, 0] = v[:, :, 299] = math.nan
    entries = torch.tensor([[299, -1, -1], [299, 7, -1], [5, -1, 299]]).int()[None, None]
    out, lse = ops.flash_decode(q, k, v, indices=entries, causal=True, q_offset=200)
    assert (out[:, :, 0] == 0).all()
    assert (lse[:, :, 0] == -math.inf).all()
    for query, key in ((1, 7), (2, 5)):
        assert torch.equal(out[:, :, query], v[:, :, key].repeat_interleave(2, 1))


def impossible_entries():
    """One that only the kernel sees is NaN, of that list's rows alone; nothing else is read."""
    q, k, v = make_qkv(**SHAPE, **HALF)
    entries = torch.randint(0, 38, (1, 1, 3, 9)).int()
    for num_splits in (1, 2):
        run = partial(ops.flash_decode, q, k, v, kv_block_size=8, num_splits=num_splits)
        good, bad = entries.clone(), entries.clone()
        expected = run(indices=good)
        for entry in (38, -2, 2**31 - 1, -(2**31)):
            bad[0, 0, 1, 4] = entry
            given = entries.clone()
            with pytest.MonkeyPatch.context() as patch:
                after_the_checks(patch, given, bad.tolist())
                found = run(indices=given)
            for result, right in zip(found, expected, strict=True):
                assert result[:, :, 1].isnan().all()
                assert torch.equal(result[:, :, 0::2], right[:, :, 0::2])


def step():
    """New keys of two sequences, behind a padding, q and k rotated."""
    padded = {"length": 3, "leftpad_k": (2, 5), "rotary_columns": 32}
    check_step(**padded, causal=True)
    check_step(**padded, by_token=False, rotary_from_leftpad=False)


def step_of_splits():
    """New keys in a step that the old ones have begun; in any order of splits."""
    for num_splits, seed in ((2, 0), (3, 0), (2, 1), (2, 2), (2, 3)):
        sizes = {"length": 5, "capacity": 320, "lengths": (170, 250)}
        with simulate(check=True, seed=seed, workers=1):
            check_step(**sizes, causal=True, num_splits=num_splits)


def step_of_tiles():
    """More rows than a threadgroup has at once."""
    check_step(length=16, heads=16, kv_heads=1, rotary_columns=32, causal=True)


def step_in_pages():
    sizes = {"page": 5, "capacity": 65, "lengths": (6, 23)}
    check_step(length=3, cache="paged", **sizes, causal=True)


def step_of_indices():
    check_step(length=3, cache="indexed", causal=True)


def check_alone(run, tensor, bad):
    """Sequence 1 has an impossible value that only the kernel sees: it alone is NaN."""
    expected = run()
    before = tensor.clone()
    with pytest.MonkeyPatch.context() as patch:
        after_the_checks(patch, tensor, [before[0].tolist(), bad])
        found = run()
    tensor.copy_(before)
    for result, right in zip(found, expected, strict=True):
        assert result[1].isnan().all()
        assert torch.equal(result[0], right[0])


def results_of_zeros(patch):
    """Results hold 0 before the kernel runs, not NaN: what stays unwritten shows."""
    slots = shader_params.slots("FlashDecodeBuffer", "FLASH_DECODE_")
    run = engine.run

    def run_on_zeros(image, kernel, buffers, **arguments):
        for buffer in buffers:
            if kernel.name == "flash_decode" and buffer.index in (slots["out"], slots["lse"]):
                ctypes.memset(buffer.storage, 0, buffer.bytes)
        return run(image, kernel, buffers, **arguments)

    patch.setattr(engine, "run", run_on_zeros)


def packed_q(lengths, used, shape=None, spare=2, seed=0, **given):
    """q packed, and dense keys of so many used ones, NaN behind them: flash_decode's arguments."""
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": torch.float16} | (shape or {})
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    q, *_ = make_qkv(1, **shape | {"q_length": int(ends[-1]) + spare, "kv_length": 1}, seed=seed)
    most = max(used)
    _, k, v = make_qkv(len(lengths), **shape | {"q_length": 1, "kv_length": most}, seed=seed + 1)
    k, v = (with_nan_tails(x, used) for x in (k, v))
    packing = {"cu_seqlens_q": ends, "max_seqlen_q": max(lengths)}
    arguments = (q[0].transpose(0, 1).contiguous(), k, v)
    return arguments, {"seqused_k": ints(*used)} | packing | given


def check_packed(lengths, used, device="cpu", num_splits=1, **given):
    """flash_decode of packed queries against float64, sequence by sequence."""
    (q, k, v), options = packed_q(lengths, used, **given)
    there = on(device, {"q": q, "k": k, "v": v} | options)
    out, lse = (x.cpu() for x in ops.flash_decode(**there, num_splits=num_splits))
    packing = (options.pop("cu_seqlens_q"), None, options.pop("max_seqlen_q"))
    exact, exact_lse = varlen_attention(q, k, v, *packing, **options, compute_dtype=torch.float64)
    composed, _ = varlen_attention(q, k, v, *packing, **options)
    error = worst_of([(composed, exact)])
    hold_results(out, lse, exact, exact_lse, error, options, k.dtype)


LENGTHS = (3, 0, 5, 1), (60, 5, 70, 1)


def packed():
    """Numbers of queries that differ, none among them, and rows of no sequence."""
    sink = torch.tensor([3.0, 1.0, -1.0, 5.0])
    for num_splits in (1, 3):
        check_packed(*LENGTHS, causal=True, learnable_sink=sink, num_splits=num_splits)


def packed_alone():
    """One row of a KV head at most, and tiles of rows that some sequences do not fill."""
    one_head = {"heads": 2, "kv_heads": 2, "head_dim": 64, "dtype": torch.float16}
    check_packed((1, 0, 1), (9, 3, 40), shape=one_head)
    check_packed((33, 2, 20), (80, 50, 60), causal=True, window_size_left=30)


def packed_lists():
    """Of each query: keys and blocks of them, by KV head, with rows of no sequence behind."""
    entries = torch.randint(-1, 70, (1, 2, 11, 30)).int()
    check_packed((3, 0, 5, 1), (70, 70, 70, 70), indices=entries, causal=True)
    check_packed(*LENGTHS, indices=entries % 60, num_splits=2)
    blocks = {"indices": torch.randint(-1, 9, (1, 1, 11, 5)).int(), "kv_block_size": 8}
    check_packed(*LENGTHS, shape={"heads": 80}, causal=True, **blocks)


def impossible_packed():
    """Ends that the kernel alone sees: nothing is read or written outside."""
    arguments, options = packed_q((3, 4), (60, 70), spare=0, causal=True)
    ends = options["cu_seqlens_q"]
    expected, _ = ops.flash_decode(*arguments, **options)
    for bad in ([0, 3, 900], [0, 2**31 - 1, 7], [0, -5, 7], [-3, 3, 7]):
        with pytest.MonkeyPatch.context() as patch:
            after_the_checks(patch, ends, bad)
            out, _ = ops.flash_decode(*arguments, **options)
        ends.copy_(ints(0, 3, 7))
        assert out.isnan().any(), bad
        if bad[:2] == [0, 3]:  # the first sequence's
            assert torch.equal(out[:3], expected[:3])
            assert out[3:].isnan().any()


PACKED_STEP = {"lengths": (13, 20, 2, 9), "rotary_columns": 32, "capacity": 32}


def packed_steps():
    """As many new rows as queries, also in pages; and other numbers of them."""
    options = PACKED_STEP | {"causal": True}
    as_many = (3, 3), (0, 0), (5, 5), (1, 1)
    check_step(packed=as_many, **options)
    check_step(packed=as_many, cache="paged", page=5, **options | {"capacity": 65})
    check_step(packed=((1, 3), (2, 2), (0, 5), (3, 4)), **options)


def impossible_packed_step():
    """Ends of new rows that the kernel alone sees: the sequence is NaN, nothing outside is read."""
    tensors = tensors_of(packed=((3, 3), (0, 1), (5, 5), (1, 1)), **PACKED_STEP)
    ends = tensors["cu_seqlens_k_new"]
    right = ends.tolist()
    for bad in ([0, 3, 4, 900, 901], [0, 3, 4, -1, 10], [0, 3, 5, 4, 10]):
        with pytest.MonkeyPatch.context() as patch:
            after_the_checks(patch, ends, bad)
            out, _ = ops.decode_step(**tensors, max_seqlen_q=5, causal=True)
        ends.copy_(ints(*right))
        assert out.isnan().any(), bad


def impossible():
    """Lengths, paddings and batches of a cache; more queries than a threadgroup has threads."""
    q, k, v = make_qkv(**SHAPE | {"q_length": 80, "head_dim": 32}, **HALF)
    used, first, batches = ints(290, 50), ints(5, 35), ints(1, 0)
    with pytest.MonkeyPatch.context() as patch:
        results_of_zeros(patch)
        for num_splits in (1, 2):
            decode = partial(ops.flash_decode, q, k, v, num_splits=num_splits)
            behind = partial(decode, seqused_k=used, leftpad_k=first)
            for tensor, bad in ((used, 301), (used, -1), (first, 400)):
                check_alone(behind, tensor, bad)
            check_alone(partial(decode, cache_batch_idx=batches), batches, 2)


def impossible_step():
    """New keys that do not fit, or that tables have no row for."""
    plain = tensors_of(length=3, capacity=32)
    rotated = tensors_of(length=3, capacity=32, rotary_columns=32, leftpad_k=(0, 0))
    for table in ("rotary_cos", "rotary_sin"):
        rotated[table] = rotated[table][:24].clone()
    for tensors, name, bad in (
        (plain, "cache_seqlens", 31),
        (plain, "cache_seqlens", -2),
        (rotated, "cache_seqlens", -4),
        (rotated, "cache_seqlens", 22),
        (rotated, "leftpad_k", 30),
    ):
        check_alone(partial(ops.decode_step, **tensors, causal=True), tensors[name], bad)
