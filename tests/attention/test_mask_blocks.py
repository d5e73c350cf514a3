"""Blocks that a bool attn_mask hides from all queries of a tile cost nothing and change no bit."""

from functools import lru_cache

import pytest
import torch

from tests.flex.flex_check import assert_within_twice
from tests.flex.test_flex_counts import KERNELS, work
from tests.helpers.mutants import mutant_tests, plant
from torch_metal_attn import explain, scaled_dot_product_attention, simulate

HEAD_DIM = 16
# This change to the shader makes every block partial, which must not change results.
EVERY_BLOCK_PARTIAL = ("state.shows ? (state.hides ? 2 : 1) : 0", "2")


def seen(q_length, kv_length, window=256):
    """A causal window. Query 3, and all queries of a tile, see no key."""
    position = torch.arange(q_length)[:, None] + kv_length - q_length
    key = torch.arange(kv_length)
    mask = (position >= key) & (position - key < window)
    mask[3] = False
    mask[64:128] = False
    return mask


def per_head():
    """Two heads see different keys. 8 keys of the mask are read at a time."""
    mask = seen(264, 2048)
    return torch.stack((mask, mask.roll(-700, 1) & (torch.arange(2048) % 5 > 0)))[None], 1, 2


def transposed():
    """Two sequences see different keys. The mask's queries are contiguous, and lengths are odd."""
    mask = torch.zeros(2, 2047, 131, dtype=torch.bool).mT
    mask[0], mask[1] = seen(131, 2047), seen(131, 2047).roll(500, 1)
    return mask[:, None], 2, 2


def padded():
    keys = torch.arange(2048) < torch.tensor([100, 777])[:, None]
    return keys[:, None, None], 2, 4


PROBLEMS = {"per head": per_head, "transposed": transposed}


def operands(mask, batch, heads):
    torch.manual_seed(0)
    q_length = 65 if mask.shape[-2] == 1 else mask.shape[-2]
    shapes = (q_length, mask.shape[-1], mask.shape[-1])
    return [torch.randn(batch, heads, n, HEAD_DIM).half().requires_grad_() for n in shapes]


def results(q, k, v, mask, attention=scaled_dot_product_attention):
    out = attention(q, k, v, attn_mask=mask)
    return [out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))]


def simulated(problem, **options):
    with simulate(**options):
        return results(*operands(*problem), problem[0])


def check(actual, problem):
    exact, rounded = (
        results(
            *(x.detach().to(dtype).requires_grad_() for x in operands(*problem)),
            problem[0],
            torch.nn.functional.scaled_dot_product_attention,
        )
        for dtype in (torch.float64, torch.float16)
    )
    for ours, right, theirs in zip(actual, exact, rounded, strict=True):
        assert_within_twice(ours, right, theirs)


@pytest.mark.parametrize("name", PROBLEMS)
def test_skipped_blocks_change_no_bit(name, monkeypatch):
    problem = PROBLEMS[name]()
    actual = simulated(problem, check=True)
    check(actual, problem)
    plant(monkeypatch, "mask_blocks", *EVERY_BLOCK_PARTIAL)
    assert all(map(torch.equal, actual, simulated(problem, check=True)))


@lru_cache(maxsize=1)
def expected():
    return simulated(per_head(), check=True)


@pytest.fixture
def expected_before_the_fault():
    expected()


def same_output():
    problem = per_head()
    out = scaled_dot_product_attention(*operands(*problem), problem[0])
    assert torch.equal(out, expected()[0])


def same_results():
    problem = per_head()
    assert all(map(torch.equal, results(*operands(*problem), problem[0]), expected()))


# Faults in mask_blocks, which makes the lists, and in the kernels that read the lists.
MUTANTS = {
    same_output: """
        mask_blocks: last block dropped: params.blocks - first_block{~=> - 1~})
        mask_blocks: partial block marked as full: {~(state.hides ? 2 : 1) => 1~}
        mask_blocks: list of the tile before: owned = threadgroup_position.x{~=> / 2~};
        mask_blocks: head 0's list: {~threadgroup_position.y * params.head_stride => 0~}
        mask_blocks: sides swapped: params.along_inner ? {~block : owned => owned : block~}
        mask_blocks: entries of the last 32 blocks alone: count {~+= => =~} int(simd_sum
        mask_blocks: rows of a block skipped: word < {~rows * =>~} columns
    """,
    same_results: """
        flash_fwd: another tile's list: tile.place.first_query / LIST_Q_BLOCK{~=> / 2~},
        flash_fwd: another head's list: batch, {~head => 0~}, tile.place.first_query / LIST_Q_BLOCK
        flash_fwd, flash_bwd_dq, flash_bwd_dkv: full and partial swapped:
            masked = {~=> !~} mask_block_is_partial(block)
        flash_bwd_dq: another tile's list: queries.place.first_query / LIST_Q_BLOCK{~=> / 2~},
        flash_bwd_dq: list of head 0: batch, {~head => 0~}, queries.place.first_query / LIST_Q_BLOCK
        flash_bwd_dkv: another tile's list: keys.tile_key / LIST_KV_BLOCK{~=> / 2~},
        flash_bwd_dkv: another head's list: batch, {~head => 0~}, keys.tile_key / LIST_KV_BLOCK
    """,
}

test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(
    MUTANTS, fixtures=["expected_before_the_fault"]
)


def tile(defines):
    """The queries and keys of a block."""
    groups = int(defines["SIMDGROUPS"]) // int(defines.get("COLUMN_SIMDGROUPS", 1))
    rows = 8 * int(defines["ROW_FRAGMENTS"]) * groups
    if "BLOCK_Q" in defines:
        return int(defines["BLOCK_Q"]), rows
    return rows, int(defines["BLOCK_K"])


def shown_blocks(mask, queries, keys):
    sizes = (queries, keys)
    return int(torch.nn.functional.max_pool2d(mask[None].float(), sizes, ceil_mode=True).sum())


def test_work_is_proportional_to_the_blocks_that_are_shown(cores):
    """A window of 256 in 4096 keys. The cost of a block is measured with some partial blocks."""
    cores(1)  # so that long and short problems have the same tiles
    window = seen(256, 4096)
    some = torch.zeros_like(window)
    some[::3, 1024:1280] = True
    result = {}
    for name, mask in (("none", some & False), ("some", some), ("window", window)):
        q, k, v = operands(mask, 1, 1)
        with simulate(count=True) as run:
            results(q, k, v, mask)
        result[name] = run.counters
    explained = explain(q, k, v, attn_mask=window, backward=True)
    kernels = explained.kernels | explained.training.kernels
    for name in KERNELS:
        sizes = tile(kernels[name].specialisation)
        base = work(result["none"][name])
        cost_of_a_block = (work(result["some"][name]) - base) / shown_blocks(some, *sizes)
        visited = shown_blocks(window, *sizes)
        assert visited < window.numel() / (sizes[0] * sizes[1]) / 6
        assert (work(result["window"][name]) <= 1.05 * (base + visited * cost_of_a_block)).all()
        assert (work(result["window"][name])[2] == visited * cost_of_a_block[2]).all()
    # Each of the three kernels has a pre-pass that reads the mask once, 8 elements at a time.
    assert result["window"]["mask_blocks"].loads["device"] == 3 * window.numel() / 8
    assert result["window"]["mask_blocks"].load_bytes["device"] == 3 * window.numel()


def test_blocks_that_are_shown_in_full_do_not_load_the_mask():
    mask = torch.ones(256, 4096, dtype=torch.bool)
    loads = []
    for first in (True, False):  # a block is partial if one element is hidden
        mask[::64, ::8] = first
        mask[:, 64:] = False
        with simulate(count=True) as run:
            scaled_dot_product_attention(*operands(mask, 1, 1), mask)
        loads.append(run.counters["flash_fwd"].loads["device"])
    # The mask is read two neighbouring elements at a time.
    assert loads[1] - loads[0] == 256 * 64 / 2


def explained(mask, heads=2, **options):
    q, k = (torch.zeros(1, heads, n, HEAD_DIM, dtype=torch.float16) for n in mask.shape)
    return explain(q, k, k, attn_mask=mask, backward=True, **options)


def test_explain_says_what_is_skipped():
    mask = torch.ones(264, 2048, dtype=torch.bool)
    actual = explained(mask)
    assert list(actual.kernels) == ["mask_blocks", "flash_fwd"]
    assert actual.kernel == "flash_fwd"
    assert actual.kernels["mask_blocks"].specialisation == {"WORD": "uint2"}
    assert "attn_mask hides are skipped: mask_blocks reads 540672 bytes" in actual.reason
    for name, kernel in actual.training.kernels.items():
        assert "attn_mask hides are skipped" in kernel.reason
        queries, keys = tile(kernel.specialisation)
        blocks = -(-264 // queries), -(-2048 // keys)
        lists, entries = blocks if name == "flash_bwd_dq" else blocks[::-1]
        # A list has an int32 for its length and one for each entry.
        assert actual.training.allocated["mask_blocks"] >= 4 * lists * (1 + entries)


@pytest.mark.parametrize(
    "mask, options, why",
    [
        (torch.ones(264, 500, dtype=torch.bool), {"heads": 64}, "as the call is short"),
        (torch.ones(64, 2040, dtype=torch.bool), {}, "as the call is short"),
        (torch.ones(264, 2040, dtype=torch.bool), {"causal": True}, "as causality"),
        (torch.ones(264, 2047, dtype=torch.bool), {}, "as a pre-pass would read too much"),
    ],
)
def test_masks_for_which_a_pre_pass_does_not_pay(mask, options, why):
    actual = explained(mask, **options)
    assert list(actual.kernels) == ["flash_fwd"]
    assert "MASK_BLOCKS" not in actual.specialisation
    assert f"attn_mask hides are computed, {why}" in actual.reason
    assert "mask_blocks" not in actual.training.allocated


def test_tensor_tiles_read_lists_of_blocks(gpu):
    gpu("Apple M5")
    problem = padded()
    with simulate(check=True) as run:
        check(results(*operands(*problem), problem[0]), problem)
    assert {f"{kernel}_tensor" for kernel in KERNELS} | {"mask_blocks"} <= set(run.counters)
