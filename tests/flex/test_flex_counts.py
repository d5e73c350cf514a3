"""Blocks that a BlockMask does not list cost nothing, in the forward and in both backward walks."""

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from tests.flex.flex_check import full
from torch_metal_attn import flex_attention, simulate

HEAD_DIM, BLOCK = 16, 64
KERNELS = ("flash_fwd", "flash_bwd_dq", "flash_bwd_dkv")


def listed(rows, columns, count):
    counts = torch.full((1, 1, rows), count, dtype=torch.int32)
    indices = torch.arange(columns, dtype=torch.int32).expand(1, 1, rows, columns)
    return BlockMask.from_kv_blocks(
        *(counts, indices, counts * 0, indices),
        BLOCK_SIZE=BLOCK,
        seq_lengths=(rows * BLOCK, columns * BLOCK),
    )


def counters(mask, backward=True):
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


def test_work_is_proportional_to_the_listed_blocks(cores):
    """A tenth of all blocks are listed. All keys of a listed block are visible."""
    cores(1)  # so that long and short problems have the same tiles
    (nothing, _), (two, _) = counters(listed(2, 2, 0)), counters(listed(2, 2, 2))

    def sparse(b, h, q_idx, kv_idx):
        block = q_idx // BLOCK * 16 + kv_idx // BLOCK
        return block * 7919 % 1009 % 10 == 0

    mask = create_block_mask(sparse, 1, 1, 1024, 1024, device="cpu", BLOCK_SIZE=BLOCK)
    mask.mask_mod = full  # only the lists hide keys
    actual, visited = counters(mask)
    assert visited < 16 * 16 / 2
    for kernel in KERNELS:
        cost_of_row = work(nothing[kernel]) / 2
        cost_of_block = (work(two[kernel]) - work(nothing[kernel])) / 4
        assert (work(actual[kernel]) <= 1.05 * (16 * cost_of_row + visited * cost_of_block)).all()
        assert work(actual[kernel])[2] <= visited * cost_of_block[2]


def test_full_blocks_do_not_call_mask_mod():
    documents = torch.arange(128) // 64

    def mod(b, h, q_idx, kv_idx):
        return documents[q_idx] == documents[kv_idx]

    mask = create_block_mask(mod, 1, 1, 128, 128, device="cpu", BLOCK_SIZE=BLOCK)
    assert int(mask.kv_num_blocks.sum()) == 0
    actual, _ = counters(mask, backward=False)
    mask.mask_mod = full
    plain, _ = counters(mask, backward=False)
    assert actual["flash_fwd"].loads["device"] == plain["flash_fwd"].loads["device"]
