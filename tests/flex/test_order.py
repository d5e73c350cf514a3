"""Threadgroups with the longest lists of a BlockMask start first. No order changes the results."""

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

from tests.flex.flex_check import rand
from tests.helpers.mutants import plant
from torch_metal_attn import SimulatorFault, explain, flex_attention, simulate
from torch_metal_attn.flex import block_mask as block_masks
from torch_metal_attn.flex.block_mask import Blocks, longest_first

HEADS, QUERIES, KEYS, BLOCK = 4, 200, 160, 32  # the last block of queries has 8 queries
GROUP_NUMBER = (
    "float(threadgroup_position.x + threadgroups.x * (threadgroup_position.y + "
    "threadgroups.y * threadgroup_position.z))"
)
# Code of each kernel that stores a result, and code that stores the threadgroup's number instead.
STORES = {
    "flash_fwd": ("softmax.rows[i].logsumexp(row_sum)", GROUP_NUMBER),
    "flash_bwd_dq": (
        "rows.write(dq_tile, queries, column + first_dq, problem.softmax_scale)",
        f"dq_tile.fill({GROUP_NUMBER}); rows.write(dq_tile, queries, column + first_dq, 1.0f)",
    ),
    "flash_bwd_dkv": ("keys.write(", f"dv_tile.fill({GROUP_NUMBER}); keys.write("),
}


def mask_of(batch=2, heads=HEADS, sizes=(QUERIES, KEYS)):
    """A BlockMask of partial and full blocks. A row lists none, some or all of its blocks."""
    shape = (batch, heads, *(-(-size // BLOCK) for size in sizes))
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(7))
    drawn *= torch.linspace(0.3, 1.5, shape[3])  # columns differ too
    counts, entries = [], []
    for chosen in ((drawn > 0.4) & (drawn < 0.6), drawn >= 0.6):
        counts.append(chosen.sum(-1, dtype=torch.int32))
        entries.append(chosen.int().argsort(dim=-1, descending=True, stable=True).int())
    lists = counts[0], entries[0], counts[1], entries[1]
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=BLOCK, seq_lengths=sizes)


def results(mask, **shape):
    sizes = {"batch": 2, "heads": HEADS, "kv_heads": 2, "q_length": QUERIES, "kv_length": KEYS}
    leaves = [x.requires_grad_() for x in rand(**sizes | shape)]
    with simulate(check=True):
        out, lse = flex_attention(*leaves, None, mask, return_lse=True, enable_gqa=True)
        return out, lse, *torch.autograd.grad(out.float().sin().sum(), leaves)


def lengths(mask, side):
    """The lengths of each row's lists, for all batches and heads."""
    counts = getattr(mask, f"{side}_num_blocks") + getattr(mask, f"full_{side}_num_blocks")
    return counts.expand(2, HEADS, -1)


@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize("batch", [1, 2])
def test_longest_lists_start_first(batch, heads, monkeypatch):
    """In the order of their numbers, threadgroups have lists of decreasing length."""
    mask = mask_of(batch, heads)
    for kernel, stored in STORES.items():
        plant(monkeypatch, kernel, *stored)
    _, lse, dq, _, dv = results(mask)
    by_group = lengths(mask, "q").unflatten(1, (2, -1)).sum(2)
    by_query = lengths(mask, "kv")
    for numbers, work in ((lse, by_query), (dq[..., 0], by_query), (dv[..., 0], by_group)):
        started = numbers[..., ::BLOCK].flatten()
        assert len(started.unique()) == len(started)
        in_order = work.flatten()[started.argsort()]
        assert (in_order.diff() <= 0).all()


def with_a_duplicate(counts, group=1):
    order = longest_first(counts, group)
    order[0, 0, 0, 0] = order[0, 0, 0, 1]
    return order


def all_equal_to(value):
    return lambda counts, group=1: torch.full_like(longest_first(counts, group), value)


WRONG_ORDERS = {
    "ascending": lambda counts, group=1: longest_first([counts[0].max() - sum(counts)], group),
    "another head's": lambda counts, group=1: longest_first([sum(counts).roll(1, 1)], group),
    "one doubled": with_a_duplicate,
    "all alike": all_equal_to(3),
    "out of range": all_equal_to(-1),
    "far out of range": all_equal_to(2**31 - 1),
}


def test_bits_do_not_depend_on_the_order(monkeypatch):
    """One threadgroup computes each row, even if the order is not a permutation."""
    expected = results(mask_of())
    for order in WRONG_ORDERS.values():
        monkeypatch.setattr(block_masks, "longest_first", order)
        actual = results(mask_of())
        assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))


def test_order_where_heads_are_split(cores, monkeypatch):
    """Threadgroups with a part of the query heads start in the order of their group."""
    cores(64)
    sizes = {"batch": 1, "kv_heads": 2, "q_length": 160, "kv_length": 512}
    mask = mask_of(1, HEADS, (160, 512))
    call = flex_attention, *rand(heads=HEADS, **sizes), None, mask
    training = explain(*call, enable_gqa=True, backward=True).training
    assert training.kernels["flash_bwd_dkv"].specialisation["HEAD_SPLITS"] == "2"
    actual = results(mask, **sizes)
    monkeypatch.setattr(Blocks, "ordered", lambda *_, **__: {})
    assert all(torch.equal(*pair) for pair in zip(actual, results(mask, **sizes), strict=True))


@pytest.mark.mutant
@pytest.mark.parametrize("kernel", STORES)
def test_a_kernel_that_trusts_its_order_has_a_race(kernel, monkeypatch):
    plant(monkeypatch, kernel, "&& places[tile] == place", "")
    monkeypatch.setattr(block_masks, "longest_first", with_a_duplicate)
    with pytest.raises(SimulatorFault) as raised:
        results(mask_of())
    assert (raised.value.kind, raised.value.kernel) == ("race", kernel)


def test_the_order_of_a_mask_is_kept():
    """The order of a mask is computed once for each number of KV heads."""
    mask = mask_of()
    results(mask)
    orders = dict(mask._metal_attn_orders)
    results(mask)
    assert all(mask._metal_attn_orders[key] is order for key, order in orders.items())
    results(mask, kv_heads=1)
    assert set(mask._metal_attn_orders) == {("kv", 1), ("q", 2), ("q", 4)}
    mask = mask_of()
    with torch.inference_mode(), simulate(check=True):
        flex_attention(*rand(batch=2, heads=HEADS, q_length=QUERIES, kv_length=KEYS), None, mask)
    assert mask._metal_attn_orders
    results(mask)
