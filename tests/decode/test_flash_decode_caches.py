"""flash_decode of paged, indexed and quantised caches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.flash_fwd_check import check_flash_decode, make_qkv
from tests.attention.flash_fwd_options import any_options, ints
from tests.cache.kv_caches import FORMATS, LAYOUTS, in_pages, paged, quantised, with_nan_tails
from tests.helpers.home import HOME, PAGE
from torch_metal_attn import simulate

LENGTHS = [0, 1, 7, 33, 65, 257]
SHAPE = HOME | {"q_length": 2}


def problem(lengths, shape):
    """q, k, v whose rows behind each sequence's length are NaN, and that length as an option."""
    q, k, v = make_qkv(batch=len(lengths), kv_length=max(lengths), **shape)
    k, v = (with_nan_tails(x, lengths) for x in (k, v))
    return q, k, v, {"seqused_k": ints(*lengths)}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page, num_splits", [(1, 3), (3, 1), (PAGE, 3), (100, 1)])
def test_page_sizes(page, layout, num_splits, device):
    q, k, v, used = problem(LENGTHS, SHAPE)
    cache = paged(k, v, LENGTHS, page, layout=layout)
    check_flash_decode(
        *(q, k, v), cache=cache, device=device, num_splits=num_splits, causal=True, **used
    )


@pytest.mark.parametrize("heads, head_dim", [(32, 128), (4, 256)])
def test_pages_of_shared_columns(heads, head_dim, device):
    """Where SIMD groups split the columns, each has the page numbers."""
    shape = {"heads": heads, "kv_heads": 1, "q_length": 1, "head_dim": head_dim}
    q, k, v, used = problem([40, 300], shape | {"dtype": torch.float16})
    check_flash_decode(q, k, v, cache=paged(k, v, [40, 300], 8), device=device, **used)


def test_latent_pages(device):
    """MLA in pages: values are the first columns of the keys' rows."""
    shape = {"heads": 16, "kv_heads": 1, "q_length": 1, "head_dim": 576, "v_head_dim": 512}
    q, k, _, used = problem([20, 70], shape | {"dtype": torch.float16})
    v = k[..., :512]
    keys, _, where = paged(k, v, [20, 70], 16)
    cache = keys, keys[..., :512], where
    check_flash_decode(q, k, v, cache=cache, device=device, num_splits=2, **used)


def test_cache_batch_idx(device):
    """Batches of the cache in any order, more than once and not at all."""
    q, k, v = make_qkv(batch=5, kv_length=65, **SHAPE)
    k[1] = v[1] = torch.nan
    idx = torch.tensor([4, 0, 0, 3, 2])
    cache = k, v, {"cache_batch_idx": idx.int()}
    check_flash_decode(q, k[idx], v[idx], cache=cache, device=device, num_splits=2)


@pytest.mark.parametrize(
    "dtype, page, num_splits",
    [(torch.float32, PAGE, 1), (torch.float16, None, 2), (torch.bfloat16, PAGE, 1)],
)
@pytest.mark.parametrize("format", FORMATS)
def test_formats(format, dtype, page, num_splits, device):
    """Contiguous and in pages, against float64 of the values that the cache stands for."""
    q, k, v, used = problem(LENGTHS, SHAPE | {"dtype": dtype})
    scale = torch.tensor([0.3, 0.4]) if format == "fp8_e4m3" else None
    k, v, cache = quantised(k, v, format, scale=scale)
    if page is not None:
        cache = in_pages(cache, LENGTHS, page, layout=LAYOUTS[1])
    check_flash_decode(
        *(q, k, v), cache=cache, device=device, num_splits=num_splits, causal=True, **used
    )


@pytest.mark.parametrize("format", FORMATS)
def test_quantised_latent_cache(format, device):
    q, k, _ = make_qkv(1, 4, 1, 1, 40, 576, dtype=torch.float16)
    scale = torch.tensor([0.3]) if format == "fp8_e4m3" else None
    k, _, (data, _, scales) = quantised(k, k[..., :512], format, scale=scale)
    columns = 512 // 2 if format == "q4_0" else 512
    in_k = scales["k_scale"] if format == "fp8_e4m3" else scales["k_scale"][..., :16]
    cache = data, data[..., :columns], {"k_scale": scales["k_scale"], "v_scale": in_k}
    check_flash_decode(q, k, k[..., :512], cache=cache, device=device)


@st.composite
def problems(draw):
    lengths = draw(st.lists(st.integers(1, 90), min_size=1, max_size=3))
    shape = SHAPE | {"q_length": draw(st.integers(1, 5))}
    sizes = (len(lengths), shape["heads"], shape["q_length"], max(lengths), shape["head_dim"])
    options = any_options(draw, *sizes, kv_lengths=lengths)
    for name in ("k_rotary_cos", "k_rotary_sin", "seqused_k"):
        options.pop(name, None)
    options["rotary_interleaved"] &= "q_rotary_cos" in options
    page = draw(st.sampled_from([None, 8, 32]))
    format = draw(st.sampled_from([None, *FORMATS]))
    return lengths, shape, options, page, format, draw(st.integers(0, 3))


@settings(max_examples=settings.default.max_examples // 5)  # the fuzzer goes on
@given(problems())
def test_any_features_at_once(device, drawn):
    lengths, shape, options, page, format, num_splits = drawn
    q, k, v, used = problem(lengths, shape)
    for name in ("attn_mask", "attn_bias"):
        # Broadcasts to the capacity, which pages round up.
        if page is not None and name in options and options[name].shape[-1] > 1:
            del options[name]
    cache = None
    if format is not None:
        scale = torch.tensor([0.3, 0.4]) if format == "fp8_e4m3" else None
        k, v, cache = quantised(k, v, format, scale=scale)
    if page is not None:
        cache = in_pages(cache, lengths, page) if cache else paged(k, v, lengths, page)
    check_flash_decode(
        *(q, k, v), cache=cache, device=device, num_splits=num_splits, **options, **used
    )


@pytest.mark.parametrize(
    "kv_heads, head_dim, pages", [(8, 64, (8, 256)), (8, 128, (8,)), (1, 128, (8,))]
)
def test_pages_cost_few_loads(kv_heads, head_dim, pages):
    """At most 5 percent more than a contiguous cache, whatever the size of pages."""
    q, k, v = make_qkv(1, 8, kv_heads, 1, 1024, head_dim, dtype=torch.float16)

    def loads(keys, values, where):
        with simulate(count=True) as run:
            torch.ops.metal_attn.flash_decode(q, keys, values, num_splits=1, **where)
        return run.counters["flash_decode"].loads["device"]

    contiguous = loads(k, v, {})
    for page in pages:
        keys, values, where = paged(k, v, [1024], page)
        where["block_table"] = where["block_table"][:, : 1024 // page]
        assert contiguous < loads(keys, values, where) <= 1.05 * contiguous, page
