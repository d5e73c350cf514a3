"""decode_step appends rows to a cache and attends to it, in one dispatch or two."""

import pytest
import torch

from tests.attention.flash_fwd_check import random_mask
from tests.attention.held_cases import hold
from tests.helpers.memory import check_equal, same_memory
from tests.helpers.steps import step, tensors_of
from torch_metal_attn import simulate
from torch_metal_attn.testing.judge import on

ops = torch.ops.metal_attn
PADDED = {"cache": "indexed", "leftpad_k": (0, 5), "length": 5, "rotary_columns": 32}
PADDED |= {"rotary_last": True, "causal": False}
ROWS_FIRST = {"cache": "paged", "cache_layout": ("order 021",)}
TREE = {"tree": "parents", "tree_by_sequence": True, "causal": False}
VALUES = {
    "one row": {"length": 1, "rotary_columns": 32, "rotary_interleaved": True},
    "splits": {"length": 5, "rotary_columns": 32, "num_splits": 3}
    | {"lengths": (13, 170), "capacity": 192},
    # A KV head has 256 rows, so the tile loops over the keys twice, and appends once.
    "more rows than a tile": {"length": 16, "heads": 16, "kv_heads": 1, "num_splits": 2}
    | {"rotary_columns": 32, "rotary_interleaved": True},
    # New keys cross the ends of pages.
    "pages": ROWS_FIRST | {"page": 3, "capacity": 66, "lengths": (6, 23), "rotary_columns": 64},
    # Each format of a cache, and each dtype of the rows.
    "q8_0": ROWS_FIRST | {"format": "q8_0", "dtype": "float32", "rotary_columns": 64},
    "q4_0": ROWS_FIRST | {"format": "q4_0", "dtype": "bfloat16", "rotary_columns": 64},
    "fp8_e4m3": {"format": "fp8_e4m3", "rotary_columns": 64},
    "float16 under float32": {"cache_dtype": "float16", "dtype": "float32", "rotary_columns": 64},
    "bfloat16 under float32": ROWS_FIRST
    | {"cache_dtype": "bfloat16", "dtype": "float32", "page": 8, "head_dim": 20, "v_head_dim": 20},
    "queries at one position": PADDED | {"by_token": False},
    "positions that include the padding": PADDED | {"rotary_from_leftpad": False},
    "other numbers of queries": {"packed": ((3, 3), (0, 2), (5, 5), (1, 4)), "cache": "paged"}
    | {"lengths": (13, 20, 2, 9), "format": "q4_0", "v_format": "fp8_e4m3", "rotary_columns": 32},
    # New rows of a tree are rotated by their depth, and then in blocks of columns.
    "trees over pages of codes": TREE
    | {"length": 6, "num_splits": 2, "format": "q8_0", "rotary_columns": 32}
    | {"cache": "paged", "page": 5, "capacity": 65},
    "packed trees": {"tree": "tree_mask", "packed": ((5, 5), (0, 0), (9, 9)), "causal": False}
    | {"lengths": (3, 17, 6), "leftpad_k": (1, 3, 0), "cache": "indexed", "rotary_columns": 32},
    "packed trees of rotated rows": {"tree": "parents", "packed": ((5, 5), (9, 9))}
    | {"lengths": (3, 17), "dtype": "float32", "format": "q4_0", "hadamard": 32}
    | {"rotary_columns": 64, "causal": False},
    "any strides and head dims": {"head_dim": 40, "v_head_dim": 11, "rotary_columns": 6}
    | {"layout": ("padded 3",), "cache_layout": ("padded 3",)},
}


@pytest.mark.parametrize("name", VALUES)
def test_values(name, device):
    length = {} if "packed" in VALUES[name] else {"length": 3}
    hold([step(**length | {"causal": True} | VALUES[name])], device)


def test_a_step_equals_append_kv_and_flash_decode(device):
    """Results have the bits of append_kv and flash_decode. Some options are not in `Step`."""
    options = {"window_size_left": 7, "causal": True, "attention_chunk": 8}
    options |= {"softcap": 2.0, "softmax_scale": 0.4, "num_splits": 1}
    options |= {"learnable_sink": torch.tensor([1.0, 0.0, -1.0, 2.0])}
    options |= {"attn_mask": random_mask(2, 4, 5, 32)}
    options |= {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])}
    options |= {"attn_bias": random_mask(4, 5, 32, dtype=torch.float32)}
    options = on(device, options)
    tensors = tensors_of(length=5, leftpad_k=(0, 5), cache="indexed", capacity=32)
    mine, theirs = ({n: same_memory(x).to(device) for n, x in tensors.items()} for _ in range(2))
    results = ops.decode_step(**mine, **options)
    where = {n: theirs[n] for n in ("cache_batch_idx", "leftpad_k")}
    new = {n: theirs[n] for n in ("k", "v", "k_cache", "v_cache", "cache_seqlens")}
    ops.append_kv(**new, **where)
    used = theirs["cache_seqlens"] + 5
    caches = theirs["k_cache"], theirs["v_cache"]
    expected = ops.flash_decode(theirs["q"], *caches, seqused_k=used, **where, **options)
    check_equal(*({n: x.cpu() for n, x in each.items()} for each in (mine, theirs)))
    for ours, other in zip(results, expected, strict=True):
        assert ours.isfinite().all()
        assert torch.equal(ours, other)


@pytest.mark.parametrize("num_splits, launches", [(1, 1), (4, 2)])
def test_splits_need_a_second_dispatch(num_splits, launches):
    tensors = tensors_of(length=1, rotary_columns=32, capacity=200, lengths=(100, 170))
    with simulate(record=True) as run:
        ops.decode_step(**tensors, num_splits=num_splits, causal=True, rotary_interleaved=True)
    kernels = [launch.kernel for launch in run.recorded]
    assert kernels == ["flash_decode", "merge_splits"][:launches]


@pytest.mark.parametrize("name", ["q", "k"])
def test_gradients_are_refused(name):
    plain, tensors = tensors_of(length=5), tensors_of(length=5)
    tensors[name].requires_grad_()
    results = ops.decode_step(**tensors)
    for result, expected in zip(results, ops.decode_step(**plain), strict=True):
        assert torch.equal(result, expected)
        with pytest.raises(NotImplementedError, match=f"decode_step .* {name} requires grad"):
            result.nan_to_num().sum().backward()
    assert tensors["k_cache"].requires_grad == (name == "k")
    assert not tensors["v_cache"].requires_grad
