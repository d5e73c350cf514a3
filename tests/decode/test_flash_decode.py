"""flash_decode: few queries, long caches, split over the keys, against float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.attention.flash_fwd_check import DTYPES, check_flash_decode, make_qkv, on
from tests.attention.flash_fwd_options import any_options, ints, random_mask, rotary_tables
from tests.helpers.home import HOME
from torch_metal_attn import simulate
from torch_metal_attn.reference import attention

SPLITS = [1, 2, 7]


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (4, 4), (8, 2), (7, 1), (12, 1), (32, 1)])
@pytest.mark.parametrize("q_length, num_splits", [(1, 3), (3, 1), (16, 3)])
def test_any_ratio_of_heads(heads, kv_heads, q_length, num_splits, device):
    """The rows of a tile are the queries of all heads of a KV head: from 1 to 512."""
    q, k, v = make_qkv(2, heads, kv_heads, q_length, 70, 64, dtype=torch.float16)
    check_flash_decode(q, k, v, causal=True, num_splits=num_splits, device=device)


@pytest.mark.parametrize("num_splits", SPLITS)
@pytest.mark.parametrize("kv_length", [1, 7, 31, 33, 65, 127, 129, 1023])
def test_any_number_of_keys(kv_length, num_splits, device):
    """Splits without keys among them."""
    q, k, v = make_qkv(q_length=1, kv_length=kv_length, **HOME)
    check_flash_decode(q, k, v, num_splits=num_splits, device=device)


HEAD_DIMS = [(1, 1), (7, 33), (31, 8), (40, 40), (65, 72), (80, 128), (128, 64), (192, 128)]
HEAD_DIMS += [(256, 256)]


@pytest.mark.parametrize(
    "head_dim, v_head_dim, dtype",
    [(*dims, DTYPES[i % 3]) for i, dims in enumerate(HEAD_DIMS)]
    + [(256, 256, torch.float32), (31, 8, torch.float16)],
)
def test_any_head_dim(head_dim, v_head_dim, dtype, device):
    q, k, v = make_qkv(1, 4, 2, 2, 65, head_dim, v_head_dim, dtype=dtype)
    check_flash_decode(q, k, v, num_splits=2, device=device)


@pytest.mark.parametrize(
    "heads, dtype, num_splits", zip([1, 9, 32], DTYPES, [2, 1, 2], strict=True)
)
def test_latent_cache(heads, num_splits, dtype, device):
    """MLA: one KV head whose values are the first 512 of its 576 columns."""
    q, k, _ = make_qkv(1, heads, 1, 1, 40, 576, dtype=dtype)
    check_flash_decode(q, k, k[..., :512], num_splits=num_splits, device=device)


def test_hidden_values_of_a_latent_cache_are_not_used(device):
    """NaN behind the length, in the rows that are keys and values at once."""
    q, k, _ = make_qkv(1, 4, 1, 2, 60, 96)
    k[:, :, 37:] = math.nan
    k[:, :, :5] = math.nan
    options = {"seqused_k": ints(37), "leftpad_k": ints(5)}
    check_flash_decode(q, k, k[..., :64], **options, num_splits=2, device=device)


FEATURES = {
    "causal": {"causal": True},
    "window": {"window_size_left": 20, "window_size_right": 3, "q_offset": 60},
    "window of the last keys": {"window_size_left": 33, "causal": True},
    "chunk": {"attention_chunk": 21},
    "softcap": {"softcap": 1.5, "softmax_scale": 0.5},
    "sink": {"learnable_sink": torch.tensor([3.0, 1.0, -1.0, 5.0])},
    "sink alone": {"learnable_sink": torch.tensor([3.0, 1.0, -1.0, 5.0]), "q_offset": -9}
    | {"causal": True},
    "alibi": {"alibi_slopes": torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]])},
    "mask": {"attn_mask": random_mask(2, 4, 5, 101)},
    "mask of pairs": {"attn_mask": random_mask(2, 1, 5, 100), "kv_length": 100},
    "bias": {"attn_bias": random_mask(2, 4, 5, 101, dtype=torch.float32)},
    "bias of a head": {"attn_mask": random_mask(4, 1, 101, dtype=torch.float16)},
    "lengths": {"seqused_k": ints(90, 13), "leftpad_k": ints(5, 13)},
    "nothing": {"q_offset": -200, "causal": True},
}
for _interleaved in (False, True):
    _cos, _sin = rotary_tables(5, 8, batch=2)
    FEATURES[f"rotary, interleaved {_interleaved}"] = {
        "q_rotary_cos": _cos,
        "q_rotary_sin": _sin,
        "rotary_interleaved": _interleaved,
    }


@pytest.mark.parametrize("feature", FEATURES)
def test_feature(feature, device):
    """With splits or without, in turn."""
    num_splits = (1, 3)[list(FEATURES).index(feature) % 2]
    options = dict(FEATURES[feature])
    kv_length = options.pop("kv_length", 101)
    q, k, v = make_qkv(2, q_length=5, kv_length=kv_length, **HOME)
    check_flash_decode(q, k, v, **options, num_splits=num_splits, device=device)


@st.composite
def problems(draw):
    batch, kv_heads = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    heads = kv_heads * draw(st.sampled_from([1, 3, 5, 17]))
    q_length, kv_length = draw(st.integers(1, 6)), draw(st.integers(1, 150))
    options = any_options(draw, batch, heads, q_length, kv_length, 32)
    for name in ("k_rotary_cos", "k_rotary_sin"):
        options.pop(name, None)
    options["rotary_interleaved"] &= "q_rotary_cos" in options
    dtype = draw(st.sampled_from(DTYPES))
    sizes = (batch, heads, kv_heads, q_length, kv_length, 32)
    return sizes, dtype, draw(st.integers(0, 5)), options


@settings(max_examples=settings.default.max_examples * 2 // 5)  # the fuzzer goes on
@given(problems())
def test_any_features_at_once(device, problem):
    sizes, dtype, num_splits, options = problem
    q, k, v = make_qkv(*sizes, dtype=dtype)
    check_flash_decode(q, k, v, **options, num_splits=num_splits, device=device)


def test_strides(device):
    """Heads inside rows, a broadcast head, keys at any stride, rows that are not aligned."""
    q, k, v = make_qkv(2, 4, 2, 3, 65, 40, dtype=torch.float16)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    k = torch.nn.functional.pad(k, (1, 2))[..., 1:-2]
    v = v[:, :1].expand(2, 2, 65, 40)
    check_flash_decode(q, k, v, num_splits=2, device=device)


def test_nan_in_a_visible_key_comes_out(device):
    q, k, v = make_qkv(q_length=1, kv_length=40, **HOME)
    k[0, :, 3, 5] = math.nan
    out, lse = torch.ops.metal_attn.flash_decode(
        *(tensor.to(device) for tensor in (q, k, v)), num_splits=2
    )
    assert out.isnan().all()
    assert lse.isnan().all()


@pytest.mark.parametrize(
    "sizes", [(0, 2, 2, 1, 5), (1, 0, 0, 1, 5), (1, 2, 2, 0, 5), (1, 2, 1, 1, 0)]
)
def test_empty(sizes, device):
    q, k, v = make_qkv(*sizes, HOME["head_dim"], dtype=HOME["dtype"])
    out, lse = torch.ops.metal_attn.flash_decode(*(x.to(device) for x in (q, k, v)))
    oracle, oracle_lse = attention(q, k, v)
    assert torch.equal(out.cpu(), oracle)
    assert torch.equal(lse.cpu(), oracle_lse)


def test_runs_are_equal_bit_for_bit(device):
    q, k, v = (x.to(device) for x in make_qkv(q_length=1, kv_length=300, **HOME))
    first, second = (torch.ops.metal_attn.flash_decode(q, k, v, num_splits=4) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("seed", [1, 2])
def test_any_order_of_lanes(seed):
    """With columns split over SIMD groups, and with keys split."""
    with simulate(check=True, seed=seed):
        for heads, head_dim in ((32, 128), (4, 64)):
            q, k, v = make_qkv(1, heads, 1, 1, 80, head_dim, dtype=torch.float16)
            check_flash_decode(q, k, v, device="cpu")


REFUSED = {
    "num_splits": ({"num_splits": 1025}, "num_splits is 1025; it must be 0"),
    "dropout": (
        {"dropout_p": 0.5, "rng_state": torch.tensor([1, 2])},
        "dropout_p is 0.5; flash_decode has no dropout",
    ),
    "rotation of k": (
        {"k_rotary_cos": torch.ones(65, 8), "k_rotary_sin": torch.ones(65, 8)},
        "k_rotary_cos is given; flash_decode has no rotation of k",
    ),
    "heads": ({"learnable_sink": torch.zeros(3)}, "learnable_sink has shape"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case, device):
    """The error is the same with data and without."""
    options, message = REFUSED[case]
    operands = make_qkv(q_length=1, head_dim=16)
    with pytest.raises(ValueError, match=message):
        torch.ops.metal_attn.flash_decode(*(x.to(device) for x in operands), **on(device, options))
    with pytest.raises(ValueError, match=message):
        torch.ops.metal_attn.flash_decode(*(x.to("meta") for x in operands), **on("meta", options))


def test_no_gradient(device):
    q, k, v = (x.to(device) for x in make_qkv(q_length=1, **HOME))
    expected = torch.ops.metal_attn.flash_decode(q, k, v)
    results = torch.ops.metal_attn.flash_decode(q, k.requires_grad_(), v)
    for result, plain in zip(results, expected, strict=True):
        assert torch.equal(result, plain)
        with pytest.raises(NotImplementedError, match="k requires grad"):
            result.sum().backward()


@pytest.mark.parametrize("num_splits", [0, 2])
def test_opcheck(num_splits, device):
    operands = [x.to(device) for x in make_qkv(2, q_length=1, kv_length=40, **HOME)]
    torch.library.opcheck(
        torch.ops.metal_attn.flash_decode, operands, {"causal": True, "num_splits": num_splits}
    )


def test_compiled(device):
    """Whole graphs, for any number of keys."""
    decode = torch.ops.metal_attn.flash_decode
    compiled = torch.compile(
        lambda *operands: decode(*operands, causal=True), backend="aot_eager", fullgraph=True
    )
    for kv_length in (40, 41, 77):
        operands = [x.to(device) for x in make_qkv(q_length=1, kv_length=kv_length, **HOME)]
        results = zip(compiled(*operands), decode(*operands, causal=True), strict=True)
        assert all(torch.equal(one, other) for one, other in results)


def test_more_rows_than_the_shader_counts():
    """Also where all of them would fit in 32 bits, but not one step more."""
    k = torch.zeros(1, 1, 1, 8)
    for queries in (2**25, 2**25 - 512):
        q = k.expand(1, 64, queries, 8)
        with pytest.raises(ValueError, match=rf"{queries} queries of 64 heads .* up to 1073741824"):
            torch.ops.metal_attn_explain.flash_decode(q, k, k)
