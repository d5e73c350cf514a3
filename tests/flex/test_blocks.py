"""The lists of a BlockMask: block sizes, broadcasting, full blocks, strides and invalid entries."""

from functools import partial

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

import torch_metal_attn
from tests.attention.autograd_check import loss_of
from tests.attention.test_flash_fwd_device_lengths import after_the_checks, results_of
from tests.flex import flex_check
from tests.flex.flex_check import (
    BLOCK,
    SIZES,
    alibi_of_slopes,
    block_mask,
    causal,
    check_flex,
    check_flex_gradients,
    rand,
    sliding_window_causal,
    tanh_softcap,
)
from tests.helpers.mutants import mutant_tests
from torch_metal_attn import simulate


@pytest.mark.parametrize("block", [(1016, 8), (8, 1024)])
def test_block_sizes(block):
    check_flex(*rand(), None, block_mask(sliding_window_causal, block=block))


@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("heads", [None, 4])
def test_broadcasting(batch, heads):
    """With GQA, h is the query head. Some queries see no key."""
    factors = torch.tensor([batch is not None, heads is not None]).int()

    def mod(b, h, q_idx, kv_idx):
        shown = kv_idx % 7 > b * factors[0 * b] + h * factors[0 * b + 1]
        return shown & (q_idx % 3 != 0)

    def score_mod(score, b, h, q_idx, kv_idx):
        return alibi_of_slopes(score, b, h % 2, q_idx, kv_idx)

    qkv = rand(batch=2, heads=4, kv_heads=2)
    check_flex_gradients(*qkv, score_mod, block_mask(mod, batch, heads))


def test_keys_may_have_one_batch():
    q, k, v = rand(batch=2)
    actual, _ = check_flex(q, k[:1].expand_as(k), v[:1].expand_as(v), None, block_mask())
    with simulate(check=True):
        out = torch_metal_attn.flex_attention(q, k[:1], v[:1], block_mask=block_mask())
    assert torch.equal(out, actual)


def test_full_blocks_may_be_listed_as_partial():
    blocks = block_mask().to_dense()
    indices = blocks.sort(dim=-1, descending=True, stable=True).indices.int()
    mask = BlockMask.from_kv_blocks(
        blocks.sum(-1).int(), indices, BLOCK_SIZE=BLOCK, mask_mod=causal, seq_lengths=SIZES
    )
    assert mask.full_kv_num_blocks is None
    check_flex(*rand(), None, mask)


def test_a_slice_for_decoding():
    q, k, v = rand()
    whole, last = block_mask(), SIZES[0] // BLOCK[0] - 1
    mask = whole[:, :, last]
    first = last * BLOCK[0]
    q = q[:, :, first:]
    with pytest.raises(RuntimeError, match="slice"):
        torch_metal_attn.flex_attention(q, k, v, block_mask=mask)
    mask.mask_mod = lambda b, h, q_idx, kv_idx: whole.mask_mod(b, h, q_idx + first, kv_idx)
    mask.seq_lengths = (q.shape[2], SIZES[1])
    check_flex(q, k, v, None, mask)


def test_lists_of_any_strides():
    mask = block_mask(causal)
    for name in BlockMask._TENSOR_ATTRS:
        tensor = getattr(mask, name)
        if tensor is not None:
            spread = tensor.new_full((*tensor.shape, 3), 10**6)
            spread[..., 1] = tensor
            setattr(mask, name, spread[..., 1])
    check_flex(*rand(), None, mask)


def only_in_partial_blocks(b, h, q_idx, kv_idx):
    """Causal, but False in full blocks, which must not call mask_mod."""
    first_query, last_key = q_idx // BLOCK[0] * BLOCK[0], kv_idx // BLOCK[1] * BLOCK[1] + 31
    return (q_idx >= kv_idx) & (first_query < last_key)


def contradictory():
    return flex_check.contradictory(block_mask(), only_in_partial_blocks)


def check_full_and_partial():
    check_flex(*rand(), None, block_mask(), ours=(None, contradictory()))


def test_full_and_partial():
    check_flex_gradients(*rand(), None, block_mask(), ours=(None, contradictory()))


def test_unlisted_blocks_are_not_seen():
    mask = contradictory()
    mask.full_kv_num_blocks = torch.zeros_like(mask.full_kv_num_blocks)
    seen = block_mask(only_in_partial_blocks)
    check_flex(*rand(), None, seen, ours=(None, mask))


def invalid_entries_are_nan():
    """An entry of the last list that is out of range makes only the rows of that list NaN."""
    qkv = rand()
    mask = contradictory()
    attend = partial(torch_metal_attn.flex_attention, *qkv, block_mask=mask)
    expected = attend()
    expected[:, :, -(SIZES[0] % BLOCK[0] or BLOCK[0]) :] = torch.nan
    for bad in (-1, SIZES[1] // BLOCK[1]):
        after = mask.kv_indices.clone()
        after[..., -1, 0] = bad
        actual = results_of(attend, mask.kv_indices, after.tolist())
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


# A fault changes results, or reads after the end of a list.
FAULT_KINDS = (None, "out_of_bounds")
LIST_MUTANTS = """
    full blocks are masked: masked = {~next_entry < partial.count => true~};
    partial blocks are not: {~blocks.masked => false~},
    off by one in the list: full.entry({~=> 1 +~} next_entry
    off by one block: return {~block => max(block - 1, 0)~} * BLOCK;
    one block too few: while (next_entry < count{~=> - 1~})
    another row's list: {~Offset(list) * Offset(params.index_strides.query) => 0~}
"""
MUTANTS = {
    check_full_and_partial: LIST_MUTANTS,
    invalid_entries_are_nan: """
        entry before the first block: {~block >= 0 && =>~} block < blocks
        entry after the last block: block {~< => <=~} blocks
        entries out of range skipped: {~impossible = true; =>~}
    """,
}


def an_odd_block_size():
    mask = block_mask(sliding_window_causal, block=(24, 40))
    check_flex_gradients(*rand(), tanh_softcap, mask)


GRADIENT_MUTANTS = {
    an_odd_block_size: """
        flash_bwd_dq, flash_bwd_dkv: slope forgotten: {~gradients.multiply(slopes); =>~}
    """
}

test_mutant_is_caught, test_the_unchanged_kernel_passes = mutant_tests(
    MUTANTS, "flash_fwd", fault=FAULT_KINDS, together=True
)
test_mutant_of_gradients_is_caught, test_the_unchanged_gradients_pass = mutant_tests(
    GRADIENT_MUTANTS
)


@pytest.mark.parametrize("backward", [False, True])
def test_entries_out_of_range_are_not_read(backward, monkeypatch):
    """On mps only the kernel checks lists. It gives NaN and reads nothing out of bounds."""
    mask = contradictory()
    leaves = [x.requires_grad_() for x in rand()]

    def attend():
        return torch_metal_attn.flex_attention(*leaves, block_mask=mask, return_lse=True)

    with simulate(check=True):
        actual = attend() if backward else None
        for name in ("kv_indices", "full_kv_indices", "q_indices", "full_q_indices"):
            entries = getattr(mask, name)
            after_the_checks(monkeypatch, entries, (1000 + entries).tolist())
        actual = torch.autograd.grad(loss_of(*actual), leaves) if backward else attend()
    assert all(x.isnan().all() for x in actual)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("kv_indices", 3, "lists block 3"),
        ("kv_indices", -1, "lists block -1"),
        ("full_kv_indices", 4, "full_kv_indices lists block 4"),
        ("kv_num_blocks", 4, "kv_num_blocks has the count 4"),
        ("full_kv_num_blocks", -2, "has the count -2"),
    ],
)
def test_invalid_lists_are_refused(name, value, message):
    mask = block_mask(causal)
    if name == "full_kv_indices":
        mask.full_kv_num_blocks = mask.full_kv_num_blocks.clamp(min=1)
    getattr(mask, name).flatten()[:1].fill_(value)
    with simulate(check=True), pytest.raises(ValueError, match=message):
        torch_metal_attn.flex_attention(*rand(), block_mask=mask)
    with pytest.raises(ValueError, match=message):
        torch_metal_attn.flex_attention(*rand(), block_mask=mask)


def test_gradients_need_transposed_lists():
    mask = block_mask()
    mask = BlockMask.from_kv_blocks(
        mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices,
        BLOCK_SIZE=BLOCK, mask_mod=mask.mask_mod, seq_lengths=SIZES, compute_q_blocks=False,
    )  # fmt: skip
    check_flex(*rand(), None, mask)
    q, k, v = rand()
    with simulate(), pytest.raises(ValueError, match="q_num_blocks, which gradients need"):
        torch_metal_attn.flex_attention(q.requires_grad_(), k, v, block_mask=mask)
