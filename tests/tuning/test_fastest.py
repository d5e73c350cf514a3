"""sdpa_replaced(prefer="fastest") leaves calls to torch that it runs faster, by a table."""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.sdpa.sdpa_check import close, normal, nothing_said  # noqa: F401
from tests.tuning.explained import Q_HELD
from torch_metal_attn import allow_tf32, sdpa_replaced, simulate
from torch_metal_attn.tuned import advice, loading

PLAIN, BAND = (f"flash_fwd float 8 8 {feature} q<=512 k<=512" for feature in ("plain", "band"))


def qkv(queries=40):
    return normal(2, 4, queries, 8), normal(2, 4, 50, 8, seed=1), normal(2, 4, 50, 8, seed=2)


@pytest.fixture(autouse=True)
def no_keys():
    advice._keys.clear()


def timed(key=PLAIN, **ratios):
    """Use a table with a row for `key`. ratios: torch's time divided by ours, by kind."""
    row = loading.Row(f"V_SLICE=8 BLOCK_K=32 SIMDGROUPS=4 {Q_HELD}", ratios)
    loading._loaded = loading.Loaded({key: row}, loading.MEASURED)


def attend(**options):
    with simulate(record=True), warnings.catch_warnings():
        warnings.simplefilter("error")
        with sdpa_replaced(prefer="fastest") as calls:
            F.scaled_dot_product_attention(*qkv(), **options)
    return calls.replaced


def test_calls_that_torch_runs_faster_are_left_to_torch():
    timed(forward=0.5)
    expected = F.scaled_dot_product_attention(*qkv())
    with simulate(), warnings.catch_warnings():
        warnings.simplefilter("error")
        with sdpa_replaced(prefer="fastest") as calls:
            out = F.scaled_dot_product_attention(*qkv())
            F.scaled_dot_product_attention(*qkv(), is_causal=True)
    assert torch.equal(out, expected)
    reason = "torch takes 0.50 of our time for such calls (tuned on this machine)"
    assert (calls.replaced, calls.left_alone) == (1, {reason: 1})


@pytest.mark.parametrize("ratio, replaced", [(0.98, 0), (0.99, 1)])
def test_a_gain_of_two_percent_leaves_calls_to_torch(ratio, replaced):
    timed(forward=ratio)
    assert attend() == replaced


def test_a_row_applies_only_to_calls_with_its_features():
    timed(BAND, forward=0.5)
    assert attend() == 1
    assert attend(is_causal=True) == 0
    # A mask that hides the same keys runs another kernel.
    mask = torch.ones(40, 50, dtype=torch.bool).tril()
    assert attend(attn_mask=mask) == 1


@pytest.mark.parametrize("kind", ["forward", "decode"])
def test_few_queries_use_the_row_of_flash_decode(kind):
    timed("flash_decode float 8 8 plain q<=8 k<=512", **{kind: 0.5})
    with simulate(record=True), sdpa_replaced(prefer="fastest") as calls:
        F.scaled_dot_product_attention(*qkv(5))
    assert calls.replaced == 0


def test_tf32_uses_the_rows_of_tensor_tiles(gpu):
    gpu("Apple M5")
    timed(forward=0.5)
    assert attend() == 0
    with allow_tf32():
        assert attend() == 1
    timed("flash_fwd_tensor float 8 8 plain q<=512 k<=512", forward=0.5)
    assert attend() == 1
    with allow_tf32():
        assert attend() == 0


@pytest.mark.parametrize(
    "ratios, replaced",
    [
        ({"forward": 0.5, "training": 2.0}, 1),
        ({"forward": 2.0, "training": 0.5}, 0),
        ({"forward": 0.5}, 1),  # training was not measured
    ],
)
def test_training_is_compared_by_whole_steps(ratios, replaced):
    timed(**ratios)
    q, k, v = (x.requires_grad_() for x in qkv())
    with simulate(record=True), sdpa_replaced(prefer="fastest") as calls:
        F.scaled_dot_product_attention(q, k, v)
        assert calls.replaced == replaced
        with torch.no_grad():
            F.scaled_dot_product_attention(q, k, v)
    assert calls.replaced - replaced == (ratios["forward"] > 1)


def test_the_innermost_block_decides():
    timed(forward=0.1)
    with simulate(record=True), sdpa_replaced(prefer="fastest") as outer:
        with sdpa_replaced() as inner:
            F.scaled_dot_product_attention(*qkv())
        assert (outer.replaced, inner.replaced) == (1, 1)
        F.scaled_dot_product_attention(*qkv())
    assert (outer.replaced, sum(outer.left_alone.values())) == (1, 1)


def test_without_a_table_every_call_is_replaced_with_a_warning(nothing_said):  # noqa: F811
    with simulate(), pytest.warns(UserWarning, match="has no times of this machine") as said:
        with sdpa_replaced(prefer="fastest") as calls:
            close(F.scaled_dot_product_attention(*qkv()), F.scaled_dot_product_attention(*qkv()))
    assert (calls.replaced, len(said)) == (2, 1)


def test_unknown_preferences_are_refused():
    with pytest.raises(ValueError, match="prefer is 'speed'; it must be 'metal_attn' or 'fastest'"):
        sdpa_replaced(prefer="speed")
    with pytest.raises(ValueError, match="prefer is a float64 ndarray"):
        sdpa_replaced(prefer=np.ones(2))


def test_keys_are_cached_by_layout(monkeypatch):
    """A key comes from an explanation, which takes as long as a short call."""
    timed(forward=2.0)
    explained = []
    launches = advice.Problem.launches
    monkeypatch.setattr(
        advice.Problem, "launches", lambda self: explained.append(1) or launches(self)
    )
    for _ in range(3):
        attend()
        attend(is_causal=True)
    assert len(explained) == 2
    monkeypatch.setattr(advice, "_MOST_KEYS", 2)
    attend(attn_mask=torch.ones(40, 50, dtype=torch.bool))
    assert len(advice._keys) == 1
