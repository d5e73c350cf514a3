"""Counts of operations in the inner loop of flash_fwd."""

import pytest
import torch

from bench.bench_inner_loops import ours
from torch_metal_attn import simulate
from torch_metal_attn.runtime import shaders
from torch_metal_attn.testing.judge import ints


# At head dim 128, blocks of bfloat16 have 16 keys.
@pytest.mark.parametrize(
    "head_dim, dtype, q_dtype, loads",
    [
        (64, torch.float16, torch.float16, 66),
        (128, torch.bfloat16, torch.bfloat16, 132),
        (64, torch.bfloat16, torch.float32, 66),
    ],
)
def test_inner_loop(head_dim, dtype, q_dtype, loads):
    loop = ours("flash_fwd", head_dim, dtype, q_dtype=q_dtype)
    assert loop["MMA"] == head_dim
    assert loop["tg loads"] + loop["device loads"] <= loads
    assert loop["converts"] == 0
    assert loop["barriers"] <= 2.7
    assert loop["shuffles"] <= 2.7, "two per block"
    assert loop["exps"] <= 8 + 2.7 / 2, "one for each of a thread's scores, and one per block"


Q_LENGTH, BLOCK_K = 64, 32  # one threadgroup of eight SIMD groups of 8 queries


def counters(kv_length, **options):
    q = torch.randn(1, 1, Q_LENGTH, 64).half()
    k = torch.randn(1, 1, kv_length, 64).half()
    with simulate(count=True) as run:
        torch.ops.metal_attn.flash_fwd(q, k, k, **options)
    assert run.counters["flash_fwd"].threadgroups == 1
    return run.counters["flash_fwd"]


# Options, the first key that some query sees, and the end of these keys.
SEEN = {
    "causal": ({"causal": True, "q_offset": 0}, 0, 64),
    "window": ({"window_size_left": 100, "window_size_right": 50, "q_offset": 700}, 600, 814),
    "window of the last keys": ({"window_size_left": 100}, 1024 - 164, 1024),
    "two chunks": ({"attention_chunk": 100, "q_offset": 670}, 600, 800),
    "causal chunk": ({"attention_chunk": 512, "causal": True, "q_offset": 640}, 512, 704),
    "seqused_k": ({"seqused_k": ints(300), "leftpad_k": ints(0)}, 0, 300),
    "leftpad_k": ({"seqused_k": ints(1024), "leftpad_k": ints(724)}, 724, 1024),
    "window of seqused_k": ({"seqused_k": ints(500), "window_size_left": 30}, 406, 500),
    "nothing": ({"window_size_left": 5, "q_offset": 5000}, 0, 0),
}


@pytest.fixture
def votes_of_masks(monkeypatch):
    """Adds a vote to the code that hides keys, to count how often a SIMD group runs this code."""
    text = shaders.source("flash_fwd")
    begin = "METAL_FUNC void apply(thread RegisterTile<float, ROWS, COLUMNS>& scores, int row,"
    start = text.index("const thread {", text.index(begin)) + len("const thread {")
    counted = f"{text[:start]} if (simd_any(column < 0)) {{ return; }} {text[start:]}"
    monkeypatch.setattr(shaders, "source", lambda family: counted)


@pytest.mark.parametrize("case", SEEN)
@pytest.mark.usefixtures("votes_of_masks")  # so that the tests share compiled kernels
def test_work_is_proportional_to_the_keys_that_are_seen(case):
    """A block is not staged if no query of the tile sees it, wherever the block is."""
    options, first, end = SEEN[case]
    short, long = (counters(n, **options) for n in (1024, 1920))
    assert short == long
    blocks = -(-end // BLOCK_K) - first // BLOCK_K
    assert short.threadgroup_barriers == 2 * blocks
    keys = blocks * BLOCK_K
    assert short.stores["threadgroup"] * 16 == keys * 2 * 64 * 2, "K and V, 64 columns of 2 bytes"
    loaded = min(end, 1024) - first
    rest = Q_LENGTH * 64 * 2 + 16 * 128  # q, and a few lengths that each thread loads
    assert short.load_bytes["device"] <= keys * 2 * 64 * 2 + rest
    # A SIMD group skips the products of blocks that its own queries do not see.
    whole = Q_LENGTH / 8 * keys / 8 * (8 + 8)
    assert short.matrix_operations <= whole
    assert loaded == 0 or short.matrix_operations >= whole / 4


def test_a_simdgroup_skips_blocks_that_its_queries_do_not_see():
    diagonal = counters(64, causal=True, q_offset=0)
    # Queries 0-31 see one block of 32 keys, queries 32-63 two; products with K and with V.
    assert diagonal.matrix_operations == (4 * 1 + 4 * 2) * BLOCK_K / 8 * (8 + 8)


@pytest.mark.parametrize("kv_length", [1024, 1920])
@pytest.mark.usefixtures("votes_of_masks")
def test_blocks_that_are_wholly_visible_run_no_mask_code(kv_length):
    def votes(**options):
        return counters(kv_length, **options).votes

    assert votes() == 0
    assert votes(causal=True, q_offset=kv_length) == 0
    # Each SIMD group's diagonal crosses one block.
    assert votes(causal=True, q_offset=kv_length // 2) == 8
    assert votes(window_size_left=200, window_size_right=99, q_offset=500) <= 8 * (2 + 2)
    for first, end, crossed in ((0, 32, 0), (0, 5, 1), (64, 0, 0), (65, 0, 1), (65, 5, 2)):
        lengths = {"seqused_k": ints(kv_length - end), "leftpad_k": ints(first)}
        assert votes(**lengths) == 8 * crossed
    assert votes(attention_chunk=512, q_offset=512) == 0
