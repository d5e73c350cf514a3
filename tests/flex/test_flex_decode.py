"""flash_decode with score_mod, mask_mod and block lists, for few queries and any splits."""

from functools import partial

import pytest
import torch
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import BlockMask

from tests.attention.test_flash_fwd_device_lengths import after_the_checks
from tests.flex.flex_check import (
    assert_within_twice,
    block_mask,
    check_flex,
    check_flex_gradients,
    contradictory,
    rand,
    tanh_softcap,
    torch_flex,
)
from tests.flex.test_blocks import FAULT_KINDS
from tests.flex.test_flex_counts import listed, work
from tests.helpers.mutants import mutant_tests
from torch_metal_attn import explain, flex_attention, simulate
from torch_metal_attn.with_kvcache import DECODE_QUERIES

QUERIES, KEYS = 8, 300
BLOCK = (8, 16)
explained = partial(explain, flex_attention)


def banded(b, h, q_idx, kv_idx):
    """There are hidden, partial and full blocks. The last block ends after the last key."""
    return (kv_idx // 37 % 3 != 1) & (kv_idx <= q_idx + KEYS - QUERIES)


def only_in_partial_blocks(b, h, q_idx, kv_idx):
    """As `banded`, but False in full blocks, which must not call mask_mod."""
    first = kv_idx // 16 * 16
    full = (first // 37 == (first + 15) // 37) & (first + 15 <= KEYS - QUERIES)
    return banded(b, h, q_idx, kv_idx) & ~full


def few(**options):
    return rand(q_length=QUERIES, kv_length=KEYS, **options)


def mask_of(mod=banded, batch=None, heads=None, block=BLOCK):
    return block_mask(mod, batch, heads, (QUERIES, KEYS), block)


@pytest.mark.parametrize("gpu_cores, splits", [(1, 1), (3, 4), (64, 5)])
def test_any_number_of_splits(gpu_cores, splits, cores):
    cores(gpu_cores)
    qkv = few(heads=4, kv_heads=2)
    shown = explained(*qkv, tanh_softcap, mask_of(), enable_gqa=True)
    assert shown.kernel == "flash_decode"
    assert shown.grid[0] == splits
    assert f"{splits} split{'s' * (splits > 1)} of the keys" in shown.reason
    assert "of the blocks skipped" in shown.reason
    check_flex(*qkv, tanh_softcap, mask_of())


def test_splits_depend_on_the_length_of_the_lists(cores):
    cores(64)

    def mod(b, h, q_idx, kv_idx):
        return (kv_idx >= 40) & (kv_idx < 75)

    whole = mask_of(mod)
    short = BlockMask.from_kv_blocks(
        *(whole.kv_num_blocks, whole.kv_indices[..., :2]),
        *(whole.full_kv_num_blocks, whole.full_kv_indices[..., :1]),
        BLOCK_SIZE=BLOCK,
        mask_mod=mod,
        seq_lengths=(QUERIES, KEYS),
        compute_q_blocks=False,
    )
    splits = [explained(*few(), None, mask).grid[0] for mask in (whole, short)]
    assert splits == [5, 1]
    check_flex(*few(), None, short)


def test_without_lists_and_with_gradients():
    check_flex(*rand(q_length=5, kv_length=KEYS), tanh_softcap)
    check_flex_gradients(*few(heads=4, kv_heads=2), tanh_softcap, mask_of())


def test_lists_of_batches_and_heads():
    def mod(b, h, q_idx, kv_idx):
        return kv_idx // 32 % 5 > b + 2 * h

    qkv = few(batch=2)
    mask = mask_of(mod, 2, 2)
    assert explained(*qkv, None, mask).kernel == "flash_decode"
    check_flex(*qkv, None, mask)


def test_calls_that_run_on_flash_fwd():
    """Lists per query head, several blocks of queries, and many queries need flash_fwd."""
    q, k, v = few(heads=4, kv_heads=2)
    nine = torch.cat([q, q], 2)[:, :, :9]
    many = q[:, :, :1].expand(-1, -1, DECODE_QUERIES + 1, -1)
    for query, mask, kernel in (
        (q, mask_of(heads=4), "flash_fwd"),
        (nine, block_mask(banded, sizes=(9, KEYS), block=BLOCK), "flash_fwd"),
        (many, None, "flash_fwd"),
        (many[:, :, 1:], None, "flash_decode"),
    ):
        assert explained(query, k, v, None, mask, enable_gqa=True).kernel == kernel


def test_work_is_proportional_to_the_listed_blocks(cores):
    cores(1)

    def counted(count):
        mask = listed(1, 32, count)
        mask.seq_lengths = (1, 2048)
        q, k, v = rand(heads=1, q_length=1, kv_length=2048)
        with simulate(count=True) as run:
            flex_attention(q, k, v, None, mask)
        return work(run.counters["flash_decode"])

    nothing, two, nine = counted(0), counted(2), counted(9)
    assert nothing[2] == 0
    assert (nine - nothing <= 1.05 * 4.5 * (two - nothing)).all()


def test_pages_of_torch():
    """torch's PagedAttention converts lists and functions to pages. The results work unmodified."""
    page, pages, lengths = 16, 44, torch.tensor([KEYS, 270])
    paged = PagedAttention(pages, page, 2, device="cpu")
    for part in (0.3, 1.0):  # in two steps, so that the sequences' pages alternate
        for b in (1, 0):
            paged.reserve(torch.tensor(b), (lengths[b] * part).int())
    q, k, v = few(batch=2)
    k_cache, v_cache = torch.zeros(2, 1, k.shape[1], pages * page, k.shape[3], dtype=k.dtype)
    for b, n in enumerate(lengths.tolist()):
        rows = (x[b : b + 1, :, :n] for x in (k, v))
        paged.assign(torch.tensor([b]), torch.arange(n)[None], *rows, k_cache, v_cache)
    for cache in (k_cache, v_cache):  # free pages are not read
        cache.unflatten(2, (pages, page))[:, :, paged.empty_pages] = torch.nan

    def mod(b, h, q_idx, kv_idx):
        return (kv_idx <= q_idx + lengths[b] - QUERIES) & (kv_idx // 37 % 3 != 1)

    mask = mask_of(mod, 2)
    ours = paged.get_score_mod(tanh_softcap), paged.convert_logical_block_mask(mask)
    with simulate(check=True) as run:
        out = flex_attention(q, k_cache, v_cache, *ours)
    assert "flash_decode" in run.counters
    exact, _ = torch_flex(q.double(), k.double(), v.double(), tanh_softcap, mask)
    assert_within_twice(out, exact, torch_flex(q, k, v, tanh_softcap, mask)[0])


def check_full_and_partial():
    ours = None, contradictory(mask_of(), only_in_partial_blocks)
    check_flex(*few(), None, mask_of(), ours=ours)


MUTANTS = {
    check_full_and_partial: """
        full blocks are masked: masked = {~next_entry < partial.count => true~};
        partial blocks are not: {~kv.blocks.masked => false~},
        off by one in the list: next_entry = place / BLOCK{~=> + 1~};
        off by one row: first_row + place % BLOCK{~=> + 1~}
        a split's first block: return {{~=> STEP_K +~} keys.begin +
        a split too short: min((split + 1) * split_steps{~=> - 1~}
        a shorter list: return {0, {~count => (count - 1)~} * BLOCK}
    """
}

test_mutant_is_caught, test_the_unchanged_kernel_passes = mutant_tests(
    MUTANTS, "flash_decode", fault=FAULT_KINDS
)


def test_entries_out_of_range_are_not_read(monkeypatch):
    """On mps only the kernel checks lists. One entry out of range makes all rows NaN."""
    mask = contradictory(mask_of(), only_in_partial_blocks)
    wrong = mask.kv_indices.clone()
    wrong[..., 0] = 1000
    after_the_checks(monkeypatch, mask.kv_indices, wrong.tolist())
    with simulate(check=True):
        out, lse = flex_attention(*few(), block_mask=mask, return_lse=True)
    assert out.isnan().all()
    assert lse.isnan().all()
