"""flash_fwd on a paged or indexed cache: missing pages, errors and costs."""

import math

import pytest
import torch

from tests.attention.flash_fwd_check import check_flash_fwd, make_packed, make_qkv
from tests.attention.held_cases import case
from tests.cache.kv_caches import paged
from tests.helpers.cases import each_case
from tests.helpers.judged import arguments
from torch_metal_attn import simulate
from torch_metal_attn.testing.judge import ints

SHAPE = {"heads": 4, "kv_heads": 2, "head_dim": 32, "dtype": torch.float16}


@pytest.mark.parametrize("pages", [0, 5])
def test_no_page_is_read_if_there_are_no_keys(pages, device):
    q, *_ = make_qkv(batch=2, kv_length=0, **SHAPE)
    caches = [torch.full((pages, 2, 16, 32), math.nan).half() for _ in "kv"]
    for blocks in (0, 3):
        out, lse = torch.ops.metal_attn.flash_fwd(
            *(x.to(device) for x in (q, *caches)),
            block_table=torch.full((2, blocks), 77).int().to(device),
            seqused_k=ints(0, 0).to(device),
            causal=True,
        )
        assert (out == 0).all()
        assert (lse == -math.inf).all()


def test_only_differences_of_cu_seqlens_k_count(device):
    lengths = [100, 33, 5, 300]
    q, k, v, *packing = make_packed([16, 1, 0, 70], lengths, **SHAPE)
    whole = torch.full((2, 4, 2, 304, 32), math.nan).half()
    for dense, x in zip(whole, (k, v), strict=True):
        for b, part in enumerate(x.split(lengths)):
            dense[b, :, : lengths[b]] = part.transpose(0, 1)
    cache = paged(*whole, lengths, 16)
    options = {"cache": cache, "device": device, "causal": True, "window_size_left": 150}
    expected = check_flash_fwd(q, k, v, *packing, **options)
    packing[1] += 1000
    shifted = [torch.cat([x.new_zeros(1000, *x.shape[1:]), x]) for x in (k, v)]
    actual = check_flash_fwd(q, *shifted, *packing, **options)
    assert all(map(torch.equal, actual, expected))


def test_pages_before_the_window_need_not_exist(device):
    """Page numbers before a window may be invalid. The table is a slice of a wider table."""
    q, k, v = make_qkv(batch=2, q_length=5, kv_length=200, **SHAPE)
    keys, values, where = paged(k, v, [200, 150], 16)
    # The first queries are at positions 195 and 145. They see the 50 keys before their position.
    where["block_table"][0, : 145 // 16] = -1
    where["block_table"][1, : 95 // 16] = 10**6
    wider = torch.cat([where["block_table"], torch.full((2, 3), -1).int()], 1)
    where["block_table"] = wider[:, :-3]
    options = {"window_size_left": 50, "causal": True, "seqused_k": ints(200, 150)}
    check_flash_fwd(q, k, v, cache=(keys, values, where), device=device, **options)


@each_case(
    "fields, changes, name",
    [
        ({"cache": "paged"}, {}, "block_table"),
        ({"cache": "indexed"}, {}, "cache_batch_idx"),
        ({"format": "q8_0"}, {}, "k_scale"),
        # Quantised keys in float8 need no scale.
        ({}, dict.fromkeys("kv", torch.zeros(2, 2, 16, 64).to(torch.float8_e4m3fn)), "k"),
    ],
)
def test_caches_and_quantised_keys_have_no_gradient(fields, changes, name):
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "kv_length": 16, "head_dim": 64}
    options = arguments(case(**sizes, **fields)) | changes
    expected, _ = torch.ops.metal_attn.flash_fwd(**options)
    for letter in "qkv"[: 3 if "cache" in fields else 1]:
        leaf = options[letter].detach().requires_grad_()
        out, _ = torch.ops.metal_attn.flash_fwd(**options | {letter: leaf})
        assert torch.equal(out, expected)
        with pytest.raises(NotImplementedError, match=rf"with {name}, and {letter} requires grad"):
            out.sum().backward()


def device_loads(page, kv_length=1024):
    q = torch.randn(1, 1, 64, 64).half()
    k = torch.randn(1, 1, kv_length, 64).half()
    caches, where = (k, k), {}
    if page is not None:
        *caches, where = paged(k, k, [kv_length], page)
        where["block_table"] = where["block_table"][:, : kv_length // page].contiguous()
    with simulate(count=True) as run:
        torch.ops.metal_attn.flash_fwd(q, *caches, **where)
    return run.counters["flash_fwd"].loads["device"]


def test_paging_costs_few_loads():
    """Paging adds at most 6 %. With pages of one key, each SIMD group loads every page number."""
    plain = device_loads(None)
    for page in (8, 256):
        assert device_loads(page) <= 1.06 * plain
    assert device_loads(1) - plain <= 8 * 1024
