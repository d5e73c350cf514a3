"""Small problems that notice faults of flash_decode, one for each feature."""

import ctypes
import math
from functools import partial

import pytest
import torch

from tests.attention.flash_fwd_check import check_flash_decode, check_large_sinks, make_qkv
from tests.attention.held_cases import case
from tests.attention.test_flash_fwd_device_lengths import results_of
from tests.cache.kv_caches import paged, with_nan_tails
from tests.helpers import shader_params
from tests.helpers.judged import judge
from tests.helpers.steps import check_step, tensors_of
from torch_metal_attn import simulate
from torch_metal_attn.simulator import engine
from torch_metal_attn.testing.judge import ints

ops = torch.ops.metal_attn
# This shape has GQA, two and a half steps over the keys, and a partial span of columns.
SHAPE = {"batch": 2, "heads": 4, "kv_heads": 2, "q_length": 3, "kv_length": 300, "head_dim": 72}
HALF = {"dtype": torch.float16}
ONE_QUERY = {"batch": 1, "q_length": 1}
SHARED_COLUMNS = {"heads": 32, "kv_heads": 1, "head_dim": 128}
# Scales differ by key and by span, and are NaN for missing keys.
CODES = {"batch": 1, "kv_length": 45, "head_dim": 64, "format": "q8_0"}
CODES |= {"leftpad_k": (3,), "seqused_k": (40,)}
PAGED = {"cache": "paged", "q_length": 1, "kv_length": 600, "seqused_k": (31, 600)}
PACKED = {"batch": 4, "q_length": 1, "q_lengths": (3, 0, 5, 1), "spare_rows": 2, "head_dim": 64}
PACKED |= {"kv_length": 70, "seqused_k": (60, 5, 70, 1)}
CAUSAL, MANY_ROWS = {"causal": True}, {"heads": 16, "kv_heads": 1}
PAGES_OF_5 = {"cache": "paged", "page": 5, "capacity": 65}


def attend(fields, *changes):
    """Checks flash_decode for SHAPE with these fields, once for each change."""
    shape = SHAPE | {"num_splits": 1, "backward": False} | fields
    judge(*(case(call="flash_decode", **shape | change) for change in changes or [{}]))


# Arguments of `attend`, or a function.
PROBLEMS = {
    # SIMD groups have different keys.
    "plain": ({"causal": True}, {}, {"q_offset": 30}),
    # Two splits have keys, and one has no keys.
    "splits": ({"num_splits": 3, "causal": True},),
    # SIMD groups have different columns of the same keys.
    "columns": (ONE_QUERY | SHARED_COLUMNS,),
    # Four SIMD groups have different rows. The last group has few rows.
    "row_groups_of_codes": (CODES | {"heads": 25, "kv_heads": 1, "q_length": 4, "v_head_dim": 96},),
    "vector_scales": (CODES | {"heads": 2, "q_length": 1},),
    # Three SIMD groups have eleven spans. Four have fifteen spans of keys and eight of values.
    "columns_unevenly": (
        *(ONE_QUERY | {"kv_length": 70}, {"head_dim": 352}, {"head_dim": 480, "v_head_dim": 256}),
    ),
    # Four tiles of rows. SIMD groups divide the keys in the first case, then the columns.
    "tiles": (
        {"batch": 1, "heads": 8, "kv_heads": 1, "q_length": 16, "kv_length": 150, "causal": True},
        {"head_dim": 32, "window_size_left": 20},
        {"head_dim": 128, "num_splits": 2},
    ),
    "lengths": ({"seqused_k": (290, 50), "leftpad_k": (5, 35)},),
    # The queries of a tile see different first and last blocks. In float32, with few keys.
    "windows": (
        {"q_length": 16, "head_dim": 32, "dtype": "float32"},
        {"window_size_left": 20, "window_size_right": 13},
        {"window_size_left": 3, "window_size_right": 2, "q_offset": 100},
        {"window_size_left": 40, "window_size_right": 0, "q_offset": 5},
    ),
    # Some queries are before the first key.
    "no_visible_key": ({"q_length": 5, "causal": True, "q_offset": -3},),
    # Query heads of one KV head have different sinks, which are also used to merge splits.
    "sinks": (
        {"dtype": "float32", "softmax_scale": 0.01, "learnable_sink": "float32"},
        *({}, {"num_splits": 2}),
    ),
    "large_sinks": lambda: check_large_sinks(
        *make_qkv(**SHAPE), op=partial(ops.flash_decode, num_splits=1), device="cpu"
    ),
    "rules": ({}, {"attn_bias": "float32 bhqk"}, {"alibi_slopes": "bh"}),
    # MLA: values are in the rows of keys. Missing rows are NaN. Columns are shared or not.
    "latent": (
        ONE_QUERY
        | {"kv_heads": 1, "kv_length": 60, "values_in_keys": True}
        | {"seqused_k": (37,), "leftpad_k": (5,)},
        {"head_dim": 64, "v_head_dim": 48},
        {"heads": 12, "head_dim": 96, "v_head_dim": 64},
        {"heads": 32, "head_dim": 576, "v_head_dim": 512},
    ),
    "rotary": (
        {"dtype": "float32", "rotary": "q", "rotary_columns": 16, "rotary_by_sequence": True},
    ),
    # A sequence has more pages than a SIMD group holds page numbers.
    "pages": (PAGED, {"page": 1, "head_dim": 64}, SHARED_COLUMNS | {"page": 3}),
    # Eight neighbouring keys are always in one page.
    "whole_pages": (
        *(PAGED | {"page": 8}, {"page": 16, "head_dim": 128}, {"head_dim": 64}, SHARED_COLUMNS),
    ),
    "scales_of_spans": (CODES | {"q_length": 2},),
    # fp8: after the last column another row begins, or the memory ends.
    "codes_of_odd_rows": (ONE_QUERY | {"kv_length": 45, "head_dim": 20, "format": "fp8_e4m3"},),
    # A list is for two queries, and the second query sees more keys. The last block is partial.
    "lists_of_blocks": (
        {"listed": 60, "kv_block_size": 8, "q_block_size": 2},
        *({"causal": True}, {"window_size_left": 40, "q_offset": 150}),
    ),
    # Sequences have different lengths. All rows that belong to no sequence are NaN.
    "lists_in_pages": (
        {"cache": "paged", "seqused_k": (31, 290), "listed": 40, "list_dims": "b"},
        *({"page": 3}, {"page": 16}),
    ),
    # Sequences have different numbers of queries, also zero. Some rows belong to no sequence.
    "packed": (PACKED | {"causal": True, "learnable_sink": "float32"}, {}, {"num_splits": 3}),
    # There are more rows than a threadgroup has at once.
    "step_of_tiles": lambda: check_step(**CAUSAL, **MANY_ROWS, length=16, rotary_columns=32),
    "step_in_pages": lambda: check_step(**CAUSAL, **PAGES_OF_5, length=3, lengths=(6, 23)),
    "step_of_indices": lambda: check_step(**CAUSAL, length=3, cache="indexed"),
}


def run(problem):
    problem = PROBLEMS.get(problem, problem)
    if callable(problem):
        problem()
    else:
        attend(*problem)


def row_groups():
    """SIMD groups have all, some or none of their rows. Some spans of columns are partial."""
    many = {"kv_length": 75, "causal": True, "learnable_sink": "float32"}
    attend(many, {"heads": 2, "q_length": 40}, {"heads": 8, "q_length": 33})
    attend({"heads": 16, "kv_heads": 1, "q_length": 4, "kv_length": 70, "num_splits": 2})
    # One SIMD group has a span of values, but no span of keys.
    attend({"heads": 2, "q_length": 33, "kv_length": 20, "head_dim": 32, "v_head_dim": 33})


def vectors():
    """SIMD lanes sum the values of one or two rows. Some units of values are missing."""
    attend(ONE_QUERY)
    q, k, v = make_qkv(1, 2, 2, 1, 70, 128, **HALF)
    v[:, :, :5] = v[:, :, 60:] = math.inf
    options = {"leftpad_k": ints(5), "seqused_k": ints(60)}
    check_flash_decode(q, k, v, **options, device="cpu", num_splits=1)
    # Missing keys read the values of the last key, with weight 0.
    v[:, :, 5:60] = math.inf
    out, _ = ops.flash_decode(q, k, v, **options, num_splits=1)
    assert (out == math.inf).all()
    # All weights of a SIMD group's keys are 0 in float32. As in PyTorch, 0 * inf is NaN.
    q, k, v = make_qkv(**SHAPE | {"batch": 1, "heads": 2, "q_length": 2}, **HALF)
    v[:, :, 0] = math.inf
    k[:, :, :8] = -50.0 * q.sum(2, keepdim=True)
    out, _ = ops.flash_decode(q, k[:, :, :32], v[:, :, :32], num_splits=1)
    assert out.isnan().all()
    # The infinity is in a key that the first query does not see.
    out, _ = ops.flash_decode(q, k, v, causal=True, q_offset=-1, num_splits=1)
    assert (out[:, :, 0] == 0).all()


def infinite_value():
    """The last value is infinite. Missing keys read it with weight 0, and 0 * inf would be NaN."""
    q, k, v = make_qkv(**SHAPE, **HALF)
    v[:, :, -1] = math.inf
    out, _ = ops.flash_decode(q, k, v, num_splits=1)
    assert (out == math.inf).all()


def missing_pages():
    """Pages are missing before a window, in its first block, and where only the kernel sees it.

    With latents, a row that is masked as a key is still multiplied as a value.
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
        # The first page, which is read in place of a missing one, is NaN.
        caches = [torch.cat([torch.full_like(x[:1], math.nan), x]) for x in caches]
        if v_head_dim:
            caches[1] = caches[0][..., :v_head_dim]
        table = where["block_table"].add_(1)
        for row, length in zip(table, used, strict=True):
            row[: (length - 51) // page] = -1
        options = {"window_size_left": 50, "seqused_k": ints(*used), "num_splits": 1}
        options["causal"] = True
        check_flash_decode(q, k, v, cache=(*caches, where), device="cpu", **options)
        run = partial(ops.flash_decode, q, *caches, **where, **options)
        for cache in caches:
            cache[0] = 0.0
        bad = table[1].clone()
        bad[299 // page] = -1
        check_1_is_nan(run, table, bad.tolist())


def no_pages():
    q, *_ = make_qkv(2, 2, 2, 1, 1, 64, **HALF)
    cache, used = torch.empty(0, 2, 16, 64, **HALF), ints(0, 0)
    options = {"block_table": torch.full((2, 3), 7).int(), "seqused_k": used}
    check_1_is_nan(partial(ops.flash_decode, q, cache, cache, **options), used, 5)


def lists():
    """Keys in any order, repeated or not listed, by KV head and sequence, for two rows of tiles."""
    by_head = {"listed": 70, "list_dims": "bh"}
    attend(by_head | {"causal": True, "q_offset": 200})
    attend({"heads": 2, "num_splits": 2, "listed": 2})
    # A SIMD group has two fragments of keys, and a list has more rows than a tile.
    attend(by_head, {"heads": 32}, {"heads": 104, "head_dim": 200})


def lists_of_hidden_keys():
    """Hidden keys and the first key have values of NaN. One list has only such keys."""
    q, k, v = make_qkv(**SHAPE, **HALF)
    v[:, :, 0] = v[:, :, 299] = math.nan
    entries = torch.tensor([[299, -1, -1], [299, 7, -1], [5, -1, 299]]).int()[None, None]
    out, lse = ops.flash_decode(q, k, v, indices=entries, causal=True, q_offset=200)
    assert (out[:, :, 0] == 0).all()
    assert (lse[:, :, 0] == -math.inf).all()
    for query, key in ((1, 7), (2, 5)):
        assert torch.equal(out[:, :, query], v[:, :, key].repeat_interleave(2, 1))


def impossible_entries():
    """An invalid entry that only the kernel sees makes only the rows of its list NaN."""
    q, k, v = make_qkv(**SHAPE, **HALF)
    entries = torch.randint(0, 38, (1, 1, 3, 9)).int()
    for num_splits in (1, 2):
        options = {"kv_block_size": 8, "num_splits": num_splits, "indices": entries}
        run = partial(ops.flash_decode, q, k, v, **options)
        expected, bad = run(), entries.clone()
        for entry in (38, -2, 2**31 - 1, -(2**31)):
            bad[0, 0, 1, 4] = entry
            results = results_of(run, entries, bad.tolist())
            for result, right in zip(results, expected, strict=True):
                assert result[:, :, 1].isnan().all()
                assert torch.equal(result[:, :, 0::2], right[:, :, 0::2])


def step():
    padded = {"length": 3, "leftpad_k": (2, 5), "rotary_columns": 32}
    check_step(**padded, causal=True)
    check_step(**padded, by_token=False, rotary_from_leftpad=False)


def step_of_splits():
    """New keys share a step with old ones. Splits run in any order."""
    for num_splits, seed in ((2, 0), (3, 0), (2, 1), (2, 2), (2, 3)):
        sizes = {"length": 5, "capacity": 320, "lengths": (170, 250)}
        with simulate(check=True, seed=seed, workers=1):
            check_step(**sizes, causal=True, num_splits=num_splits)


def check_1_is_nan(run, tensor, bad):
    """Checks that an invalid value, which only the kernel sees, makes only sequence 1 NaN."""
    expected = run()
    results = results_of(run, tensor, [tensor[0].tolist(), bad])
    for result, right in zip(results, expected, strict=True):
        assert result[1].isnan().all()
        assert torch.equal(result[0], right[0])


def zero_results(patch):
    """Fills results with 0 before the kernel runs, so that the kernel must write NaN."""
    slots = shader_params.slots("FlashDecodeBuffer", "FLASH_DECODE_")
    run = engine.run

    def run_on_zeros(image, kernel, buffers, **arguments):
        for buffer in buffers:
            if kernel.name == "flash_decode" and buffer.index in (slots["out"], slots["lse"]):
                ctypes.memset(buffer.storage, 0, buffer.bytes)
        return run(image, kernel, buffers, **arguments)

    patch.setattr(engine, "run", run_on_zeros)


def packed_q(lengths, used, shape=None, **options):
    """flash_decode's arguments: packed q, and dense keys and values that are NaN after `used`."""
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": torch.float16} | (shape or {})
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    q, *_ = make_qkv(1, **shape, q_length=int(ends[-1]), kv_length=1)
    _, k, v = make_qkv(len(lengths), **shape, q_length=1, kv_length=max(used), seed=1)
    k, v = (with_nan_tails(x, used) for x in (k, v))
    packing = {"cu_seqlens_q": ends, "max_seqlen_q": max(lengths)}
    arguments = (q[0].transpose(0, 1).contiguous(), k, v)
    return arguments, {"seqused_k": ints(*used)} | packing | options


def packed_lists():
    """Each query and KV head has a list of keys or blocks. The last rows are of no sequence."""
    attend(PACKED | {"listed": 30, "list_dims": "h"}, {"causal": True}, {"num_splits": 2})
    attend(PACKED | {"heads": 80, "causal": True, "listed": 5, "kv_block_size": 8})


def impossible_packed():
    arguments, options = packed_q((3, 4), (60, 70), causal=True)
    run = partial(ops.flash_decode, *arguments, **options)
    expected, _ = run()
    for bad in ([0, 3, 900], [0, 2**31 - 1, 7], [0, -5, 7], [-3, 3, 7]):
        out, _ = results_of(run, options["cu_seqlens_q"], bad)
        assert out.isnan().any(), bad
        if bad[:2] == [0, 3]:  # the ends of the first sequence are valid
            assert torch.equal(out[:3], expected[:3])
            assert out[3:].isnan().any()


PACKED_STEP = {"lengths": (13, 20, 2, 9), "rotary_columns": 32, "capacity": 32}


def packed_steps():
    options = PACKED_STEP | {"causal": True}
    as_many = (3, 3), (0, 0), (5, 5), (1, 1)
    check_step(packed=as_many, **options)
    check_step(packed=as_many, **options | PAGES_OF_5)
    check_step(packed=((1, 3), (2, 2), (0, 5), (3, 4)), **options)


def impossible_packed_step():
    """Invalid ends of new rows that only the kernel sees make their sequence NaN."""
    tensors = tensors_of(packed=((3, 3), (0, 1), (5, 5), (1, 1)), **PACKED_STEP)
    step = partial(ops.decode_step, **tensors, max_seqlen_q=5, causal=True)
    for bad in ([0, 3, 4, 900, 901], [0, 3, 4, -1, 10], [0, 3, 5, 4, 10]):
        out, _ = results_of(step, tensors["cu_seqlens_k_new"], bad)
        assert out.isnan().any(), bad


def impossible():
    """Invalid lengths, paddings and batches, with more queries than threads in a threadgroup."""
    q, k, v = make_qkv(**SHAPE | {"q_length": 80, "head_dim": 32}, **HALF)
    used, first, batches = ints(290, 50), ints(5, 35), ints(1, 0)
    with pytest.MonkeyPatch.context() as patch:
        zero_results(patch)
        for num_splits in (1, 2):
            decode = partial(ops.flash_decode, q, k, v, num_splits=num_splits)
            padded = partial(decode, seqused_k=used, leftpad_k=first)
            for tensor, bad in ((used, 301), (used, -1), (first, 400)):
                check_1_is_nan(padded, tensor, bad)
            check_1_is_nan(partial(decode, cache_batch_idx=batches), batches, 2)


def impossible_step():
    """New keys do not fit the cache, or the tables have no row for them."""
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
        check_1_is_nan(partial(ops.decode_step, **tensors, causal=True), tensors[name], bad)
