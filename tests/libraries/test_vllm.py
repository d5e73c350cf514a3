"""vLLM's `reshape_and_cache_flash` against its definition, and SGLang's tables."""

import inspect
from functools import partial

import pytest
import torch

from tests.helpers.home import HOME, PAGE
from torch_metal_attn import flash_attn_with_kvcache, simulate, vllm
from torch_metal_attn.testing import judge

BLOCKS = 7
UNIT_SCALE = torch.ones(1)
SHAPE = (HOME["kv_heads"], HOME["head_dim"])
HUGE = torch.zeros(7, 1, *SHAPE, dtype=HOME["dtype"]).expand(7, 2**40, *SHAPE)

normal = partial(judge.normal, dtype=HOME["dtype"])


def new_caches(dtype=HOME["dtype"]):
    return [torch.zeros(BLOCKS, PAGE, *SHAPE, dtype=dtype) for _ in range(2)]


@pytest.mark.parametrize("kv_cache_dtype, dtype", [("auto", HOME["dtype"]), ("fp8", torch.uint8)])
def test_reshape_and_cache_flash_fills_the_slots(kv_cache_dtype, dtype):
    """Slots are out of order. A negative slot is padding, as are tokens after the last slot."""
    slots = torch.randperm(BLOCKS * PAGE, generator=torch.Generator().manual_seed(3))[:50]
    slots[40] = -1
    scale = torch.tensor([0.25])
    new = [normal(len(slots) + more, *SHAPE, seed=more) for more in (1, 2)]
    caches = new_caches(dtype)
    with simulate(check=True) as run:
        vllm.reshape_and_cache_flash(*new, *caches, slots, kv_cache_dtype, scale, scale)
    if kv_cache_dtype == "fp8":
        caches = [cache.view(torch.float8_e4m3fn).float() for cache in caches]
        new = [(x.float() / scale).to(torch.float8_e4m3fn).float() for x in new]
    for x, cache in zip(new, caches, strict=True):
        expected = torch.zeros_like(cache)
        for i, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected[slot // PAGE, slot % PAGE] = x[i]
        assert torch.equal(cache, expected)
    assert [launch.kernel for launch in run.launches] == ["append_kv"]


def test_argument_order_matches_vllm():
    expected = ["key", "value", "key_cache", "value_cache", "slot_mapping", "kv_cache_dtype"]
    expected += ["k_scale", "v_scale"]
    assert list(inspect.signature(vllm.reshape_and_cache_flash).parameters) == expected


def test_tables_of_sglang_are_page_tables():
    """SGLang's caches are (slots, kv_heads, head_size); a request has a slot for each token."""
    keys, values = (normal(40, *SHAPE, seed=seed) for seed in (1, 2))
    slots = torch.randperm(40, generator=torch.Generator().manual_seed(5))[:33].int()
    query = normal(1, 2, HOME["heads"], 64, seed=4)
    lengths = torch.tensor([33], dtype=torch.int32)
    with simulate(check=True) as run:
        pages = keys[:, None], values[:, None]
        out = flash_attn_with_kvcache(query, *pages, cache_seqlens=lengths, block_table=slots[None])
    rows = (x[slots.long()].repeat_interleave(2, 1) for x in (keys, values))
    k, v = (x.transpose(0, 1).double() for x in rows)
    exact = (query[0].transpose(0, 1).double() @ k.mT * 64**-0.5).softmax(-1) @ v
    assert (out[0].transpose(0, 1) - exact).abs().max() <= 2**-11 * exact.abs().max()
    assert run.launches[0].kernel == "flash_decode"


@pytest.mark.parametrize(
    "changed, error, message",
    [
        ({"slot_mapping": torch.tensor([0, 112])}, ValueError, "slot 112; key_cache has 112 slots"),
        ({"slot_mapping": torch.arange(3)}, ValueError, "value 2 and slot_mapping 3; key and"),
        ({"slot_mapping": torch.ones(2)}, ValueError, "slot_mapping has dtype torch.float32"),
        ({"kv_cache_dtype": "int8"}, NotImplementedError, "kv_cache_dtype is 'int8'"),
        ({"kv_cache_dtype": "fp8"}, ValueError, "key_cache has dtype torch.float16; with fp8"),
        ({"key_cache": torch.zeros(7, 2, 8)}, ValueError, "key_cache"),
        ({"key_cache": HUGE, "value_cache": HUGE}, ValueError, "a page size of 1099511627776"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_invalid_arguments_are_refused(changed, error, message):
    new, cache = normal(2, *SHAPE), new_caches()[0]
    arguments = {"key": new, "value": new, "key_cache": cache, "value_cache": cache.clone()}
    arguments |= {"slot_mapping": torch.tensor([0, 1]), "kv_cache_dtype": "auto"}
    arguments |= {"k_scale": UNIT_SCALE, "v_scale": UNIT_SCALE}
    with pytest.raises(error, match=message):
        vllm.reshape_and_cache_flash(**(arguments | changed))
