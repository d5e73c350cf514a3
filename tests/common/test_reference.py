"""The reference, against naive formulas and torch's attention."""

import math
from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

from tests.attention.flash_fwd_check import rotary_tables
from tests.common.slow_attention import slow_attention, slow_varlen_attention
from tests.helpers.cases import each_case
from torch_metal_attn import reference
from torch_metal_attn.reference import attention, varlen_attention
from torch_metal_attn.testing import judge
from torch_metal_attn.testing.judge import ints

FURTHEST = 2**31 - 1024

normal = partial(judge.normal, dtype=torch.float64)


def qkv(batch=2, heads=4, kv_heads=2, q_length=5, kv_length=7, head_dim=8, v_head_dim=3):
    return (
        normal(batch, heads, q_length, head_dim),
        normal(batch, kv_heads, kv_length, head_dim, seed=1),
        normal(batch, kv_heads, kv_length, v_head_dim, seed=2),
    )


def check(q, k, v, **options):
    torch.testing.assert_close(attention(q, k, v, **options), slow_attention(q, k, v, **options))


# Shapes that broadcast to (2, 4, 5, 7).
BROADCASTS = [(7,), (1,), (5, 7), (5, 1), (1, 7), (4, 1, 1), (4, 5, 7), (2, 1, 5, 7), (2, 4, 1, 1)]
LENGTHS = [((7, 3), (0, 0)), ((7, 7), (0, 5)), ((0, 6), (0, 2)), ((2, 7), (4, 7))]
# Cases that the random draws of all features below seldom reach.
CASES = [
    *({"causal": True, "q_offset": n} for n in (None, 0, 2, -2, -9, 9, FURTHEST, -FURTHEST)),
    *(
        {"window_size_left": left, "window_size_right": right, "q_offset": offset}
        for left, right in ((0, -1), (2, -1), (-1, 0), (-1, 2), (1, 1))
        for offset in (None, 0, -3, 6)
    ),
    *(
        {"attention_chunk": chunk, "causal": causal, "q_offset": offset} | padding
        for chunk, causal, offset in product([1, 2, 3, 100], [False, True], [None, -4, 6])
        for padding in ({}, {"leftpad_k": ints(1, 4)})
    ),
    *(
        {"seqused_k": ints(*used), "leftpad_k": ints(*first), "causal": causal, "q_offset": offset}
        for (used, first), causal, offset in product(LENGTHS, (False, True), (None, 3))
    ),
    *({"attn_mask": normal(*shape) > 0, "causal": True} for shape in BROADCASTS),
    *(
        {"attn_bias": normal(*shape).to(dtype), "attn_mask": normal(5, 7, seed=4) > 0}
        for shape, dtype in product(BROADCASTS, (torch.float64, torch.float16))
    ),
    *({"attn_mask": normal(*shape, seed=3), "window_size_left": 3} for shape in BROADCASTS),
    # The bias masks out some keys of one row, and all keys of the next row.
    {"attn_bias": torch.zeros(5, 7).masked_fill(torch.arange(35).view(5, 7) > 25, -math.inf)},
]


@each_case("options", CASES)
def test_each_option_equals_slow_attention(options):
    check(*qkv(), **options)


def test_a_large_sink_does_not_overflow():
    q, k, v = (tensor.float() for tensor in qkv())
    out, lse = attention(q, k, v, learnable_sink=torch.full((4,), 3e4))
    assert (out == 0).all()
    assert (lse == 3e4).all()


# The examples are cheap, so there are more than by default.
more_examples = settings(max_examples=max(100, settings().max_examples))


def every_option(draw, batch, heads, q_length, kv_length, head_dim):
    seed = draw(st.integers(0, 2**31))
    features = ("mask", "bias", "alibi", "sink", "seqused_k", "leftpad_k", "q", "k")
    on = {name: draw(st.booleans()) for name in features}
    causal = draw(st.booleans())
    options = {
        "causal": causal,
        "window_size_left": draw(st.integers(-1, 6)),
        "window_size_right": -1 if causal else draw(st.integers(-1, 6)),
        "attention_chunk": draw(st.integers(0, 4)),
        "q_offset": draw(st.none() | st.integers(-6, 8)),
        "softcap": draw(st.sampled_from([0.0, 1.5])),
        "softmax_scale": draw(st.sampled_from([None, 0.3])),
    }
    sizes = [draw(st.sampled_from([1, n])) for n in (batch, heads, q_length, kv_length)]
    if on["mask"]:
        options["attn_mask"] = normal(*sizes, seed=seed) > -0.8
    if on["bias"]:
        options["attn_bias"] = normal(*sizes[draw(st.integers(0, 3)) :], seed=seed + 1)
    if on["alibi"]:
        shape = draw(st.sampled_from([(heads,), (batch, heads)]))
        options["alibi_slopes"] = normal(*shape, seed=seed + 2)
    if on["sink"]:
        options["learnable_sink"] = normal(heads, seed=seed + 3)
    for name in ("seqused_k", "leftpad_k"):
        if on[name]:
            options[name] = ints(*(draw(st.integers(0, kv_length)) for _ in range(batch)))
    pairs = draw(st.integers(1, head_dim // 2))
    for side, length in (("q", q_length), ("k", kv_length)):
        if on[side]:
            leading = draw(st.sampled_from([None, 1, batch]))
            cos, sin = rotary_tables(length, pairs, batch=leading, seed=seed + 4)
            options |= {f"{side}_rotary_cos": cos, f"{side}_rotary_sin": sin}
    options["rotary_interleaved"] = (on["q"] or on["k"]) and draw(st.booleans())
    return options


@more_examples
@given(data=st.data())
def test_all_features_together_equal_slow_attention(data):
    batch, kv_heads, group = (data.draw(st.integers(1, 2)) for _ in range(3))
    q_length, kv_length = (data.draw(st.integers(0, 6)) for _ in range(2))
    q, k, v = qkv(batch, kv_heads * group, kv_heads, q_length, kv_length, 5, 2)
    check(q, k, v, **every_option(data.draw, batch, kv_heads * group, q_length, kv_length, 5))


@more_examples
@given(data=st.data())
def test_all_features_of_packed_sequences_equal_slow_attention(data):
    lengths = data.draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=4))
    q_lengths, kv_lengths = [n for n, _ in lengths], [n for _, n in lengths]
    kv_heads, group = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    spare = data.draw(st.integers(0, 2))
    max_q, max_k = (max(n, default=0) + spare for n in (q_lengths, kv_lengths))
    packing = [torch.tensor([0, *n]).cumsum(0).int() for n in (q_lengths, kv_lengths)]
    q = normal(sum(q_lengths) + spare, kv_heads * group, 5)
    k = normal(sum(kv_lengths) + spare, kv_heads, 5, seed=1)
    v = normal(sum(kv_lengths) + spare, kv_heads, 2, seed=2)
    options = every_option(data.draw, len(lengths), kv_heads * group, max_q, max_k, 5)
    for name in ("seqused_k", "leftpad_k"):
        if name in options:
            options[name] = torch.minimum(options[name], ints(*kv_lengths))
    actual = varlen_attention(q, k, v, *packing, max_q, max_k, **options)
    expected = slow_varlen_attention(q, k, v, *packing, max_q, max_k, **options)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masks", [(), ("attn_mask",), ("attn_bias",)])
def test_blocks_change_nothing(monkeypatch, causal, masks):
    q, k, v = qkv(2, 4, 2, 67, 97, 8, 8)
    options = {"causal": causal, "window_size_left": 40, "softcap": 5.0}
    options |= {"seqused_k": ints(97, 80), "leftpad_k": ints(3, 0)}
    options |= {"alibi_slopes": normal(2, 4).abs()}
    options |= {name: normal(2, 1, 67, 97, seed=3) for name in masks}
    if "attn_mask" in masks:
        options["attn_mask"] = options["attn_mask"] > 0
    whole = attention(q, k, v, **options)
    monkeypatch.setattr(reference, "_SCORES_PER_BLOCK", 2 * 4 * 97 * 10)
    torch.testing.assert_close(attention(q, k, v, **options), whole)


def test_long_sequences_need_little_memory():
    """The scores of all queries and keys together would take 17 GB."""
    largest = 0

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.untyped_storage().nbytes())
            return result

    q, k, v = normal(1, 1, 192, 8, dtype=torch.float32), *normal(2, 1, 1, 2**18, 8).float()
    with Watch():
        out, _ = attention(q, k, v)
    assert largest <= 2**26
    torch.testing.assert_close(out, torch_sdpa(q, k, v), rtol=1e-4, atol=1e-5)


def test_nan_stays_nan():
    q, k, v = normal(3, 1, 1, 3, 8)
    q[0, 0, 1, 0] = math.nan
    out, lse = attention(q, k, v, causal=True, q_offset=0)
    assert out.isnan().any(-1).tolist() == [[[False, True, False]]]
    assert lse.isnan().tolist() == [[[False, True, False]]]
    q = normal(1, 1, 3, 8)
    k[0, 0, 1, 0] = math.nan
    lse = attention(q, k, v, causal=True, q_offset=0)[1]
    assert lse.isnan().tolist() == [[[False, True, True]]]


@pytest.mark.parametrize("heads", [1, 2])
def test_nan_of_unlisted_keys_has_no_effect(heads):
    """A query sees no key outside of its list, as in the kernels."""
    q, k, v = qkv()
    indices = torch.arange(5).view(1, 1, 5, 1).repeat(2, heads, 1, 2).int()
    mask = torch.ones(4, 1, 1, dtype=torch.bool)
    mask[::2] = False  # each of these query heads shares its keys with another head
    right, _ = attention(q, k, v, indices=indices)
    k[:, :, 5], v[:, :, 5], v[:, :, 6], v[:, :, 1] = *[torch.nan] * 2, -torch.inf, torch.nan
    out, _ = attention(q.requires_grad_(), k, v, indices=indices)
    rest = [0, 2, 3, 4]
    assert torch.equal(out[:, :, rest], right[:, :, rest])
    assert out[:, :, 1].isnan().all()
    out_of_half, _ = attention(q, k, v, indices=indices, attn_mask=mask)
    assert torch.equal(out_of_half[:, 1::2][:, :, rest], right[:, 1::2][:, :, rest])
    (gradient,) = torch.autograd.grad(out[:, :, rest].sum(), q)
    assert gradient[:, :, rest].isfinite().all()


def test_results_are_computed_in_float32_and_rounded_once():
    q, k, v = (normal(1, 2, 9, 16, seed=s).half() for s in range(3))
    out, lse = attention(q, k, v)
    assert (out.dtype, lse.dtype) == (torch.float16, torch.float32)
    exact, exact_lse = attention(q, k, v, compute_dtype=torch.float64)
    assert (exact.dtype, exact_lse.dtype) == (torch.float64, torch.float64)
    torch.testing.assert_close(exact, torch_sdpa(q.double(), k.double(), v.double()))
    # The result is computed in float32 and rounded once.
    torch.testing.assert_close(out, exact.half(), rtol=2**-10, atol=2**-14)


def test_invalid_arguments_raise():
    q, k = normal(1, 4, 3, 8), normal(1, 3, 3, 8)
    with pytest.raises(ValueError, match="4 heads"):
        attention(q, k, k)
    with pytest.raises(TypeError, match=r"torch\.int64"):
        attention(q, q, q, attn_mask=torch.ones(3, 3, dtype=torch.int64))
