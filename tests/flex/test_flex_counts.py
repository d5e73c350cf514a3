"""Blocks that a BlockMask does not list cost nothing, in the forward and in both backward walks."""

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from tests.flex import gallery
from torch_metal_attn import flex_attention, simulate

HEAD_DIM, BLOCK = 16, 64
KERNELS = ("flash_fwd", "flash_bwd_dq", "flash_bwd_dkv")


def document(b, h, q_idx, kv_idx):
    return q_idx // 150 == kv_idx // 150


def sparse(b, h, q_idx, kv_idx):
    """A tenth of all blocks."""
    block = q_idx // BLOCK * 16 + kv_idx // BLOCK
    return block * 7919 % 1009 % 10 == 0


PATTERNS = {
    "documents": (document, 600, 600),
    "block-sparse": (sparse, 1024, 1024),
}


def lists_of(mod, q_length, kv_length):
    mask = create_block_mask(mod, 1, 1, q_length, kv_length, device="cpu", BLOCK_SIZE=BLOCK)
    # Lists alone: one specialisation for all patterns.
    mask.mask_mod = gallery.full
    return mask


def listed(rows, columns, count):
    """`count` blocks for each of the rows."""
    counts = torch.full((1, 1, rows), count, dtype=torch.int32)
    indices = torch.arange(columns, dtype=torch.int32).expand(1, 1, rows, columns)
    return BlockMask.from_kv_blocks(
        *(counts, indices, counts * 0, indices),
        BLOCK_SIZE=BLOCK,
        seq_lengths=(rows * BLOCK, columns * BLOCK),
    )


def counters(mask, backward=True):
    """The counters of each kernel, and the number of blocks that it visited."""
    q_length, kv_length = mask.seq_lengths
    q = torch.ones(1, 1, q_length, HEAD_DIM, dtype=torch.float16, requires_grad=True)
    k = torch.ones(1, 1, kv_length, HEAD_DIM, dtype=torch.float16)
    with simulate(count=True) as run:
        out = flex_attention(q, k, k, None, mask)
        if backward:
            out.backward(q)
    visited = int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum())
    return run.counters, visited


def work(counters):
    """The counts that grow with the blocks that a kernel visits."""
    memory = counters.loads["device"], counters.load_bytes["device"]
    return torch.tensor([*memory, counters.matrix_operations], dtype=torch.float64)


@pytest.fixture(scope="module")
def prices():
    """By kernel: the work of a row of blocks without any, and of one block."""
    (nothing, _), (two, _) = counters(listed(2, 2, 0)), counters(listed(2, 2, 2))
    return {
        kernel: (work(nothing[kernel]) / 2, (work(two[kernel]) - work(nothing[kernel])) / 4)
        for kernel in KERNELS
    }


@pytest.mark.parametrize("name", PATTERNS)
def test_work_is_that_of_the_blocks_that_are_listed(name, prices, cores):
    cores(1)  # which long problems keep busy with the tiles of short ones
    mask = lists_of(*PATTERNS[name])
    actual, visited = counters(mask)
    rows, columns = (-(-length // BLOCK) for length in mask.seq_lengths)
    assert visited < rows * columns / 2
    for kernel in KERNELS:
        of_row, of_block = prices[kernel]
        lists = columns if kernel == "flash_bwd_dkv" else rows
        assert (work(actual[kernel]) <= 1.05 * (lists * of_row + visited * of_block)).all()
        assert work(actual[kernel])[2] <= visited * of_block[2]


def test_full_blocks_do_not_ask_mask_mod():
    """They load nothing from a captured tensor."""
    documents = torch.arange(128) // 64

    def mod(b, h, q_idx, kv_idx):
        return documents[q_idx] == documents[kv_idx]

    mask = create_block_mask(mod, 1, 1, 128, 128, device="cpu", BLOCK_SIZE=BLOCK)
    assert int(mask.kv_num_blocks.sum()) == 0
    actual, _ = counters(mask, backward=False)
    mask.mask_mod = gallery.full
    plain, _ = counters(mask, backward=False)
    assert actual["flash_fwd"].loads["device"] == plain["flash_fwd"].loads["device"]
