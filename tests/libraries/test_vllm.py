"""vLLM's functions against their definition, written out per token and per sequence."""

import inspect

import pytest
import torch

from tests.helpers.home import HOME, PAGE
from torch_metal_attn import flash_attn_with_kvcache, simulate, vllm

BLOCKS, SEQ_LENS = 7, [37, 1, 0, 16]
ONE = torch.ones(1)
SHAPE = (HOME["kv_heads"], HOME["head_dim"])


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(HOME["dtype"])


def tables():
    """Blocks of each sequence; those that it does not need do not exist."""
    return torch.tensor([[5, 0, 3], [6, -1, -1], [-1, -1, -1], [2, -1, -1]], dtype=torch.int32)


def written(key, value, slots, blocks=BLOCKS):
    """By definition, (blocks, block_size, kv_heads, head_size) of keys and of values, as float."""
    caches = torch.zeros(2, blocks, PAGE, *SHAPE)
    for i, slot in enumerate(slots):
        if slot >= 0:
            caches[:, slot // PAGE, slot % PAGE] = torch.stack([key[i], value[i]]).float()
    return caches


def attended(query, caches, scale, slopes=None):
    """By definition: softmax(scale q k + slope (j - last)) v, of each sequence's first keys."""
    out = torch.zeros(query.shape, dtype=torch.float64)
    group = query.shape[1] // caches.shape[3]
    for i, (length, row) in enumerate(zip(SEQ_LENS, tables().tolist(), strict=True)):
        if not length:
            continue
        places = [(row[j // PAGE], j % PAGE) for j in range(length)]
        k, v = (torch.stack([cache[place] for place in places]).double() for cache in caches)
        for h in range(query.shape[1]):
            scores = scale * (k[:, h // group] @ query[i, h].double())
            if slopes is not None:
                scores += slopes[h].double() * (torch.arange(length) - (length - 1))
            out[i, h] = scores.softmax(0) @ v[:, h // group]
    return out


def filled(kv_cache_dtype="auto", scale=ONE):
    """A cache written through `reshape_and_cache`, and the same by definition."""
    slots = torch.randperm(BLOCKS * PAGE, generator=torch.Generator().manual_seed(3))
    slots[40] = -1  # padding
    key, value = (normal(len(slots), *SHAPE, seed=seed) for seed in (1, 2))
    dtype = HOME["dtype"] if kv_cache_dtype == "auto" else torch.float8_e4m3fn
    caches = vllm.new_kv_cache(BLOCKS, PAGE, *SHAPE, dtype)
    if kv_cache_dtype != "auto":
        caches = [cache.view(torch.uint8) for cache in caches]
    vllm.reshape_and_cache(key, value, *caches, slots, kv_cache_dtype, scale, scale)
    if kv_cache_dtype != "auto":
        key, value = ((x / scale).to(dtype).float() * scale for x in (key, value))
    return caches, written(key, value, slots.tolist())


def shown(caches):
    """A cache in vLLM's shapes as (blocks, block_size, kv_heads, head_size)."""
    key_cache, value_cache = caches
    keys = torch.stack(
        [key_cache[:, :, c // key_cache.shape[4], :, c % key_cache.shape[4]] for c in range(64)], -1
    )
    return torch.stack([keys.transpose(1, 2), value_cache.permute(0, 3, 1, 2)])


def test_reshape_and_cache():
    with simulate(check=True) as run:
        caches, expected = filled()
    assert caches[0].shape == (BLOCKS, SHAPE[0], 8, PAGE, 8)
    assert caches[1].shape == (BLOCKS, SHAPE[0], 64, PAGE)
    assert torch.equal(shown(caches).float(), expected)
    assert [launch.kernel for launch in run.launches] == ["append_kv"]


def test_reshape_and_cache_flash():
    slots = torch.tensor([33, -1, 5, 0])
    key, value = (normal(4, *SHAPE, seed=seed) for seed in (1, 2))
    caches = [torch.zeros(BLOCKS, PAGE, *SHAPE, dtype=HOME["dtype"]) for _ in range(2)]
    with simulate(check=True):
        vllm.reshape_and_cache_flash(key, value, *caches, slots, "auto", ONE, ONE)
    assert torch.equal(torch.stack(caches).float(), written(key, value, slots.tolist()))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("version", [1, 2])
def test_paged_attention(version, kv_cache_dtype):
    """v1 with ALiBi, v2 without; sequences without keys are 0."""
    scale, kv_scale = 0.11, torch.tensor([0.25])
    slopes = torch.tensor([0.5, 0.1, 0.05, 0.2]) if version == 1 else None
    query = normal(4, HOME["heads"], 64, seed=4)
    out = torch.full_like(query, torch.nan)
    lengths = torch.tensor(SEQ_LENS, dtype=torch.int32)
    with simulate(check=True) as run:
        caches, expected = filled(kv_cache_dtype, kv_scale)
        arguments = (query, *caches, SHAPE[0], scale, tables(), lengths, PAGE, 37, slopes)
        arguments = (*arguments, kv_cache_dtype, kv_scale, kv_scale)
        if version == 1:
            vllm.paged_attention_v1(out, *arguments)
        else:
            vllm.paged_attention_v2(out, *(torch.empty(0) for _ in range(3)), *arguments)
    kernels = [launch.kernel for launch in run.launches]
    assert kernels[:2] == ["append_kv", "flash_decode"]
    exact = attended(query, expected, scale, slopes)
    assert (out.double() - exact).abs().max() <= 2**-11 * exact.abs().max()


def test_argument_order_is_vllms():
    """As in vllm/_custom_ops.py."""
    cache = ["key", "value", "key_cache", "value_cache", "slot_mapping", "kv_cache_dtype"]
    cache += ["k_scale", "v_scale"]
    attention = ["query", "key_cache", "value_cache", "num_kv_heads", "scale", "block_tables"]
    attention += ["seq_lens", "block_size", "max_seq_len", "alibi_slopes", "kv_cache_dtype"]
    attention += ["k_scale", "v_scale", "tp_rank", "blocksparse_local_blocks"]
    attention += ["blocksparse_vert_stride", "blocksparse_block_size"]
    attention += ["blocksparse_head_sliding_step"]
    for name, expected in {
        "reshape_and_cache": cache,
        "reshape_and_cache_flash": cache,
        "paged_attention_v1": ["out", *attention],
        "paged_attention_v2": ["out", "exp_sum", "max_logits", "tmp_out", *attention],
    }.items():
        assert list(inspect.signature(getattr(vllm, name)).parameters) == expected


def test_sglangs_tables_are_pages_of_one_row():
    """SGLang keeps (slots, kv_heads, head_size) and for each request the slot of each token."""
    keys, values = (normal(40, *SHAPE, seed=seed) for seed in (1, 2))
    slots = torch.randperm(40, generator=torch.Generator().manual_seed(5))[:33].int()
    query = normal(1, 1, HOME["heads"], 64, seed=4)
    lengths = torch.tensor([33], dtype=torch.int32)
    with simulate(check=True) as run:
        out = flash_attn_with_kvcache(
            query,
            keys[:, None],
            values[:, None],
            cache_seqlens=lengths,
            block_table=slots[None],
        )
    k, v = (
        x[slots.long()].repeat_interleave(2, 1).transpose(0, 1).double() for x in (keys, values)
    )
    exact = (query[0].transpose(0, 1).double() @ k.mT * 64**-0.5).softmax(-1) @ v
    assert (out[0].transpose(0, 1) - exact).abs().max() <= 2**-11 * exact.abs().max()
    assert run.launches[0].kernel == "flash_decode"


class TestRefusals:
    def arguments(self, **changed):
        key_cache, value_cache = vllm.new_kv_cache(BLOCKS, PAGE, *SHAPE, HOME["dtype"])
        query = normal(4, HOME["heads"], 64)
        return {
            "out": torch.empty_like(query),
            "query": query,
            "key_cache": key_cache,
            "value_cache": value_cache,
            "num_kv_heads": SHAPE[0],
            "scale": 0.1,
            "block_tables": tables().clamp(min=0),
            "seq_lens": torch.tensor(SEQ_LENS, dtype=torch.int32),
            "block_size": PAGE,
            "max_seq_len": 37,
            "alibi_slopes": None,
            "kv_cache_dtype": "auto",
            "k_scale": ONE,
            "v_scale": ONE,
        } | changed

    @pytest.mark.parametrize(
        "changed, error, message",
        [
            ({"key_cache": torch.zeros(7, 2, 8, 16, 8).half()}, ValueError, "new_kv_cache"),
            ({"value_cache": torch.zeros(7, 2, 64, 16).half()}, ValueError, "new_kv_cache"),
            ({"num_kv_heads": 4}, ValueError, "num_kv_heads is 4; key_cache has 2"),
            ({"block_size": 8}, ValueError, "block_size is 8; key_cache has 16"),
            ({"out": torch.zeros(4, 4, 32).half()}, ValueError, r"out is \(4, 4, 32\)"),
            ({"max_seq_len": 16}, ValueError, r"seq_lens\[0\] is 37"),
            ({"block_tables": tables().long()}, ValueError, "block_tables has dtype"),
            ({"kv_cache_dtype": "int8"}, NotImplementedError, "kv_cache_dtype is 'int8'"),
            ({"kv_cache_dtype": "fp8"}, ValueError, "key_cache has dtype torch.float16; with fp8"),
            ({"blocksparse_vert_stride": 8}, NotImplementedError, "blocksparse_vert_stride is 8"),
            ({"scale": "x"}, TypeError, "scale is 'x'; it must be a number"),
        ],
        ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
    )
    def test_attention(self, changed, error, message):
        with pytest.raises(error, match=message):
            vllm.paged_attention_v1(**self.arguments(**changed))

    @pytest.mark.parametrize(
        "slots, message",
        [
            (torch.tensor([0, 112]), "slot_mapping has 112; key_cache has 112 slots"),
            (torch.tensor([0]), "key has 2 tokens, value 2 and slot_mapping 1"),
            (torch.tensor([0.0, 1.0]), "slot_mapping has dtype torch.float32"),
        ],
    )
    def test_writes(self, slots, message):
        caches = vllm.new_kv_cache(BLOCKS, PAGE, *SHAPE, HOME["dtype"])
        new = normal(2, *SHAPE)
        with pytest.raises(ValueError, match=message):
            vllm.reshape_and_cache(new, new, *caches, slots, "auto", ONE, ONE)

    def test_new_kv_cache(self):
        with pytest.raises(ValueError, match=r"head_size is 60; .* a multiple of 8"):
            vllm.new_kv_cache(BLOCKS, PAGE, 2, 60, torch.float16)
