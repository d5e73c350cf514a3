"""Decoding with trees of new tokens, as speculation drafts them."""

import pytest
import torch

from tests.attention.flash_fwd_options import ints
from tests.attention.held_cases import case, hold
from tests.decode import tree_problems as problems
from tests.helpers.judged import arguments
from tests.helpers.memory import same_memory
from tests.helpers.steps import step
from torch_metal_attn import explain, simulate
from torch_metal_attn.testing.judge import on
from torch_metal_attn.tools.tune import tiles

ops = torch.ops.metal_attn


def copied(tensors):
    return {name: same_memory(x) for name, x in tensors.items()}


STEPS = {
    "pages of codes": {"tree": "parents", "tree_by_sequence": True, "length": 6, "num_splits": 2}
    | {"cache": "paged", "page": 5, "capacity": 65, "format": "q8_0", "rotary_columns": 32},
    "packed": {"tree": "tree_mask", "packed": ((5, 5), (0, 0), (9, 9)), "lengths": (3, 17, 6)}
    | {"leftpad_k": (1, 3, 0), "cache": "indexed", "rotary_columns": 32},
    # New rows of a tree are rotated by their depth, and then in blocks of columns.
    "packed, of rotated rows": {"tree": "parents", "packed": ((5, 5), (9, 9)), "lengths": (3, 17)}
    | {"dtype": "float32", "format": "q4_0", "hadamard": 32, "rotary_columns": 64},
}


@pytest.mark.parametrize("name", STEPS)
def test_steps(name, device):
    hold([step(**STEPS[name])], device)


def test_rules():
    """The unchanged kernels of test_tree_mutants.py pass the other problems."""
    with simulate(check=True):
        problems.rules()


def test_reference():
    """The CPU kernels compute the same by masks, without the simulator."""
    problems.trees()
    problems.windows()
    problems.rules()
    problems.rotated_steps()


def test_many_rows_of_a_kv_head(device):
    shape = {"heads": 8, "kv_heads": 1, "head_dim": 64, "dtype": torch.float16}
    both = problems.random_tree(64), problems.random_tree(9)
    problems.check_tree(both, (70, 90), device, shape=shape, num_splits=2)


def test_room_in_threadgroup_memory(device):
    """With the tree, keys that SIMD groups exchange would need 28 bytes more than there are."""
    tile = "ROW_FRAGMENTS=2 KEY_FRAGMENTS=2 SPANS=1 VECTOR_ROWS=0"
    shape = {"heads": 8, "kv_heads": 1, "head_dim": 128, "dtype": torch.float32}
    with tiles.forced({"flash_decode": tile}):
        problems.check_tree((problems.FORK,), (20,), device, shape=shape)


def test_latents(device):
    """Values that are the first columns of keys."""
    shape = {"heads": 16, "kv_heads": 1, "head_dim": 192, "dtype": torch.bfloat16}
    both = (problems.FORK, problems.FOREST)
    problems.check_tree(both, (50, 6), device, shape=shape, latent=True)


def test_strides(device):
    """Trees that are parts of wider tensors."""
    (q, k, v), options = problems.packed_q((6, 6), (60, 70), spare=0)
    q = q.unflatten(0, (2, 6)).transpose(1, 2)
    given = {"q": q, "k": k, "v": v, "seqused_k": options["seqused_k"]}
    for form in ("parents", "tree_mask"):
        tree = problems.tree_of((problems.FORK, problems.FOREST), form, "each")[form]
        wide = torch.ones(2, *(size + 5 for size in tree.shape[1:]), dtype=tree.dtype)
        part = wide[(slice(None), *(slice(2, 8) for _ in tree.shape[1:]))]
        part.copy_(tree)
        there = on(device, given)
        expected = ops.flash_decode(**there, **on(device, {form: tree}))
        found = ops.flash_decode(**there, **{form: part if device == "cpu" else part.to(device)})
        assert all(map(torch.equal, found, expected))


def test_no_queries(device):
    """No sequence has any; and there are no sequences. With trees and without."""
    for lengths, used in (((0, 0), (5, 6)), ((), ())):
        q, (k, v) = torch.zeros(0, 4, 64), torch.zeros(2, len(lengths), 2, 8, 64)
        given = {"cu_seqlens_q": torch.zeros(len(lengths) + 1).int(), "seqused_k": ints(*used)}
        for tree in ({}, {"parents": ints()}, {"tree_mask": torch.zeros(0, 0, dtype=torch.bool)}):
            out, lse = ops.flash_decode(**on(device, {"q": q, "k": k, "v": v} | given | tree))
            assert (out.shape, lse.shape) == (q.shape, (4, 0))


FUNCTION = {"call": "flash_attn_with_kvcache", "tree": "parents", "tree_by_sequence": True}


def test_with_kvcache(device):
    """flash-attn's function, with new rows and then without."""
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 64, "kv_length": 64}
    new = step(length=6, rotary_columns=32, causal=True, **FUNCTION)
    hold([new, case(q_length=6, seqused_k=(19, 26), **sizes, **FUNCTION)], device)


def test_explain():
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 64, "q_length": 4, "num_splits": 1}
    given = arguments(case(call="flash_decode", **sizes))
    text = str(explain(ops.flash_decode, **given, parents=ints(*problems.FORK[:4])))
    assert "of its new tokens a query sees those that parents says" in text
    assert "new tokens" not in str(explain(ops.flash_decode, **given))
