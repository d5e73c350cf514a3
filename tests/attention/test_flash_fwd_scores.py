"""What changes flash_fwd's scores: softcap, ALiBi, biases and sinks, against the oracle."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.attention.flash_fwd_check import DTYPES, PAIRS_OF_DTYPES, check_flash_fwd, make_qkv
from tests.attention.flash_fwd_options import DRAWN_HEAD_DIMS, any_options, few_examples
from tests.attention.head_dims import HOME
from torch_metal_attn.reference import attention

SHAPE = {"batch": 2, "heads": 4, "kv_heads": 2, "q_length": 35, "kv_length": 70, "head_dim": HOME}


def random(*shape, seed=3, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class TestSoftcap:
    @pytest.mark.parametrize("softcap", [1e-3, 0.3, 1.0, 5.0, 50.0, 1e6])
    @pytest.mark.parametrize("dtype", DTYPES[:2])
    def test_caps(self, softcap, dtype, device):
        q, k, v = make_qkv(**SHAPE, dtype=dtype)
        check_flash_fwd(q, k, v, softcap=softcap, device=device)

    @pytest.mark.parametrize("softcap", [0.3, 5.0, 30.0])
    def test_large_scores(self, softcap, device):
        """tanh saturates: every score is the cap or its negative."""
        q, k, v = make_qkv(**SHAPE)
        _, lse = check_flash_fwd(q * 100, k * 100, v, softcap=softcap, device=device)
        assert (lse <= softcap + math.log(70)).all()

    def test_scores_beyond_float16(self, device):
        q, k, v = make_qkv(**SHAPE, dtype=torch.float16)
        check_flash_fwd(q * 300, k * 300, v, softcap=20.0, device=device)

    @pytest.mark.parametrize("softmax_scale", [-0.7, 0.01, 3.0, 0.0])
    def test_scale_comes_first(self, softmax_scale, device):
        q, k, v = make_qkv(**SHAPE)
        options = {"softmax_scale": softmax_scale, "softcap": 2.0}
        check_flash_fwd(q, k, v, causal=True, **options, device=device)

    def test_natural_units(self, device):
        """One key of score 50 ln 2, cap 50: tanh sees ln 2, not log2(e) ln 2."""
        q, k = torch.ones(1, 1, 1, 16), torch.full((1, 1, 1, 16), 50 * math.log(2) / 16)
        v = torch.ones(1, 1, 1, 16)
        _, lse = torch.ops.metal_attn.flash_fwd(
            *(tensor.to(device) for tensor in (q, k, v)), softmax_scale=1.0, softcap=50.0
        )
        assert lse.item() == pytest.approx(50 * math.tanh(math.log(2)), rel=1e-6)

    def test_hidden_keys_stay_hidden(self, device):
        """A cap applied after the mask would bring them back."""
        q, k, v = make_qkv(**SHAPE)
        check_flash_fwd(q, k, v, softcap=0.5, causal=True, q_offset=-10, device=device)
        added = {"attn_mask": random(35, 70) > 0, "learnable_sink": random(4)}
        check_flash_fwd(q, k, v, softcap=0.5, **added, device=device)

    def test_bias_is_not_capped(self, device):
        q, k, v = make_qkv(**SHAPE)
        check_flash_fwd(q, k, v, softcap=0.5, attn_bias=8 * random(35, 70), device=device)


class TestAlibi:
    @pytest.mark.parametrize("shape", [(4,), (2, 4)], ids=str)
    @pytest.mark.parametrize("q_offset", [None, 0, -20, 50, 10_000])
    @pytest.mark.parametrize("causal", [False, True])
    def test_slopes(self, shape, q_offset, causal, device):
        q, k, v = make_qkv(**SHAPE)
        check_flash_fwd(
            q,
            k,
            v,
            alibi_slopes=random(*shape).abs() / 4,
            q_offset=q_offset,
            causal=causal,
            device=device,
        )

    @pytest.mark.parametrize("dtype", DTYPES[::2])
    def test_slopes_of_the_paper(self, dtype, device):
        """2 ** -8h/n, and none."""
        q, k, v = make_qkv(**SHAPE, dtype=dtype)
        for slopes in (torch.tensor([0.25, 0.0625, 2**-6, 2**-8]), torch.zeros(4)):
            check_flash_fwd(q, k, v, alibi_slopes=slopes, causal=True, device=device)

    def test_negative_slopes(self, device):
        q, k, v = make_qkv(**SHAPE)
        check_flash_fwd(q, k, v, alibi_slopes=-random(4).abs() / 20, device=device)

    def test_near_keys_are_preferred(self, device):
        """On both sides of the query: the penalty grows with the distance, Press et al. 2021."""
        q, k = torch.zeros(1, 1, 9, 16), torch.zeros(1, 1, 9, 16)
        v = torch.eye(9, 16)[None, None]
        slopes = torch.tensor([0.5])
        out, _ = torch.ops.metal_attn.flash_fwd(
            *(tensor.to(device) for tensor in (q, k, v)), alibi_slopes=slopes.to(device)
        )
        expected = torch.softmax(-0.5 * (torch.arange(9) - 4.0).abs(), 0)
        torch.testing.assert_close(out.cpu()[0, 0, 4, :9], expected)

    def test_distances_from_the_end_of_each_sequence(self, device):
        q, k, v = make_qkv(**SHAPE)
        lengths = {
            "seqused_k": torch.tensor([70, 41], dtype=torch.int32),
            "leftpad_k": torch.tensor([0, 7], dtype=torch.int32),
        }
        check_flash_fwd(q, k, v, alibi_slopes=random(2, 4).abs(), **lengths, device=device)

    def test_strided_slopes(self, device):
        q, k, v = make_qkv(**SHAPE)
        slopes = random(2, 9).abs()[:, 3:7]
        check_flash_fwd(q, k, v, alibi_slopes=slopes, device=device)
        check_flash_fwd(q, k, v, alibi_slopes=slopes[:1].expand(2, 4), device=device)
        check_flash_fwd(q, k, v, alibi_slopes=random(9).abs()[5:], device=device)


class TestBias:
    """Shapes and strides are test_flash_fwd_masks.py's."""

    @pytest.mark.parametrize(
        "dtype, bias_dtype, kv_length",
        [*((*pair, 70) for pair in PAIRS_OF_DTYPES), (torch.float32, torch.float32, 69)],
    )
    def test_dtypes(self, dtype, bias_dtype, kv_length, device):
        q, k, v = make_qkv(**SHAPE | {"kv_length": kv_length}, dtype=dtype)
        bias = random(2, 4, 35, kv_length, dtype=bias_dtype)
        check_flash_fwd(q, k, v, attn_bias=bias, device=device)

    def test_numbers_are_added_and_not_taken_for_truth(self, device):
        """mps-flash-attn turned 0 and 1 into False and True."""
        q, k, v = make_qkv(**SHAPE)
        for bias in (torch.zeros(35, 70), torch.ones(35, 70), (random(35, 70) > 0).float()):
            check_flash_fwd(q, k, v, attn_mask=bias, device=device)

    def test_large_biases(self, device):
        q, k, v = make_qkv(**SHAPE)
        bias = torch.full((35, 70), -3000.0)
        bias[:, 33] = 3000.0
        check_flash_fwd(q, k, v, attn_bias=bias, device=device)


class TestSinks:
    SINKS = (
        (0.0, 1.0, -2.0, 3.0),
        (-math.inf, 0.5, -math.inf, 9.0),
        (60.0, -60.0, 1e4, -1e4),
        (-1e30, 1e30, 80.0, -80.0),
        (3e5, 1e7, -1e12, 2e38),
    )

    @pytest.mark.parametrize("sink", SINKS, ids=str)
    @pytest.mark.parametrize("causal", [False, True])
    def test_sinks(self, sink, causal, device):
        q, k, v = make_qkv(**SHAPE)
        # The first five queries see no key.
        options = {"causal": causal, "q_offset": -5 if causal else None}
        _, lse = check_flash_fwd(
            q, k, v, learnable_sink=torch.tensor(sink), **options, device=device
        )
        if causal:
            expected = torch.tensor(sink)[:, None].expand(2, 4, 5)
            torch.testing.assert_close(lse[:, :, :5], expected)

    def test_sinks_that_overflow_in_base_2(self, device):
        q, k, v = (t.to(device) for t in make_qkv(**SHAPE))
        sink = torch.tensor([3e38, -3e38, 3e38, -3e38], device=device)
        out, _ = torch.ops.metal_attn.flash_fwd(q, k, v, learnable_sink=sink)
        without, _ = torch.ops.metal_attn.flash_fwd(q, k, v)
        assert (out[:, 0::2] == 0).all()
        assert torch.equal(out[:, 1::2], without[:, 1::2])

    @pytest.mark.parametrize("dtype, sink_dtype", PAIRS_OF_DTYPES)
    def test_dtypes(self, dtype, sink_dtype, device):
        q, k, v = make_qkv(**SHAPE, dtype=dtype)
        check_flash_fwd(q, k, v, learnable_sink=random(4, dtype=sink_dtype), device=device)

    def test_no_sink_is_minus_infinity(self, device):
        q, k, v = make_qkv(**SHAPE)
        sink = torch.full((4,), -math.inf)
        out, lse = check_flash_fwd(q, k, v, learnable_sink=sink, causal=True, device=device)
        plain = check_flash_fwd(q, k, v, causal=True, device=device)
        assert torch.equal(out, plain[0])
        assert torch.equal(lse, plain[1])

    @pytest.mark.parametrize("kv_length", [0, 1, 33])
    def test_no_visible_key(self, kv_length, device):
        q, k, v = make_qkv(**SHAPE | {"kv_length": kv_length})
        sink = torch.tensor([0.0, -3.0, -math.inf, 1e3])
        hidden = {"seqused_k": torch.zeros(2, dtype=torch.int32)} if kv_length else {}
        out, lse = check_flash_fwd(q, k, v, learnable_sink=sink, **hidden, device=device)
        assert (out == 0).all()
        torch.testing.assert_close(lse, sink[:, None].expand(2, 4, 35))

    def test_hidden_values_do_not_show_where_there_is_only_the_sink(self, device):
        q, k, v = make_qkv(**SHAPE)
        v[:, :, :20] = math.inf
        mask = torch.ones(35, 70, dtype=torch.bool)
        mask[:, :20] = False
        mask[3:9] = False
        out, _ = torch.ops.metal_attn.flash_fwd(
            *(tensor.to(device) for tensor in (q, k, v)),
            attn_mask=mask.to(device),
            learnable_sink=torch.zeros(4).to(device),
            softcap=20.0,
        )
        assert (out[:, :, 3:9] == 0).all()

    def test_is_one_more_column_of_the_softmax(self, device):
        """gpt-oss: an extra logit that is dropped after the softmax."""
        q, k, v = make_qkv(**SHAPE | {"kv_heads": 4})
        sink = random(4)
        out, _ = check_flash_fwd(q, k, v, learnable_sink=sink, device=device)
        scores = (q @ k.transpose(2, 3)) / 4
        logits = torch.cat([scores, sink[None, :, None, None].expand(2, 4, 35, 1)], -1)
        expected = logits.softmax(-1)[..., :-1] @ v
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)

    def test_small_weights_beside_a_large_sink(self, device):
        """A weight that the sum of weights does not notice is small, and not zero."""
        q, k, v = make_qkv(batch=1, heads=1, q_length=3, kv_length=40, head_dim=HOME)
        out, _ = torch.ops.metal_attn.flash_fwd(
            *(tensor.to(device) for tensor in (q, k, v)),
            learnable_sink=torch.tensor([30.0]).to(device),
        )
        expected, _ = attention(
            q, k, v, learnable_sink=torch.tensor([30.0]), compute_dtype=torch.float64
        )
        torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-4, atol=1e-18)


@few_examples
@given(data=st.data())
def test_every_feature_at_once(device, data):
    batch, kv_heads, group = (data.draw(st.integers(1, 2)) for _ in range(3))
    q_length, kv_length = data.draw(st.integers(0, 70)), data.draw(st.integers(0, 100))
    head_dim, v_head_dim = data.draw(st.sampled_from(DRAWN_HEAD_DIMS))
    dtype = data.draw(st.sampled_from(DTYPES))
    heads = kv_heads * group
    q, k, v = make_qkv(batch, heads, kv_heads, q_length, kv_length, head_dim, v_head_dim, dtype)
    options = any_options(data.draw, batch, heads, q_length, kv_length, head_dim)
    check_flash_fwd(q, k, v, **options, device=device)
