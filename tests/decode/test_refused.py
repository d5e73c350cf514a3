"""Errors of flash_decode and decode_step, also for meta tensors. A cache stays unchanged."""

import pytest
import torch

from tests.attention.held_cases import case
from tests.helpers.cases import each_case
from tests.helpers.judged import arguments
from tests.helpers.memory import same_memory
from tests.helpers.refused import refused, refused_alike, without_data
from tests.helpers.steps import step
from torch_metal_attn.testing.judge import ints

SIZES = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 64, "kv_length": 70}
PAIRS = ((3, 3), (0, 0), (5, 5), (1, 1))
CALLS = {
    "dense": case(call="flash_decode", q_length=4, seqused_k=(60, 70), **SIZES),
    "packed": case(call="flash_decode", q_length=1, q_lengths=(3, 4), seqused_k=(60, 70), **SIZES),
    "step": step(length=4, capacity=32, leftpad_k=(0, 0)),
    "packed step": step(packed=PAIRS, lengths=(13, 20, 2, 9), capacity=32),
    "step in pages": step(length=4, capacity=32, cache="paged", page=8),
    "packed step in pages": step(
        packed=((3, 3), (2, 0)), lengths=(13, 20), capacity=32, cache="paged", page=8
    ),
}
LISTS, TREE = {"indices": torch.zeros(1, 1, 4, 4).int()}, {"parents": ints(-1, 0, 0, 1)}
SEEN = torch.eye(4, dtype=torch.bool)
# Token 2 sees token 1, but only one of these tokens sees token 0.
INVALID_FORESTS = [SEEN.flatten().index_fill(0, ints(9, n).long(), True).view(4, 4) for n in (4, 8)]
CODES = {f"{n}_cache": torch.zeros(2, 2, 32, 64, dtype=torch.int8) for n in "kv"}
CODES |= {f"{n}_scale": torch.zeros(2, 2, 32, 2).half() for n in "kv"}
NO_ROWS = {n: torch.zeros(2, 2, 0, 64).half() for n in "kv"}
ROTATED = dict.fromkeys(("k_rotary_cos", "k_rotary_sin"), torch.ones(70, 8))
NEW_ENDS = {"cu_seqlens_k_new": ints(0, 3, 3, 8, 9)}
OTHER_DTYPE = "q has dtype float32 and k float16; they must be the same"

# A call, the changes to its arguments, and the beginning of the error.
SHAPES = [
    ("dense", {"num_splits": 1025}, "num_splits is 1025; it must be 0"),
    (
        "dense",
        {"dropout_p": 0.5, "rng_state": torch.tensor([1, 2])},
        "dropout_p is 0.5; flash_decode has no dropout",
    ),
    ("dense", ROTATED, "k_rotary_cos is given; flash_decode has no rotation of k"),
    # Lists of keys
    ("dense", {"indices": LISTS["indices"][:, :, :2]}, r"indices .*; .* \(1 or 2, 1 or 2, 4, entr"),
    ("dense", {"indices": torch.zeros(1, 2, 4, 4)}, "indices has dtype float32; it must be int32"),
    ("dense", LISTS | {"kv_block_size": 129}, "kv_block_size is 129; it must be in 1..128"),
    ("dense", LISTS | {"q_block_size": 0}, "q_block_size is 0; it must be in 1.."),
    ("dense", {"kv_block_size": 8}, "kv_block_size is 8 and q_block_size 1 without indices; leave"),
    *(
        ("dense", LISTS | {name: value}, f"{name} is given with indices, which do not support it")
        for name, value in (
            ("attn_mask", torch.ones(70, dtype=torch.bool)),
            ("attn_bias", torch.zeros(70)),
            ("alibi_slopes", torch.zeros(4)),
        )
    ),
    # Packed queries
    ("packed", {"max_seqlen_q": -1}, "max_seqlen_q is -1; it must be in 0"),
    ("packed", {"cu_seqlens_q": ints(0, 7), "max_seqlen_q": 7}, "k has a batch of 2 and cu_seqle"),
    ("packed", {"cu_seqlens_q": None}, "q has 3 dimensions"),
    ("packed", {"cu_seqlens_q": torch.tensor([0, 3, 7])}, "cu_seqlens_q has dtype int64"),
    ("packed", LISTS, r"indices has shape \(1, 1, 4, 4\); it must be \(1 or 1, 1 or 2, 7, entr"),
    (
        "packed",
        LISTS | {"q_block_size": 2},
        "q_block_size is 2 with cu_seqlens_q; it must be 1, because each packed query has a list",
    ),
    # Trees
    ("dense", {"parents": torch.tensor([-1, 0, 0, 1])}, "parents has dtype int64"),
    ("dense", {"parents": ints(-1, 0, 0)}, r"parents has shape \(3,\)"),
    ("dense", {"parents": ints(*[-1] * 12).view(3, 4)}, r"parents has shape \(3, 4\)"),
    ("dense", TREE | {"tree_mask": SEEN}, "parents and tree_mask are given; give one of them"),
    ("dense", {"tree_mask": SEEN.int()}, "tree_mask has dtype int32"),
    ("dense", {"tree_mask": SEEN[:3]}, r"tree_mask has shape \(3, 4\)"),
    ("dense", TREE | {"q_offset": 3}, "q_offset is given with parents; leave it out"),
    ("dense", TREE | {"alibi_slopes": torch.ones(4)}, "alibi_slopes is given with parents; slope"),
    ("dense", TREE | LISTS, "indices is given with parents; give"),
    (
        "dense",
        {"q": torch.zeros(2, 4, 65, 64).half(), "parents": ints(*[-1] * 65)},
        "parents is given and a sequence has up to 65 queries; a tree has at most 64",
    ),
    ("packed", {"parents": ints(*[-1] * 6)}, r"parents has shape \(6,\); it must be \(7,\)"),
    ("packed", {"tree_mask": SEEN}, r"tree_mask has shape \(4, 4\); it must be \(7"),
    # Steps
    ("step", NO_ROWS, "no new rows"),
    ("step", {"q": torch.zeros(2, 4, 4, 32).half()}, "q has a head dim|k has a head dim"),
    ("step", {"q": torch.zeros(2, 4, 4, 64)}, OTHER_DTYPE),
    ("step", {"q": torch.zeros(2, 4, 4, 64)} | CODES, OTHER_DTYPE),
    ("step", {"q": torch.zeros(2, 4, 3, 64).half(), "parents": ints(-1, 0, 0)}, "each new row"),
    ("packed step", {"cu_seqlens_k_new": ints(0, 3, 3, 8)}, "cu_seqlens_k_new has shape"),
    ("packed step", NEW_ENDS | {"cu_seqlens_q": None}, "cu_seqlens_k_new is given"),
]
VALUES = [
    *(
        (
            "dense",
            {"indices": ints(*[0] * 9, entry, 0, 0).view(1, 1, 4, 3), "kv_block_size": 8},
            rf"indices\[0, 0, 3, 0\] is {entry}; it must be in 0..8, or -1 for no entry",
        )
        for entry in (-2, 9, 2**31 - 1, -(2**31))
    ),
    ("packed", {"max_seqlen_q": 3}, "cu_seqlens_q has a sequence of 4 rows and max_seqlen_q is 3"),
    ("dense", {"parents": ints(0, 0, 0, 1)}, "parents is 0 for token 0 of sequence 0; it must be"),
    ("dense", {"parents": ints(-1, 0, -2, 1)}, "parents is -2 for token 2 of sequence 0; it must"),
    (
        "dense",
        {"tree_mask": SEEN & (torch.arange(4) != 2)},
        "tree_mask hides token 2 of sequence 0 from itself; the diagonal must be True",
    ),
    (
        "dense",
        {"tree_mask": torch.ones(4, 4, dtype=torch.bool)},
        "tree_mask shows token 1 to token 0 of sequence 0; a token may see only itself",
    ),
    ("dense", TREE | {"seqused_k": ints(60, 3)}, "sequence 1 has 4 queries in q and 3 keys; with"),
    ("dense", TREE | {"leftpad_k": ints(57, 3)}, "sequence 0 has 4 queries in q and 3 keys; with"),
    *(
        (
            "dense",
            {"tree_mask": x},
            "tree_mask is not a forest: token 2 of sequence 0 sees token 1, its",
        )
        for x in INVALID_FORESTS
    ),
    ("packed", {"parents": ints(-1, 0, 0, -1, 3, 0, 1)}, "parents is 3 for token 1 of sequence 1"),
    ("step", {"cache_seqlens": ints(13, 30)}, r"cache_seqlens\[1\] is 30"),
    ("step", {"cache_seqlens": ints(-1, 3)}, r"cache_seqlens\[0\] is -1"),
    ("step", TREE | {"leftpad_k": ints(0, 22)}, "sequence 1 has 4 queries in q and 2 keys"),
    ("packed step", {"cu_seqlens_k_new": ints(0, 3, 2, 8, 9)}, r"cu_seqlens_k_new\[2\] is 2"),
    ("packed step", {"cu_seqlens_k_new": ints(0, 3, 3, 8, 10)}, "_new is 10 and there are 9"),
    ("packed step", {"cache_seqlens": ints(13, 20, 30, 9)}, r"\[2\] is 30 and k has 5 new rows"),
    (
        "packed step",
        {"cu_seqlens_k_new": ints(0, 3, 4, 9, 9), "parents": ints(*[-1] * 9)},
        "each new row must have a query, and cu_seqlens_k_new",
    ),
    # Rows that one sequence writes and another one reads
    (
        "step in pages",
        {"block_table": ints(4, 1, 7, 5, 3, 1, 0, 8).view(2, 4)},
        "sequence 0 writes row 5 of page 1 of k_cache, and sequence 1 reads it in the same call",
    ),
    (
        "packed step in pages",
        {"block_table": ints(4, 1, 7, 5, 3, 7, 0, 8).view(2, 4), "cache_seqlens": ints(14, 20)},
        "sequence 0 writes row 0 of page 7 of k_cache, and sequence 1 reads it in the same call",
    ),
]


def calls(name, changes):
    changed = {n: x for n, x in (arguments(CALLS[name]) | changes).items() if x is not None}
    op = getattr(torch.ops.metal_attn, CALLS[name].call)
    return changed, lambda: op(**changed), lambda: op(**without_data(changed))


@each_case("name, changes, message", SHAPES)
def test_invalid_shapes_and_dtypes_are_refused(name, changes, message):
    _, with_data, without = calls(name, changes)
    refused_alike(message, with_data, without)


@each_case("name, changes, message", VALUES)
def test_invalid_values_are_refused(name, changes, message):
    tensors, call, _ = calls(name, changes)
    written = [tensors[n] for n in ("k_cache", "v_cache") if n in tensors]
    before = [same_memory(x) for x in written]
    with refused(message):
        call()
    for x, was in zip(written, before, strict=True):
        assert torch.equal(x.view(torch.int16), was.view(torch.int16))


@each_case(
    "table, left",
    [
        # Shared pages are full and before the new rows, outside of the window, or after the keys.
        ((4, 1, 7, 5, 4, 9, 0, 8), -1),
        ((4, 1, 7, 5, 1, 9, 0, 8), 3),
        ((4, 1, 7, 5, 3, 9, 0, 1), -1),
    ],
)
def test_pages_that_two_sequences_may_share(table, left):
    changes = {"block_table": ints(*table).view(2, 4), "window_size_left": left}
    calls("step in pages", changes)[1]()


@each_case(
    "changes, message",
    [
        (lambda t: {"v_cache": t["k_cache"]}, "v_cache is the first 64 columns of k_cache"),
        (lambda t: {"q": t["k_cache"][:, :, 3:8]}, "q may share elements with k_cache, which is w"),
        (lambda t: {"q": t["v_cache"][:, :, 3:8]}, "q may share elements with v_cache, which is w"),
        (
            lambda t: {"k_cache": t["k_cache"].clone().requires_grad_()},
            "k_cache is a leaf that requires grad",
        ),
    ],
)
def test_overlapping_memory_is_refused(changes, message):
    tensors = arguments(CALLS["step"])
    with pytest.raises((ValueError, NotImplementedError), match=message):
        torch.ops.metal_attn.decode_step(**tensors | changes(tensors))


def test_more_rows_than_the_shader_counts_are_refused():
    """In the second case all rows fit in 32 bits, but one more step does not."""
    k = torch.zeros(1, 1, 1, 8)
    for queries in (2**25, 2**25 - 512):
        q = k.expand(1, 64, queries, 8)
        with pytest.raises(ValueError, match=rf"{queries} queries of 64 heads .* up to 1073741824"):
            torch.ops.metal_attn_explain.flash_decode(q, k, k)
