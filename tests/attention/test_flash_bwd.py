"""flash_bwd: layouts, bits, zeros and what is not finite.

Its values by length, head dim and feature are rows of test_values.py.
"""

import math

import pytest
import torch

from tests.attention.flash_bwd_check import backward, check_flash_bwd, make_gradients, run
from tests.attention.flash_bwd_features import (
    check_the_same_bits,
    exchanging,
    problem,
    rotated,
)
from tests.attention.flash_fwd_check import DTYPES, make_qkv, random_mask
from tests.attention.head_dims import HOME, ODD
from tests.attention.test_values import SCORES
from tests.helpers.cases import each_case
from torch_metal_attn.reference import attention
from torch_metal_attn.testing.judge import ints, normal

F32, F16, BF16 = DTYPES
CAUSAL = {"causal": True}


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.cpu(), other.cpu())


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_error_does_not_grow_with_the_rows(dtype, device, cores):
    """Of dv and dk with the queries, of dq with the keys."""
    cores(1)  # so that the tiles are those of short problems
    check_flash_bwd(*make_qkv(1, 1, 1, 2048, 32, 16, dtype=dtype), device=device)
    check_flash_bwd(*make_qkv(1, 1, 1, 32, 2048, 16, dtype=dtype), device=device)


def test_dk_and_dv_sum_over_the_group(device):
    """As expanded heads do, each with gradients of its own."""
    q, k, v = make_qkv(2, 6, 2, head_dim=HOME)
    dout, dlse = make_gradients(q, v, q.shape[:3])
    _, _, dq, dk, dv, _ = backward(q, k, v, dout, dlse, device, {})
    wide = [tensor.repeat_interleave(3, 1) for tensor in (k, v)]
    _, _, wide_dq, *each, _ = backward(q, *wide, dout, dlse, device, {})
    assert torch.equal(dq, wide_dq)
    for summed, parts in zip((dk, dv), each, strict=True):
        torch.testing.assert_close(summed, parts.unflatten(1, (2, 3)).sum(2))


def test_no_query_heads(device):
    q, k = torch.empty(1, 0, 5, 16).half(), torch.randn(1, 2, 7, 16).half()
    _, dk, dv, *_ = run("flash_bwd", device, q, None, q, k, k.clone(), q, torch.empty(1, 0, 5))
    assert (dk == 0).all()
    assert (dv == 0).all()


# --- memory ---


def in_order(*order):
    """The same tensor, its dimensions in this order in memory."""
    back = torch.tensor(order).argsort().tolist()
    return lambda x: x.permute(order).contiguous().permute(back)


def between_nan(x):
    """Rows with NaN between them."""
    rows = torch.full((*x.shape[:3], x.shape[3] + 11), math.nan, dtype=x.dtype)
    rows[..., 3 : 3 + x.shape[3]] = x
    return rows[..., 3 : 3 + x.shape[3]]


def shifted(offset):
    """A storage offset that only narrow loads can read."""
    return lambda x: torch.cat([x.flatten()[:offset], x.flatten()])[offset:].view(x.shape)


LAYOUTS = [
    *(
        (dims, in_order(*order))
        for dims in ((16, 16, F32), (16, 16, F16), (1, 1, BF16))
        for order in ((0, 2, 1, 3), (1, 0, 2, 3), (2, 1, 0, 3), (2, 0, 1, 3), (1, 2, 0, 3))
    ),
    *((dims, between_nan) for dims in ODD),
    *(((16, 16, F16), shifted(offset)) for offset in (1, 2, 3)),
]


def seen(dims):
    """What test_values.py has with these dims: 12 columns with lengths."""
    return CAUSAL | ({"seqused_k": ints(60, 65), "leftpad_k": ints(0, 7)} if 12 in dims else {})


@each_case("dims", dict(LAYOUTS))
def test_any_memory(dims, device):
    """Results lie as their input does, and have the same bits."""
    head_dim, v_head_dim, dtype = dims
    q, k, v = make_qkv(2, 4, 2, head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype)
    out, lse = attention(q, k, v, **seen(dims))
    dout, dlse = make_gradients(q, v, q.shape[:3])
    options = seen(dims) | {"exact_delta": True}
    given = dout, q, k, v, out
    expected = run("flash_bwd", device, dout, dlse, q, k, v, out, lse, **options)
    dlse = in_order(2, 1, 0, 3)(dlse[..., None])[..., 0]
    for lay_out in (lay_out for of, lay_out in LAYOUTS if of == dims):
        dout, q, k, v, out = (lay_out(x).to(device) for x in given)
        found = run("flash_bwd", device, dout, dlse, q, k, v, out, lse, **options)
        assert_same(found, expected)
        if lay_out is not between_nan:
            assert [x.stride() for x in found[:3]] == [x.stride() for x in (q, k, v)]


def test_expanded_gradients(device):
    """As a mean's backward hands them on."""
    q, k, v = make_qkv(2, 4, 2, head_dim=HOME, dtype=F16)
    out, lse = attention(q, k, v)
    dout = normal(16).half().expand(out.shape)
    dlse = torch.tensor(0.7).expand(lse.shape)
    copied = dout.contiguous(), dlse.contiguous()
    exact = {"exact_delta": True}
    expected = run("flash_bwd", device, *copied, q, k, v, out, lse, **exact)
    assert_same(run("flash_bwd", device, dout, dlse, q, k, v, out, lse, **exact), expected)


# --- bits ---


@pytest.mark.parametrize(
    "feature, more",
    [("MQA", {}), ("causal", SCORES), ("causal", rotated(16)), ("slices", {})],
    ids=["MQA", "scores", "rotary", "slices"],
)
def test_the_same_bits_in_any_order(feature, more):
    check_the_same_bits(*problem(feature, **more))


# Several features at once, in other dtypes: which keys are seen, what changes scores, rotation.
TOGETHER = {
    "float32": ("window, causal", "mask", "softcap, all, rotary, odd"),
    "bfloat16": (
        *("both lengths", "sink, no key, bias, half", "rotary", "mask, transposed", "alibi"),
        *("softcap", "chunk, causal, padded"),
    ),
}


@pytest.mark.parametrize("dtype", TOGETHER)
def test_features_together_where_simd_groups_share_keys(dtype, device):
    qkv, options = problem(*TOGETHER[dtype], dtype=dtype)
    with exchanging():
        check_flash_bwd(*qkv, **options, device=device)


# --- rows and keys without weight ---


MASKED = [torch.bool, F32]


@pytest.mark.parametrize("mask_dtype", MASKED)
def test_masked_rows(mask_dtype, device):
    """Of nothing but hidden keys: no gradient, and nothing for the keys. No NaN of inf - inf."""
    (q, k, v), _ = problem("plain")
    hides = False if mask_dtype == torch.bool else -math.inf
    mask = random_mask(2, 4, 77, 101, dtype=mask_dtype)
    mask[:, :, 5:40] = mask[0, 2] = mask[1] = hides
    dq, dk, dv, _ = check_flash_bwd(q, k, v, attn_mask=mask, device=device)
    for gradient in (dq[:, :, 5:40], dq[0, 2], dq[1], dk[1], dv[1]):
        assert (gradient == 0).all()
    if mask_dtype != torch.bool:  # Hugging Face masks are made of the lowest number
        lowest = torch.zeros(2, 1, 77, 101, dtype=mask_dtype)
        lowest.masked_fill_(~random_mask(2, 1, 77, 101), torch.finfo(mask_dtype).min)
        check_flash_bwd(q, k, v, attn_mask=lowest, device=device)


def test_rows_of_a_sink_alone(device):
    qkv, options = problem("causal", **SCORES, q_offset=-100)
    *found, _ = check_flash_bwd(*qkv, **options, device=device)
    assert all((gradient == 0).all() for gradient in found)


# --- large and not finite ---


@pytest.mark.parametrize("softcap", [0.0, 0.3, 20.0])
def test_large_scores(softcap, device):
    """Weights of one key each, far beyond float16's range; tanh of the cap is saturated."""
    capped = SCORES | {"softcap": softcap} if softcap else {}
    (q, k, v), options = problem("causal", **capped)
    given = (100 * q, 100 * k, v)
    dq, dk, _, _ = check_flash_bwd(*given, **options, own_forward=True, device=device)
    assert dq.isfinite().all()
    assert dk.isfinite().all()


@pytest.mark.parametrize("name", ["q", "dout"])
def test_nan_stays_in_its_row_of_dq(name, device):
    (q, k, v), _ = problem("plain", dtype="float32")
    dout, dlse = make_gradients(q, v, q.shape[:3])
    {"q": q, "dout": dout}[name][0, 1, 30, 3] = math.nan
    _, _, dq, dk, dv, _ = backward(q, k, v, dout, dlse, device, {})
    assert dq[0, 1, 30].isnan().all()
    dq[0, 1, 30] = 0
    assert dq.isfinite().all()
    # Query head 1 belongs to KV head 0.
    assert dk[0, 0].isnan().all()
    assert dk[0, 1].isfinite().all()
    assert dk[1].isfinite().all()
    assert dv[0, 1].isfinite().all()
    assert dv[0, 0].isnan().all() if name == "q" else dv[0, 0, :, 3].isnan().all()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_gradients_that_are_not_finite_come_out_so(value, device):
    (q, k, v), _ = problem("plain")
    dout, _ = make_gradients(q, v, q.shape[:3], dlse=False)
    dout[1, 3, 76] = value
    _, _, dq, dk, dv, _ = backward(q, k, v, dout, None, device, {})
    assert not dq[1, 3, 76].isfinite().any()
    assert not dv[1, 1].isfinite().any()
    assert not dk[1, 1].isfinite().any()
    assert dq[0].isfinite().all()
    assert dk[1, 0].isfinite().all()
