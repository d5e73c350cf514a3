"""flash_bwd: layouts, bits, zeros and what is not finite.

Its values by length, head dim and feature are rows of test_values.py.
"""

import math

import pytest
import torch

from tests.attention.flash_bwd_check import backward, check_flash_bwd, make_gradients, run
from tests.attention.flash_bwd_features import FEATURES, SHAPE, exchanging, problem, tables
from tests.attention.flash_fwd_check import DTYPES, make_qkv
from tests.attention.flash_fwd_options import ints, random_mask
from tests.attention.head_dims import HOME, ODD
from tests.helpers.cases import each_case
from torch_metal_attn import simulate
from torch_metal_attn.reference import attention

F32, F16, BF16 = DTYPES
CAUSAL = {"causal": True}


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.cpu(), other.cpu())


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_error_does_not_grow_with_the_rows(dtype, device, cores):
    """Of dv and dk with the queries, of dq with the keys."""
    cores(1)  # so that the tiles are those of short problems
    check_flash_bwd(*make_qkv(1, 1, 1, 4096, 32, 16, dtype=dtype), device=device)
    check_flash_bwd(*make_qkv(1, 1, 1, 32, 4096, 16, dtype=dtype), device=device)


def test_dk_and_dv_sum_over_the_group(device):
    """As expanded heads do, each with gradients of its own."""
    q, k, v = make_qkv(2, 6, 2, head_dim=HOME)
    dout, dlse = make_gradients(q, v, q.shape[:3])
    _, dq, dk, dv, _ = backward(q, k, v, dout, dlse, device, {})
    wide = [tensor.repeat_interleave(3, 1) for tensor in (k, v)]
    _, wide_dq, *each, _ = backward(q, *wide, dout, dlse, device, {})
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


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_expanded(dim, device):
    """Every copy gets gradients of its own, as autograd expects of an expanded input."""
    tensors = make_qkv(2, 2, 2, 65, 65, 16, dtype=F16)
    q, k, v = (t.narrow(dim, 0, 1).expand(t.shape) for t in tensors)
    whole = check_flash_bwd(*(t.clone() for t in (q, k, v)), device=device)
    assert_same(check_flash_bwd(q, k, v, device=device), whole)


def test_expanded_gradients(device):
    """As a mean's backward hands them on."""
    q, k, v = make_qkv(2, 4, 2, head_dim=HOME, dtype=F16)
    out, lse = attention(q, k, v)
    dout = torch.randn(16, generator=torch.Generator().manual_seed(0)).half().expand(out.shape)
    dlse = torch.tensor(0.7).expand(lse.shape)
    copied = dout.contiguous(), dlse.contiguous()
    exact = {"exact_delta": True}
    expected = run("flash_bwd", device, *copied, q, k, v, out, lse, **exact)
    assert_same(run("flash_bwd", device, dout, dlse, q, k, v, out, lse, **exact), expected)


# --- bits ---


# The options of a subject of test_values.py, whose kernels these are.
SCORES = {
    "softcap": 2.0,
    "alibi_slopes": torch.tensor([0.3, 0.1, 0.02, 0.5]),
    "learnable_sink": torch.tensor([3.0, 1.0, -math.inf, 5.0]),
}


@pytest.mark.parametrize(
    "feature, more",
    [("MQA", {}), ("causal", SCORES), ("causal", tables(8)), ("slices", {})],
    ids=["MQA", "scores", "rotary", "slices"],
)
def test_the_same_bits_in_any_order(feature, more):
    """No atomics: threadgroups and SIMD groups may run in any order, on any number of cores."""
    (q, k, v), options = problem(feature)
    options |= more
    given = make_gradients(q, v, q.shape[:3], dlse=options.pop("dlse", True))
    runs = []
    for order in ({}, {"seed": 1, "workers": 1}, {"seed": 2, "workers": 2}):
        with simulate(check=True, **order):
            runs.append(backward(q, k, v, *given, "cpu", options))
    assert_same(runs[1], runs[0])
    assert_same(runs[2], runs[0])


# Several features at once, in other dtypes: which keys are seen, what changes scores, rotation.
TOGETHER = {
    "window, causal": (F32, "softcap, all, rotary, odd", "mask"),
    "both lengths": (
        *(BF16, "chunk, causal, padded", "softcap", "alibi", "mask, transposed", "rotary"),
        "sink, no key, bias, half",
    ),
}


@pytest.mark.parametrize("first", TOGETHER)
def test_features_together_where_simd_groups_share_keys(first, device):
    dtype, *others = TOGETHER[first]
    qkv, options = problem(first, dtype)
    for feature in others:
        options = FEATURES[feature] | options
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
    qkv, options = problem("causal")
    *found, _ = check_flash_bwd(*qkv, **options | SCORES | {"q_offset": -100}, device=device)
    assert all((gradient == 0).all() for gradient in found)


# --- large and not finite ---


@pytest.mark.parametrize("softcap", [0.0, 0.3, 20.0])
def test_large_scores(softcap, device):
    """Weights of one key each, far beyond float16's range; tanh of the cap is saturated."""
    (q, k, v), options = problem("causal")
    options |= SCORES | {"softcap": softcap} if softcap else {}
    options |= {"own_forward": True}
    dq, dk, _, _ = check_flash_bwd(100 * q, 100 * k, v, **options, device=device)
    assert dq.isfinite().all()
    assert dk.isfinite().all()


@pytest.mark.parametrize("name", ["q", "dout"])
def test_nan_stays_in_its_row_of_dq(name, device):
    (q, k, v), _ = problem("plain", F32)
    dout, dlse = make_gradients(q, v, q.shape[:3])
    {"q": q, "dout": dout}[name][0, 1, 30, 3] = math.nan
    _, dq, dk, dv, _ = backward(q, k, v, dout, dlse, device, {})
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
    _, dq, dk, dv, _ = backward(q, k, v, dout, None, device, {})
    assert not dq[1, 3, 76].isfinite().any()
    assert not dv[1, 1].isfinite().any()
    assert not dk[1, 1].isfinite().any()
    assert dq[0].isfinite().all()
    assert dk[1, 0].isfinite().all()


def test_the_features_have_more_than_one_tile_of_each_side():
    assert min(SHAPE["q_length"], SHAPE["kv_length"]) > 64
