"""The kernel `flash_fwd` against the float64 oracle, through the op, on the best device.

Without an Apple GPU the shader text runs in the simulator, with every check on.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.attention.flash_fwd_check import DTYPES, check_flash_fwd, make_qkv
from tests.attention.head_dims import DIFFERENT, DIFFERENT_FORWARD, HOME
from torch_metal_attn.reference import attention


@pytest.mark.parametrize("q_length", [1, 7, 31, 33, 65])
@pytest.mark.parametrize("kv_length", [1, 7, 31, 33, 65])
def test_odd_lengths(q_length, kv_length, device):
    q, k, v = make_qkv(q_length=q_length, kv_length=kv_length, head_dim=HOME, dtype=torch.float16)
    check_flash_fwd(q, k, v, device=device)
    check_flash_fwd(q, k, v, causal=True, device=device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_error_does_not_grow_with_the_keys(dtype, device):
    q, k, v = make_qkv(heads=1, q_length=64, kv_length=8192, head_dim=HOME, dtype=dtype)
    check_flash_fwd(q, k, v, device=device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_odd_sequence(dtype, device):
    q, k, v = make_qkv(heads=1, q_length=129, kv_length=1023, head_dim=64, dtype=dtype)
    check_flash_fwd(q, k, v, causal=True, q_offset=1023 - 129, device=device)


@pytest.mark.parametrize(
    "q_offset",
    [-(2**31) + 1024, -1000, -65, -64, -32, -1, 0, 1, 31, 32, 63, 64, 1000, 2**31 - 1024],
)
def test_causal_offsets(q_offset, device):
    q, k, v = make_qkv(q_length=65, kv_length=65, head_dim=HOME, dtype=torch.float16)
    check_flash_fwd(q, k, v, causal=True, q_offset=q_offset, device=device)


@pytest.mark.parametrize("heads, kv_heads", [(4, 1), (6, 2), (8, 8), (5, 1)])
def test_grouped_queries(heads, kv_heads, device):
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": HOME}
    q, k, v = make_qkv(batch=2, **shape, dtype=torch.float16)
    check_flash_fwd(q, k, v, causal=True, q_offset=32, device=device)


@pytest.mark.parametrize("softmax_scale", [None, 0.0, 1.0, -0.7, 3.5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scale(softmax_scale, dtype, device):
    q, k, v = make_qkv(head_dim=HOME, dtype=dtype)
    check_flash_fwd(q, k, v, softmax_scale=softmax_scale, causal=True, q_offset=3, device=device)


def test_large_scores_do_not_overflow(device):
    q, k, v = make_qkv(head_dim=HOME)
    check_flash_fwd(q * 100, k * 100, v, causal=True, q_offset=0, device=device)


class TestStrides:
    """Any strides whose last is 1: no copy, the same result."""

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_batch_length_head_order(self, dtype, device):
        tensors = make_qkv(head_dim=HOME, dtype=dtype)
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors)
        out, _ = check_flash_fwd(q, k, v, device=device)
        assert out.transpose(1, 2).is_contiguous()

    def test_packed_projection(self, device):
        packed = torch.randn(2, 33, 3, 4, HOME, generator=torch.Generator().manual_seed(0)).half()
        q, k, v = (t.transpose(1, 2) for t in packed.to(device).unbind(2))
        out, _ = torch.ops.metal_attn.flash_fwd(q, k, v)
        expected, _ = attention(q.cpu(), k.cpu(), v.cpu(), compute_dtype=torch.float64)
        torch.testing.assert_close(out.cpu().double(), expected, rtol=0, atol=2e-3)

    def test_expanded_batch_and_head(self, device):
        q, k, v = make_qkv(batch=1, heads=4, kv_heads=1, head_dim=HOME, dtype=torch.bfloat16)
        k, v = k.to(device).expand(3, 2, -1, -1), v.to(device).expand(3, 2, -1, -1)
        q = q.to(device).expand(3, -1, -1, -1)
        out, _ = torch.ops.metal_attn.flash_fwd(q, k, v)
        single, _ = torch.ops.metal_attn.flash_fwd(q[:1], k[:1, :1], v[:1, :1])
        for batch in range(3):
            assert torch.equal(out[batch], single[0])

    @pytest.mark.parametrize("dtype", DTYPES[:2])
    @pytest.mark.parametrize("offset", [1, 3])
    def test_rows_off_16_bytes(self, offset, dtype, device):
        """Views into rows of odd length: loads fall back from 16 bytes to single elements."""
        wide = [torch.randn(1, 2, 33, HOME + 2 * offset + 1).to(dtype) for _ in range(3)]
        q, k, v = (t.to(device)[..., offset : offset + HOME] for t in wide)
        out, lse = torch.ops.metal_attn.flash_fwd(q, k, v, causal=True, q_offset=0)
        aligned = torch.ops.metal_attn.flash_fwd(
            q.contiguous(), k.contiguous(), v.contiguous(), causal=True, q_offset=0
        )
        assert torch.equal(out, aligned[0])
        assert torch.equal(lse, aligned[1])


def test_surroundings_are_not_read(device):
    """Inputs cut out of memory full of NaN: none of it reaches the result."""
    shape = (2, 3, 37, HOME)
    views = []
    for seed in range(3):
        poisoned = torch.full((4, 5, 80, 48), math.nan)
        view = poisoned[1:3, 1:4, 20:57, 8 : 8 + HOME]
        view.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
        views.append(poisoned.to(device)[1:3, 1:4, 20:57, 8 : 8 + HOME])
    out, lse = torch.ops.metal_attn.flash_fwd(*views, causal=True, q_offset=5)
    assert out.isfinite().all()
    assert lse.isfinite().all()


class TestEmpty:
    @pytest.mark.parametrize("shape", [{"batch": 0}, {"q_length": 0}, {"heads": 0, "kv_heads": 0}])
    def test_no_queries(self, shape, device):
        q, k, v = make_qkv(**shape)
        out, lse = torch.ops.metal_attn.flash_fwd(q.to(device), k.to(device), v.to(device))
        assert out.shape == q.shape
        assert lse.shape == q.shape[:3]

    @pytest.mark.parametrize("q_offset", [None, 0])
    def test_no_keys(self, q_offset, device):
        q, k, v = make_qkv(kv_length=0, head_dim=HOME)
        out, lse = check_flash_fwd(
            q, k, v, causal=q_offset is not None, q_offset=q_offset, device=device
        )
        assert (out == 0).all()
        assert (lse == -math.inf).all()


class TestNonFinite:
    def test_nan_in_a_key_reaches_the_rows_that_see_it(self, device):
        q, k, v = make_qkv(q_length=65, kv_length=65, head_dim=HOME)
        k[:, :, 40] = math.nan
        out, lse = torch.ops.metal_attn.flash_fwd(
            q.to(device), k.to(device), v.to(device), causal=True, q_offset=0
        )
        assert out[:, :, 40:].isnan().all()
        assert lse[:, :, 40:].isnan().all()
        assert out[:, :, :32].isfinite().all()
        assert lse[:, :, :40].isfinite().all()

    def test_nan_in_a_query_stays_in_its_row(self, device):
        q, k, v = make_qkv(q_length=33, kv_length=33, head_dim=HOME)
        q[:, :, 5] = math.nan
        out, _ = torch.ops.metal_attn.flash_fwd(q.to(device), k.to(device), v.to(device))
        assert out[:, :, 5].isnan().all()
        out[:, :, 5] = 0
        assert out.isfinite().all()

    def test_infinite_score_is_nan_as_in_softmax(self, device):
        q, k, v = make_qkv(q_length=8, kv_length=40, head_dim=HOME)
        q[:] = 1.0
        k[:, :, 3] = math.inf
        out, _ = torch.ops.metal_attn.flash_fwd(q.to(device), k.to(device), v.to(device))
        assert out.isnan().all()

    def test_key_at_minus_infinity_has_no_weight(self, device):
        q, k, v = make_qkv(q_length=8, kv_length=40, head_dim=HOME)
        q[:] = 1.0
        k[:, :, 3] = -math.inf
        out, _ = torch.ops.metal_attn.flash_fwd(q.to(device), k.to(device), v.to(device))
        keep = [j for j in range(40) if j != 3]
        expected, _ = attention(q, k[:, :, keep], v[:, :, keep], compute_dtype=torch.float64)
        torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-5, atol=1e-6)

    def test_infinite_value_in_the_last_row_of_a_partial_block(self, device):
        q, k, v = make_qkv(q_length=8, kv_length=33, head_dim=HOME)
        v[:, :, 32] = math.inf
        out, _ = torch.ops.metal_attn.flash_fwd(q.to(device), k.to(device), v.to(device))
        assert (out == math.inf).all()


@given(
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    q_length=st.integers(0, 70),
    kv_length=st.integers(0, 70),
    case=st.sampled_from([case for case in DIFFERENT + DIFFERENT_FORWARD if max(case[:2]) <= 264]),
    q_offset=st.integers(-80, 80),
    seed=st.integers(0, 2**31),
)
def test_any_problem(
    device,
    batch,
    kv_heads,
    group,
    q_length,
    kv_length,
    case,
    q_offset,
    seed,
):
    head_dim, v_head_dim, dtype = case
    q, k, v = make_qkv(
        batch, kv_heads * group, kv_heads, q_length, kv_length, head_dim, v_head_dim, dtype, seed
    )
    # Where nothing is hidden kernels are others: test_causal_offsets has such offsets.
    offset = min(q_offset, kv_length - 2)
    check_flash_fwd(q, k, v, causal=True, q_offset=offset, device=device)


def test_two_runs_give_the_same_bits(device):
    shape = {"heads": 4, "kv_heads": 2, "head_dim": HOME}
    q, k, v = (t.to(device) for t in make_qkv(batch=2, **shape, dtype=torch.float16))
    first = torch.ops.metal_attn.flash_fwd(q, k, v, causal=True, q_offset=32)
    second = torch.ops.metal_attn.flash_fwd(q, k, v, causal=True, q_offset=32)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
