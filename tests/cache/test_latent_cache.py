"""MLA's latent caches: values are the first columns of the keys, so they are stored once."""

from functools import partial

import pytest
import torch

from tests.cache.sequences import tables
from tests.helpers.cases import each_case
from torch_metal_attn.kv_cache import LatentCache, PagedKVCache
from torch_metal_attn.quantisation import FORMATS
from torch_metal_attn.runtime import extension
from torch_metal_attn.simulator import simulate
from torch_metal_attn.testing import judge

LATENT, ROTARY, HEADS, SCALE = 64, 32, 4, 0.125
# Formats whose group size divides the number of columns.
USABLE_FORMATS = [None, *(name for name in FORMATS if not name.endswith("g64"))]

normal = partial(judge.normal, dtype=torch.float16)
TABLES = tables(ROTARY)


def make_cache(**options):
    return LatentCache(12, 4, LATENT, ROTARY, **options)


def test_values_share_the_memory_of_keys():
    for format in USABLE_FORMATS:
        layer = make_cache(format=format).layers[0]
        assert layer.v_cache.data_ptr() == layer.k_cache.data_ptr()
        plain = PagedKVCache(12, 4, 1, LATENT + ROTARY, format=format).layers[0]
        assert layer.k_cache.untyped_storage().nbytes() == plain.k_cache.nbytes


def test_values_are_written_once():
    """An append stores only the new rows. A step stores the new rows and its results."""
    cache = make_cache()
    ids = [cache.allocate(), cache.allocate()]
    rows = normal(2, 1, 20, LATENT + ROTARY)
    with simulate(count=True) as run:
        cache.append(ids, rows)
    assert run.counters["append_kv"].store_bytes["device"] == 2 * 20 * (LATENT + ROTARY) * 2
    q = normal(2, HEADS, 1, LATENT + ROTARY)
    with simulate(count=True) as run:
        cache.decode_step(ids, q, rows[:, :, :1], softmax_scale=SCALE, num_splits=1)
    results = 2 * HEADS * (LATENT * 2 + 4)
    stored = run.counters["flash_decode"].store_bytes["device"]
    assert stored == 2 * (LATENT + ROTARY) * 2 + results


SCALES = torch.tensor([0.5, 2.0, 4.0])
# With different scales, equal codes of keys and values are not equal numbers.
SCALE_SETS = [
    {"k_scale": SCALES[:2]},
    {"v_scale": SCALES[:2]},
    {"k_scale": SCALES[:2], "v_scale": SCALES[::2]},
]


def test_scales_of_keys_and_values_may_differ():
    """Then flash_decode does not read the values from the keys."""
    k_cache = normal(1, 2, 5, LATENT, seed=1).to(torch.float8_e4m3fn)
    q, values = normal(1, 2, 1, LATENT, seed=2), k_cache[..., :32]
    with simulate(check=True):
        out, apart = (
            torch.ops.metal_attn.flash_decode(q, k_cache, v, softmax_scale=SCALE, **SCALE_SETS[2])
            for v in (values, values.clone())
        )
    assert all(map(torch.equal, out, apart))
    alike = {"k_scale": SCALES[:2], "v_scale": SCALES[:2]}
    for scales, in_keys in (({}, True), (alike, True), *((x, False) for x in SCALE_SETS)):
        explained = torch.ops.metal_attn_explain.flash_decode(q, k_cache, values, **scales)
        (launch,) = extension.launches(explained)
        assert ("V_IN_K" in launch["defines"]) == in_keys, scales


def append_fp8(**scales):
    k_cache, rows = torch.zeros(1, 2, 4, LATENT).to(torch.float8_e4m3fn), ROWS[:, :, :, :LATENT]
    rows = rows.expand(1, 2, 1, LATENT).float()
    caches = k_cache, k_cache[..., :32]
    torch.ops.metal_attn.append_kv(rows, rows[..., :32], *caches, **scales)


ROWS = torch.zeros(1, 1, 1, LATENT + ROTARY).half()
QUERY = torch.zeros(1, HEADS, 1, LATENT + ROTARY).half()


def offset_v(layer):
    """k_cache in the op's layout, and a v_cache that begins at column 8 of k_cache."""
    k_cache = layer.k_cache[:1].transpose(1, 2)
    return k_cache, k_cache[..., 8:72]


INVALID_CALLS = [
    (lambda c: LatentCache(2, 4, 0, 16), "latent_dim is 0; it must be at least 1"),
    (lambda c: c.append([0], ROWS, ROWS), r"v has shape \(1, 1, 1, 96\); it must be \(1, 1, 1, 64"),
    (
        lambda c: c.append([0], ROWS, ROWS[..., :LATENT].clone()),
        r"v_cache is the first 64 columns of k_cache, and v is not .* of k; .*\[..., :64\] as v",
    ),
    (
        lambda c: torch.ops.metal_attn.append_kv(ROWS, ROWS[..., 8:72], *offset_v(c.layers[0])),
        "v_cache may share elements with k_cache, and both",
    ),
    *(
        (lambda c, x=x: append_fp8(**x), "v_cache may share elements with k_cache, and both")
        for x in SCALE_SETS
    ),
    (
        lambda c: c.decode_step(
            [0], QUERY, ROWS, softmax_scale=1.0, token_ids=[[1]], parents=torch.tensor([-1]).int()
        ),
        "token_ids is given with parents, and the rows of a tree do not follow each other",
    ),
    (
        lambda c: c.append([0], ROWS, **TABLES, rotary_first_column=60),
        "rotary_first_column is 60 and v_cache is the first 64 columns of k_cache",
    ),
    (
        lambda c: c.append([0], ROWS, **TABLES, rotary_first_column=65),
        r"rotary_first_column is 65; it must be in 0\.\.64",
    ),
    (
        lambda c: c.append([0], ROWS, rotary_first_column=64),
        "rotary_first_column is 64 and rotary_cos is not given",
    ),
    (
        lambda c: c.decode_step([0], QUERY, ROWS),
        "softmax_scale is None; pass it with values_in_keys",
    ),
]


@each_case("call, message", INVALID_CALLS)
def test_invalid_calls_are_refused(call, message):
    cache = LatentCache(2, 4, LATENT, ROTARY)
    cache.allocate()
    with pytest.raises((TypeError, ValueError), match=message):
        call(cache)
    assert cache.num_free_pages == 2
    assert cache.seqlens([0]).tolist() == [0]
    assert not cache.layers[0].k_cache.any()
