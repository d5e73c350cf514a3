"""block_mask makes a BlockMask of a bool tensor."""

import pickle

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from tests.flex.flex_check import BLOCK, SIZES, check_flex, check_flex_gradients, rand, torch_flex
from tests.helpers.cases import each_case
from torch_metal_attn import block_mask


def dense(*leading):
    q_idx, kv_idx = torch.arange(SIZES[0])[:, None], torch.arange(SIZES[1])
    mask = (kv_idx <= q_idx) & (q_idx - kv_idx < 50) | (kv_idx // 32 == 2)
    return mask & (torch.arange(1, 1 + max(1, *leading, 0)).view(*leading, 1, 1) * kv_idx % 7 != 5)


def test_lists_are_those_of_create_block_mask():
    mask = dense(2, 1) | (torch.arange(SIZES[1]) // 32 == 1)
    actual = pickle.loads(pickle.dumps(block_mask(mask, BLOCK)))  # as in a DataLoader's worker
    expected = create_block_mask(
        lambda b, h, q_idx, kv_idx: mask[b, 0, q_idx, kv_idx],
        *(2, None, *SIZES),
        device="cpu",
        BLOCK_SIZE=BLOCK,
    )
    assert int(actual.full_kv_num_blocks.sum()) > 0
    assert int(actual.kv_num_blocks.sum()) > 0
    for name in ("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices"):
        for full in ("", "full_"):
            assert torch.equal(getattr(actual, full + name), getattr(expected, full + name))
    places = torch.tensor([[1, 0], [0, 0], [40, 3], [40, 3]])
    assert torch.equal(actual.mask_mod(*places), mask[places[0], 0, places[2], places[3]])


@pytest.mark.parametrize("leading", [(), (2, 1), (1, 2)])
def test_results_equal_torchs(leading):
    qkv = rand(batch=2)
    mask = block_mask(dense(*leading), BLOCK)
    check_flex_gradients(*qkv, None, mask, simulated=False)
    if leading == (1, 2):
        check_flex(*qkv, None, mask)


def test_queries_or_keys_may_be_broadcast():
    keys = torch.arange(SIZES[1]) % 40 < 33
    column = torch.arange(SIZES[0])[:, None] % 3 > 0
    q, k, v = rand()
    for small in (keys, keys[None, None, None], column, column.expand(2, 1, -1, -1)[:1]):
        actual, _ = torch_flex(q, k, v, None, block_mask(small, BLOCK, SIZES))
        exact, _ = torch_flex(q, k, v, None, block_mask(small.expand(1, 1, *SIZES).clone(), BLOCK))
        assert torch.equal(actual, exact)


ONES = torch.ones(8, 8)
INVALID = {
    TypeError: {
        "attn_mask is a list; it must be a tensor": {"attn_mask": [True]},
        "block is 8.0; it must be two integers": {"block": 8.0},
        "lengths is 8; it must be two integers": {"lengths": 8},
    },
    ValueError: {
        "attn_mask has layout torch.spars": {"attn_mask": ONES.to_sparse()},
        "dtype torch.float32; it must be torch.bool": {"attn_mask": ONES},
        "block is 12; it must be multiples of 8 in 8..1024": {"block": 12},
        r"block is \(8, 2048\)": {"block": (8, 2048)},
        r"does not broadcast to lengths \(8, 9\)": {"lengths": (8, 9)},
        r"give lengths=\(Lq, 8\)": {"attn_mask": torch.ones(8).bool()},
        "there must be a query and a key": {"attn_mask": torch.ones(0, 8).bool()},
        "1 to 4 dimensions.*": {"attn_mask": torch.ones(1, 1, 1, 8, 8).bool()},
        "1 to 4 dimensions": {"attn_mask": torch.tensor(True), "lengths": (8, 8)},
    },
}


@each_case("error, message", [(error, message) for error in INVALID for message in INVALID[error]])
def test_invalid_input_is_refused(error, message):
    with pytest.raises(error, match=message):
        block_mask(**{"attn_mask": ONES.bool()} | INVALID[error][message])
