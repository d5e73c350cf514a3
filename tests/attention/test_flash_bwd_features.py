"""dq, dk and dv of flash_bwd for every feature, against float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.attention.flash_bwd_check import backward, check_flash_bwd, make_gradients
from tests.attention.flash_bwd_features import FEATURES, SHAPE, check, exchanging, problem
from tests.attention.flash_fwd_check import DTYPES, make_qkv
from tests.attention.flash_fwd_options import (
    DRAWN_HEAD_DIMS,
    any_options,
    few_examples,
    ints,
    random_mask,
)
from tests.attention.head_dims import HOME


@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature, device):
    check(feature, device)


# Several at once, in the other dtypes: which keys are seen, what changes scores, and rotation.
TOGETHER = {
    "window, causal": (torch.float32, "softcap, all, rotary, odd", "mask"),
    "chunk, causal, padded": (torch.bfloat16, "alibi", "bias", "rotary", "sink"),
    "both lengths": (
        torch.bfloat16,
        "softcap",
        "mask, transposed",
        "sink, no key, bias, half",
        "rotary",
    ),
}


@pytest.mark.parametrize("first", TOGETHER)
def test_features_together(first, device):
    dtype, *others = TOGETHER[first]
    qkv, options = problem(first, dtype)
    for feature in others:
        options = FEATURES[feature] | options
    with exchanging():
        check_flash_bwd(*qkv, **options, device=device)


FURTHEST = 2**31 - 1024
BANDED = {"heads": 2, "kv_heads": 1, "q_length": 65, "kv_length": 97, "head_dim": HOME}


@pytest.mark.parametrize(
    "q_offset", [None, 0, -1, -64, -40, 1, 31, 32, 40, 96, 97, 140, FURTHEST, -FURTHEST]
)
@pytest.mark.parametrize("left, right", [(-1, 0), (0, 0), (32, -1), (7, 9), (40, 33), (64, 64)])
def test_windows_and_offsets(left, right, q_offset, device):
    qkv = make_qkv(**BANDED, dtype=torch.float16)
    window = {"window_size_left": left, "window_size_right": right}
    check_flash_bwd(*qkv, **window, q_offset=q_offset, device=device)


@pytest.mark.parametrize("chunk", [1, 5, 32, 33, 1000])
@pytest.mark.parametrize("q_offset", [None, 0, -40, 90])
@pytest.mark.parametrize("padded", [False, True])
def test_chunks(chunk, q_offset, padded, device):
    qkv = make_qkv(**BANDED, batch=2, dtype=torch.float16)
    padding = {"leftpad_k": ints(3, 41)} if padded else {}
    options = {"attention_chunk": chunk, "q_offset": q_offset, **padding}
    check_flash_bwd(*qkv, **options, causal=True, device=device)
    if not padded:  # which changes where chunks begin, whatever else hides a key
        check_flash_bwd(*qkv, **options, device=device)


@pytest.mark.parametrize("reach", [2**31, 2**63 - 1])
@pytest.mark.parametrize("q_offset", [0, FURTHEST, -FURTHEST])
def test_sizes_beyond_32_bits(reach, q_offset, device):
    qkv = make_qkv(**BANDED)
    window = {"window_size_left": reach, "window_size_right": reach}
    check_flash_bwd(*qkv, **window, q_offset=q_offset, device=device)


# First keys and ends of three sequences of 97 keys.
LENGTHS = {
    "ends": ((0, 0, 0), (97, 40, 0)),
    "paddings": ((33, 97, 96), (97, 97, 97)),
    "both": ((33, 5, 64), (65, 6, 97)),
    "padding behind the end": ((50, 97, 1), (40, 0, 0)),
    "blocks": ((32, 64, 31), (64, 96, 65)),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", LENGTHS)
def test_what_lies_outside_the_keys_never_shows(case, causal, device):
    """NaN there changes no bit, and has gradients of 0."""
    first, end = LENGTHS[case]
    q, k, v = make_qkv(**BANDED, batch=3, dtype=torch.float16)
    options = {"causal": causal, "leftpad_k": ints(*first), "seqused_k": ints(*end)}
    *expected, _ = check_flash_bwd(q, k, v, **options, device=device)
    for b in range(3):
        for tensor in (k, v):
            tensor[b, :, : first[b]] = math.nan
            tensor[b, :, end[b] :] = math.nan
    dout, dlse = make_gradients(q, v, q.shape[:3])
    _, *found, _ = backward(q, k, v, dout, dlse, device, options)
    for poisoned, clean in zip(found, expected, strict=True):
        assert torch.equal(poisoned, clean)
    for gradient in found[1:]:
        for b in range(3):
            assert (gradient[b, :, : first[b]] == 0).all()
            assert (gradient[b, :, end[b] :] == 0).all()


@pytest.mark.parametrize(
    "shape", [(1,), (101,), (77, 1), (4, 1, 1), (2, 1, 77, 101), (1, 4, 1, 101)]
)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_of_every_shape(shape, dtype, device):
    qkv, _ = problem("plain", torch.float16)
    check_flash_bwd(*qkv, attn_mask=random_mask(*shape, dtype=dtype), device=device)


# Of the inputs and of a floating mask.
MASKED = [
    (torch.float16, torch.float32),
    (torch.float16, torch.bfloat16),
    (torch.float32, torch.float16),
]


@pytest.mark.parametrize("dtype, mask_dtype", MASKED)
def test_the_lowest_number_hides(dtype, mask_dtype, device):
    """Hugging Face masks are made of it."""
    qkv, _ = problem("plain", dtype)
    mask = torch.zeros(2, 1, 77, 101, dtype=mask_dtype)
    mask.masked_fill_(~random_mask(2, 1, 77, 101), torch.finfo(mask_dtype).min)
    check_flash_bwd(*qkv, attn_mask=mask, device=device)


@pytest.mark.parametrize("softcap", [1e-3, 0.3, 1.0, 50.0, 1e6])
@pytest.mark.parametrize("dtype, dlse", [(torch.float32, False), (torch.float16, True)])
def test_caps(softcap, dtype, dlse, device):
    qkv, _ = problem("plain", dtype)
    check_flash_bwd(*qkv, softcap=softcap, dlse=dlse, device=device)


@pytest.mark.parametrize("softcap", [0.3, 20.0])
def test_saturated_caps_have_no_slope(softcap, device):
    """tanh is +-1 for nearly every score."""
    (q, k, v), _ = problem("plain", torch.float32)
    options = {"softcap": softcap, "dlse": False, "own_forward": True}
    dq, dk, _, _ = check_flash_bwd(100 * q, 100 * k, v, **options, device=device)
    assert dq.isfinite().all()
    assert dk.isfinite().all()


@pytest.mark.parametrize("softmax_scale", [-0.7, 0.01, 3.0, 0.0])
def test_scales(softmax_scale, device):
    qkv, _ = problem("plain", torch.float32)
    options = {"softmax_scale": softmax_scale, "dlse": False, "own_forward": True}
    check_flash_bwd(*qkv, **options, device=device)
    check_flash_bwd(*qkv, **options, softcap=2.0, device=device)


class TestRowsWithoutKeys:
    """Their gradients are 0, and they give nothing to keys: no NaN of inf - inf."""

    @pytest.mark.parametrize("dtype, mask_dtype", [(torch.float16, torch.bool), *MASKED])
    def test_masked(self, dtype, mask_dtype, device):
        (q, k, v), _ = problem("plain", dtype)
        mask = random_mask(2, 4, 77, 101, dtype=mask_dtype)
        hides = False if mask_dtype == torch.bool else -math.inf
        mask[:, :, 5:40] = hides
        mask[0, 2] = hides
        dq, dk, dv, _ = check_flash_bwd(q, k, v, attn_mask=mask, device=device)
        assert (dq[:, :, 5:40] == 0).all()
        assert (dq[0, 2] == 0).all()
        mask[1] = hides
        dq, dk, dv, _ = check_flash_bwd(q, k, v, attn_mask=mask, device=device)
        assert (dq[1] == 0).all()
        assert (dk[1] == 0).all()
        assert (dv[1] == 0).all()

    def test_beside_a_sink(self, device):
        qkv, options = problem("sink, no key, bias, half")
        options["q_offset"] = -100
        dq, dk, dv, _ = check_flash_bwd(*qkv, **options, device=device)
        assert all((gradient == 0).all() for gradient in (dq, dk, dv))

    def test_one_key(self, device):
        """A softmax of one key is constant: dq and dk are rounding."""
        q, k, v = make_qkv(q_length=5, kv_length=1, head_dim=HOME)
        dq, dk, _, _ = check_flash_bwd(q, k, v, dlse=False, device=device)
        assert dq.abs().max() < 1e-5
        assert dk.abs().max() < 1e-5


class TestWhatIsNotFinite:
    def test_nan_stays_in_its_row_of_dq(self, device):
        for name in ("q", "dout"):
            (q, k, v), _ = problem("plain", torch.float32)
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
    def test_gradients_that_are_not_finite_come_out_so(self, value, device):
        (q, k, v), _ = problem("plain", torch.float16)
        dout, _ = make_gradients(q, v, q.shape[:3], dlse=False)
        dout[1, 3, 76] = value
        _, dq, dk, dv, _ = backward(q, k, v, dout, None, device, {})
        assert not dq[1, 3, 76].isfinite().any()
        assert not dv[1, 1].isfinite().any()
        assert not dk[1, 1].isfinite().any()
        assert dq[0].isfinite().all()
        assert dk[1, 0].isfinite().all()

    def test_large_scores(self, device):
        """Weights of one key each, far beyond float16's range before the softmax."""
        (q, k, v), _ = problem("plain", torch.float16)
        check_flash_bwd(q * 100, k * 100, v, dlse=False, own_forward=True, device=device)


@few_examples
@given(data=st.data())
def test_every_feature_at_once(device, data):
    batch, kv_heads, group = (data.draw(st.integers(1, 2)) for _ in range(3))
    q_length, kv_length = data.draw(st.integers(0, 70)), data.draw(st.integers(0, 100))
    head_dim, v_head_dim = data.draw(st.sampled_from(DRAWN_HEAD_DIMS))
    dtype = data.draw(st.sampled_from(DTYPES))
    heads = kv_heads * group
    qkv = make_qkv(batch, heads, kv_heads, q_length, kv_length, head_dim, v_head_dim, dtype)
    options = any_options(data.draw, batch, heads, q_length, kv_length, head_dim)
    check_flash_bwd(*qkv, **options, dlse=data.draw(st.booleans()), device=device)


def test_the_shape_has_more_than_one_tile_of_each_side():
    assert SHAPE["q_length"] > 64
    assert SHAPE["kv_length"] > 64
