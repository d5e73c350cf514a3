"""flash_bwd: reproducible bits, large scores, NaN and infinity."""

import math

import pytest
import torch

from tests.attention.flash_bwd_check import backward, check_flash_bwd, make_gradients
from tests.attention.flash_bwd_features import check_the_same_bits, exchanging, problem
from tests.attention.flash_fwd_check import DTYPES, make_qkv
from tests.attention.held_cases import HOME, rotated
from tests.attention.test_values import SCORES


def assert_same(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one.cpu(), other.cpu())


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_error_does_not_grow_with_the_rows(dtype, device, cores):
    cores(1)  # so that long and short problems have the same tiles
    check_flash_bwd(*make_qkv(1, 1, 1, 2048, 32, 16, dtype=dtype), device=device)
    check_flash_bwd(*make_qkv(1, 1, 1, 32, 2048, 16, dtype=dtype), device=device)


def test_gradients_have_the_strides_of_their_operands(device):
    qkv = make_qkv(2, 4, 2, head_dim=HOME, dtype=torch.float16)
    qkv = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv]
    arguments = make_gradients(qkv[0], qkv[2], qkv[0].shape[:3])
    _, _, *actual, _ = backward(*qkv, *arguments, device, {})
    assert [x.stride() for x in actual] == [x.stride() for x in qkv]


@pytest.mark.parametrize(
    "feature, more", [("MQA", {}), ("causal", SCORES), ("causal", rotated(16)), ("slices", {})]
)
def test_the_same_bits_in_any_order(feature, more):
    check_the_same_bits(*problem(feature, **more))


@pytest.mark.parametrize(
    "dtype, features",
    [
        ("float32", ("window, causal", "mask", "softcap, all, rotary, odd")),
        (
            "bfloat16",
            [
                *("both lengths", "sink, no key, bias, half", "rotary", "mask, transposed"),
                *("alibi", "softcap", "chunk, causal, padded"),
            ],
        ),
    ],
)
def test_features_together_where_simd_groups_share_keys(dtype, features, device):
    qkv, options = problem(*features, dtype=dtype)
    with exchanging():
        check_flash_bwd(*qkv, **options, device=device)


@pytest.mark.parametrize("softcap", [0.0, 0.3, 20.0])
def test_large_scores(softcap, device):
    """Each row has all its weight on one key. Scores overflow float16, and caps are saturated."""
    capped = SCORES | {"softcap": softcap} if softcap else {}
    (q, k, v), options = problem("causal", **capped)
    arguments = (100 * q, 100 * k, v)
    dq, dk, _, _ = check_flash_bwd(*arguments, **options, run_forward=True, device=device)
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
def test_a_dout_that_is_not_finite_reaches_its_gradients(value, device):
    (q, k, v), _ = problem("plain")
    dout, _ = make_gradients(q, v, q.shape[:3], dlse=False)
    dout[1, 3, 76] = value
    _, _, dq, dk, dv, _ = backward(q, k, v, dout, None, device, {})
    assert not dq[1, 3, 76].isfinite().any()
    assert not dv[1, 1].isfinite().any()
    assert not dk[1, 1].isfinite().any()
    assert dq[0].isfinite().all()
    assert dk[1, 0].isfinite().all()
