"""Each kernel of the source documents, by its name, through our ops.

Where one of them departs from its paper, ours follows the paper, and the test says so. `softmax`
and `apply_causal_mask` are in test_softmax.py, `apply_rope_qk_inplace` and `precompute_rope_tables`
in test_rope_op.py, `flash_attn_vec_reduce` in test_merge.py.
"""

import math

import pytest
import torch

from tests.attention.flash_fwd_check import DTYPES, check_flash_decode, check_flash_fwd, make_qkv
from tests.attention.flash_fwd_options import ints
from tests.cache.kv_caches import paged
from torch_metal_attn import explain, rope, simulate


def paper_slopes(heads):
    """The slopes of ALiBi's paper for a power of two of heads: 2^(-8/n), 2^(-16/n), ..."""
    return torch.tensor([2.0 ** (-8.0 * (head + 1) / heads) for head in range(heads)])


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_v2(causal, device):
    q, k, v = make_qkv(heads=4, q_length=128, kv_length=128, head_dim=64)
    check_flash_fwd(q, k, v, causal=causal, device=device)


@pytest.mark.parametrize("causal", [False, True])
def test_flash_attention_f16(causal, device):
    q, k, v = make_qkv(heads=4, q_length=128, kv_length=128, head_dim=64, dtype=torch.float16)
    check_flash_fwd(q, k, v, causal=causal, device=device)


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_flash_attention(head_dim, device):
    """Any length: a source kernel leaves query registers uninitialised behind its bounds test."""
    q, k, v = make_qkv(q_length=70, kv_length=70, head_dim=head_dim)
    check_flash_fwd(q, k, v, device=device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_flash_attention_simd(dtype, device):
    """A source kernel takes 33,792 bytes of threadgroup memory and relies on lanes in lockstep.

    Ours stays within 32 KiB, and runs right with the lanes in any order.
    """
    q, k, v = make_qkv(q_length=64, kv_length=96, head_dim=128, dtype=dtype)
    check_flash_fwd(q, k, v, causal=True, device=device)
    with simulate(check=True, seed=7):
        check_flash_fwd(q, k, v, causal=True, device="cpu")
    assert explain(q, k, v, causal=True).threadgroup_bytes <= 32768


class TestFlashAttnTrainFwd:
    """flash_attn_train_fwd: bfloat16, head dims 64 and 256, with the log-sum-exp for training."""

    @pytest.mark.parametrize("head_dim", [64, 256])
    def test_flash_attn_train_fwd(self, head_dim, device):
        q, k, v = self.problem(head_dim)
        check_flash_fwd(q, k, v, device=device)

    @pytest.mark.parametrize("head_dim", [64, 256])
    @pytest.mark.parametrize("q_offset", [0, 32, 40])
    def test_causal_with_query_offset(self, head_dim, q_offset, device):
        q, k, v = self.problem(head_dim)
        check_flash_fwd(q, k, v, causal=True, q_offset=q_offset, device=device)

    def test_bool_mask(self, device):
        q, k, v = self.problem(256)
        mask = torch.rand(2, 1, 64, 96, generator=torch.Generator().manual_seed(1)) > 0.4
        check_flash_fwd(q, k, v, attn_mask=mask, device=device)

    def test_additive_mask(self, device):
        """A source kernel turns the mask's values into booleans; here they are added."""
        q, k, v = self.problem(256)
        mask = torch.randn(2, 1, 64, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
        mask[..., 70:] = -torch.inf
        out, lse = check_flash_fwd(q, k, v, attn_mask=mask, device=device)
        as_bool, _ = check_flash_fwd(q, k, v, attn_mask=mask != 0, device=device)
        assert (out.float() - as_bool.float()).abs().max() > 0.1
        assert lse.isfinite().all()

    def problem(self, head_dim):
        return make_qkv(2, 4, 2, 64, 96, head_dim, dtype=torch.bfloat16)


@pytest.mark.parametrize("interleaved, dtype", [(False, torch.float32), (True, torch.float16)])
def test_rope_then_attention(interleaved, dtype, device):
    q, k, v = make_qkv(heads=4, kv_heads=2, q_length=64, kv_length=64, head_dim=64, dtype=dtype)
    inv_freq = 10000.0 ** -(torch.arange(0, 64, 2) / 64)
    angles = torch.arange(64)[:, None] * inv_freq
    check_flash_fwd(
        *(q, k, v),
        causal=True,
        **{f"{side}_rotary_cos": angles.cos() for side in "qk"},
        **{f"{side}_rotary_sin": angles.sin() for side in "qk"},
        rotary_interleaved=interleaved,
        device=device,
    )


def test_yarn_attention(device):
    """A source kernel takes YaRN's ramp over wavelengths; here it runs over dimension indices.

    Peng et al., "YaRN" (2023), as its authors compute it: pair i has the base frequency below index
    `low`, that divided by the factor above index `high`, and in between a linear blend of both.
    """
    head_dim, base, factor, context = 64, 10000.0, 4.0, 2048
    inv_freq, attention_factor = rope.yarn(
        head_dim, base, factor=factor, original_max_position_embeddings=context
    )
    pair = torch.arange(head_dim // 2)

    def index_of(rotations):
        return head_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = math.floor(index_of(32)), math.ceil(index_of(1))
    ramp = ((pair - low) / (high - low)).clamp(0, 1)
    plain = base ** (-2 * pair / head_dim)
    torch.testing.assert_close(inv_freq, plain / factor * ramp + plain * (1 - ramp))
    assert attention_factor == pytest.approx(0.1 * math.log(factor) + 1)

    q, k, v = make_qkv(heads=4, kv_heads=2, q_length=64, kv_length=64, head_dim=head_dim)
    cos, sin = rope.tables(inv_freq, 64, attention_factor=attention_factor)
    tables = {
        f"{side}_rotary_{name}": t for side in "qk" for name, t in (("cos", cos), ("sin", sin))
    }
    check_flash_fwd(q, k, v, causal=True, **tables, device=device)


class TestFusedAttention:
    """fused_attention: ALiBi, float16, and batches."""

    def test_fused_attention(self, device):
        """A source kernel adds the slope with the wrong sign; the paper penalises distance."""
        q, k, v = make_qkv(heads=8, q_length=64, kv_length=64, head_dim=64)
        check_flash_fwd(q, k, v, causal=True, alibi_slopes=paper_slopes(8), device=device)

        # With equal scores and v the key's index, the mean index says where the weight lies.
        v = torch.arange(64.0)[:, None].expand(1, 8, 64, 8).contiguous()
        out, _ = torch.ops.metal_attn.flash_fwd(
            torch.zeros_like(q).to(device),
            k.to(device),
            v.to(device),
            causal=True,
            alibi_slopes=paper_slopes(8).to(device),
        )
        last_query = out[0, :, -1, 0].cpu()
        assert (last_query > 31.5).all()  # nearer keys weigh more than they would alike
        assert (last_query.diff() < 0).all()  # and the steeper the slope, the more

    def test_fused_attention_f16(self, device):
        q, k, v = make_qkv(heads=8, q_length=64, kv_length=64, head_dim=64, dtype=torch.float16)
        check_flash_fwd(q, k, v, causal=True, alibi_slopes=paper_slopes(8), device=device)

    def test_fused_attention_batched(self, device):
        q, k, v = make_qkv(batch=4, heads=2, q_length=64, kv_length=64, head_dim=64)
        slopes = paper_slopes(2).expand(4, 2) * torch.arange(1, 5)[:, None]
        check_flash_fwd(q, k, v, causal=True, alibi_slopes=slopes, device=device)


@pytest.mark.parametrize("page, dtype", [(16, torch.float16), (32, torch.float32)])
def test_paged_attention(page, dtype, device):
    """One query a sequence over pages in any order, of lengths that end inside a page."""
    lengths = [100, 1, 33, 64]
    q, k, v = make_qkv(4, 8, 2, 1, 100, 64, dtype=dtype)
    cache = paged(k, v, lengths, page)
    check_flash_decode(q, k, v, cache=cache, seqused_k=ints(*lengths), device=device)


class TestFlashAttnVec:
    """flash_attn_vec: few queries at head dims 256 and 512, its nwg being our num_splits.

    Its two-pass form reads past the last block and keeps partials in half elsewhere; here every
    read is checked, and partials are float32.
    """

    @pytest.mark.parametrize(
        "head_dim, dtype, num_splits",
        zip(
            [256, 256, 512, 512],
            [torch.float32, torch.float16] * 2,
            [4, 1, 1, 4],
            strict=True,
        ),
    )
    def test_flash_attn_vec(self, head_dim, dtype, num_splits, device):
        q, k, v = make_qkv(1, 4, 2, 2, 77, head_dim, dtype=dtype)
        check_flash_decode(q, k, v, causal=True, num_splits=num_splits, device=device)

    @pytest.mark.parametrize("head_dim, dtype", [(256, torch.float16), (512, torch.float32)])
    def test_sliding_window_and_softcap(self, head_dim, dtype, device):
        """Gemma 2's and 3's: a cap of 50 acts as 50, in natural units."""
        q, k, v = make_qkv(1, 4, 2, 2, 77, head_dim, dtype=dtype)
        options = {"causal": True, "window_size_left": 20, "softcap": 50.0, "softmax_scale": 1.0}
        check_flash_decode(q, k, v, **options, num_splits=2, device=device)


def check_f16kv(head_dim, device):
    """Float32 queries on a float16 cache, as llama.cpp has them, in one part and in four.

    No query is rounded: the bound is twice torch's error in float32 on keys and values that are
    float16 numbers.
    """
    q, k, v = make_qkv(1, 4, 2, 2, 77, head_dim)
    for num_splits in (1, 4):
        check_flash_decode(q, k.half(), v.half(), causal=True, num_splits=num_splits, device=device)


def test_flash_attn_vec_f16kv_dk256(device):
    check_f16kv(256, device)


def test_flash_attn_vec_f16kv_dk512(device):
    check_f16kv(512, device)
