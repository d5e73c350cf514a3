"""flash_decode: few queries and long caches, whose keys are split."""

from itertools import product

import pytest
import torch

from tests.attention import held_cases
from tests.attention.flash_fwd_check import check_flash_decode, make_qkv
from tests.cache.kv_caches import paged
from tests.tuning.explained import launch_of
from torch_metal_attn import simulate

decode = torch.ops.metal_attn.flash_decode
DEFAULT_SIZES = {"heads": 4, "kv_heads": 2, "head_dim": 64}


def case(**fields):
    return held_cases.case(call="flash_decode", **DEFAULT_SIZES | {"q_length": 1} | fields)


FEATURES = (
    {"causal": True},
    {"window_size_left": 20, "window_size_right": 3, "q_offset": 60},
    {"window_size_left": 33, "causal": True},
    {"q_offset": -200, "causal": True},
    {"learnable_sink": "float32", "q_offset": -9, "causal": True, "num_splits": 3},
    {"attention_chunk": 21, "learnable_sink": "float32", "softcap": 1.5, "softmax_scale": 0.5}
    | {"alibi_slopes": "bh"},
    {"attn_mask": "bool bhqk", "attn_bias": "float32 bhqk"},
    {"attn_mask": "bool bqk", "attn_bias": "float16 hk", "kv_length": 100, "num_splits": 3},
    {"seqused_k": (90, 13), "leftpad_k": (5, 13), "rotary": "q", "rotary_columns": 16}
    | {"rotary_by_sequence": True},
    {"rotary": "q", "rotary_columns": 16, "rotary_interleaved": True, "num_splits": 3},
    {"poison": "nan in k", "num_splits": 3},
)
LATENT = {"kv_heads": 1, "head_dim": 576, "v_head_dim": 512, "values_in_keys": True}
ROWS_OF_96 = {"head_dim": 96, "v_head_dim": 64}
LENGTHS = {"batch": 6, "kv_length": 257, "seqused_k": (0, 1, 7, 33, 65, 257)}
PACKED = {"batch": 3, "kv_length": 70, "seqused_k": (70, 50, 60), "spare_rows": 2}
ROWS_FIRST = {"k_layout": ("order 021",), "v_layout": ("order 021",)}
# Subjects share kernels, so each option needs one or two cases only.
SUBJECTS = {
    # The rows of a tile are the queries of all heads of a KV head: from 1 to 512.
    "ratios of heads": [
        case(heads=heads, kv_heads=kv_heads, q_length=q, num_splits=splits, causal=True)
        for heads, kv_heads, q, splits in (
            *((1, 1, 1, 1), (4, 4, 3, 1), (7, 1, 3, 1), (8, 2, 16, 3), (32, 1, 16, 1)),
        )
    ],
    # Some splits have no keys.
    "numbers of keys": [
        case(kv_length=kv_length, num_splits=splits)
        for kv_length, splits in product((1, 7, 31, 33, 65, 127, 129, 1023), (1, 2, 7))
    ],
    "head dims": [
        case(head_dim=qk, v_head_dim=v, dtype=dtype, q_length=2, num_splits=splits)
        for qk, v, dtype, splits in (
            (65, 33, "float16", 1),
            (80, 128, "bfloat16", 1),
            (1, 1, "float32", 2),
            (256, 256, "float32", 2),
            (192, 128, "float16", 1),
        )
    ],
    # MLA: one KV head whose values are the first columns of its keys.
    "latent caches": [
        case(heads=1, dtype="float32", num_splits=2, **LATENT),
        # 32 tiles of rows.
        case(heads=16, q_length=64, kv_length=70, causal=True, dtype="bfloat16", **LATENT),
        # Missing rows are both keys and values.
        case(batch=2, heads=16, seqused_k=(20, 65), cache="paged", format="fp8_e4m3", **LATENT),
        *(
            case(seqused_k=(37,), leftpad_k=(5,), **LATENT | ROWS_OF_96 | options)
            for options in ({}, {"heads": 8, "cache_dtype": "float16", "dtype": "float32"})
        ),
    ],
    "features": [
        case(**{"batch": 2, "q_length": 5, "kv_length": 101, "num_splits": 1} | feature)
        for feature in FEATURES
    ],
    # Heads are inside rows, v's head is broadcast, or rows are not aligned.
    "strides": [
        case(
            q_length=3,
            num_splits=2,
            head_dim=40,
            dtype="float32",
            q_layout=("order 021",),
            k_layout=("padded 3",),
            v_layout=("repeated 1",),
        ),
        case(num_splits=1, q_layout=("order 021",), **ROWS_FIRST),
    ],
    "empty": [
        case(batch=batch, heads=heads, kv_heads=min(heads, 2), q_length=q, kv_length=k)
        for batch, heads, q, k in ((0, 2, 1, 5), (1, 0, 1, 5), (1, 2, 0, 5), (1, 2, 1, 0))
    ],
    "page sizes": [
        case(**LENGTHS, q_length=2, cache="paged", page=page, num_splits=splits, **layout)
        for (page, splits), layout in product(((1, 1), (16, 3), (100, 1)), ({}, ROWS_FIRST))
    ],
    # Sequences have different numbers of queries. Some do not fill a tile, or have a single row.
    "packed queries": [
        case(**PACKED | {"seqused_k": (9, 3, 40)}, heads=2, q_lengths=(1, 0, 1), num_splits=1),
        case(**PACKED, q_lengths=(33, 2, 20), window_size_left=30, causal=True, num_splits=1),
        case(**PACKED | {"heads": 8, "kv_heads": 1}, q_lengths=(1, 64, 16), num_splits=2),
    ],
    "caches": [
        # SIMD groups that divide the columns each read the page numbers.
        case(heads=32, kv_heads=1, head_dim=128, kv_length=300, cache="paged", page=8),
        # tests/cache/test_grouped.py checks every format.
        case(**LENGTHS, **ROWS_FIRST, format="fp8_e4m3", dtype="bfloat16", cache="paged"),
        case(cache="paged", page=5, cache_dtype="float16", dtype="float32", q_length=3),
    ],
    # Lists of keys or of blocks, for one or several queries. A tile has one row or many.
    "lists": [
        case(
            **{"batch": 2, "kv_length": 101, "num_splits": 1, "backward": False}
            | {"listed": 40, "list_dims": ("bh", "b", "h", "")[i % 4], "causal": True}
            | fields
        )
        for i, fields in enumerate(
            (
                {"q_length": 7, "kv_block_size": 5, "q_block_size": 2, "num_splits": 2},
                {"q_length": 7, "kv_block_size": 5, "q_block_size": 2, "num_splits": 2}
                | {"listed": 0},
                {"q_length": 3, "heads": 2, "kv_block_size": 32, "listed": 4, "dtype": "bfloat16"},
                {"q_length": 40, "heads": 2, "window_size_left": 50, "q_block_size": 16}
                | {"dtype": "float32"},
                {"q_length": 3, "cache": "paged", "page": 16, "seqused_k": (90, 13)}
                | {"attention_chunk": 30},
                {"q_length": 2, "cache": "paged", "page": 3, "format": "q8_0"}
                | {"leftpad_k": (7, 100), "q_offset": 80, "dtype": "bfloat16", "num_splits": 2},
                {"q_length": 2, "cache": "indexed", "q_offset": -1},
                {"q_length": 2, "heads": 16, "q_offset": -1, **LATENT},
                {"q_length": 9, "kv_block_size": 8, "q_block_size": 2}
                | {"backward": True, "through_lse": True}
                | {"softcap": 2.0, "learnable_sink": "float32", "dtype": "float32"},
            )
        )
    ],
}


@pytest.mark.parametrize("subject", SUBJECTS)
def test_values(subject, device):
    held_cases.hold(SUBJECTS[subject], device)


@pytest.mark.parametrize("seed", [1, 2])
def test_lanes_may_run_in_any_order(seed):
    with simulate(check=True, seed=seed):
        for heads, head_dim in ((32, 128), (4, 64)):
            q, k, v = make_qkv(1, heads, 1, 1, 80, head_dim, dtype=torch.float16)
            check_flash_decode(q, k, v, device="cpu")


@pytest.mark.parametrize("kv_heads, head_dim, page", [(8, 64, 8), (1, 128, 256)])
def test_pages_cost_few_loads(kv_heads, head_dim, page):
    q, k, v = make_qkv(1, 8, kv_heads, 1, 1024, head_dim, dtype=torch.float16)

    def loads(keys, values, where):
        with simulate(count=True) as run:
            decode(q, keys, values, num_splits=1, **where)
        return run.counters["flash_decode"].loads["device"]

    contiguous = loads(k, v, {})
    keys, values, where = paged(k, v, [1024], page)
    where["block_table"] = where["block_table"][:, : 1024 // page]
    assert contiguous < loads(keys, values, where) <= 1.05 * contiguous


@pytest.mark.parametrize("num_splits, is_long", [(16, False), (1024, True)])
def test_partial_results_of_2_to_32_elements_have_long_offsets(num_splits, is_long):
    """out has 2^22 elements, so 1024 splits have 2^32."""
    q = torch.empty(1, 1, 1, 128).expand(16, 32, 64, 128)
    k = torch.empty(1, 1, 1, 128).expand(16, 4, 4096, 128)
    defines = launch_of("flash_decode", q, k, k, num_splits=num_splits)["defines"]
    assert ("LONG_OFFSETS" in defines) == is_long
