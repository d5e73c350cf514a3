"""flash_bwd at every kind of head dim, group, length and stride, and calls that must agree."""

import math

import pytest
import torch

from tests.attention.flash_bwd_check import (
    backward,
    check_flash_bwd,
    exact_forward,
    make_gradients,
    run,
)
from tests.attention.flash_bwd_features import FEATURES, problem
from tests.attention.flash_fwd_check import DTYPES, make_qkv
from tests.attention.head_dims import ALIKE, DIFFERENT, HOME, ODD
from torch_metal_attn import simulate
from torch_metal_attn.reference import attention


class TestHeadDims:
    @pytest.mark.parametrize("head_dim, dtype", ALIKE)
    def test_alike(self, head_dim, dtype, device):
        qkv = make_qkv(head_dim=head_dim, dtype=dtype)
        check_flash_bwd(*qkv, causal=True, q_offset=20, device=device)

    @pytest.mark.parametrize("head_dim, v_head_dim, dtype", DIFFERENT)
    def test_that_differ(self, head_dim, v_head_dim, dtype, device):
        qkv = make_qkv(1, 2, 1, 33, 65, head_dim, v_head_dim, dtype)
        check_flash_bwd(*qkv, causal=True, device=device)

    @pytest.mark.parametrize("head_dim, v_head_dim", [(512, 512), (576, 512)])
    def test_too_wide_float32(self, head_dim, v_head_dim, device):
        q, k, v = make_qkv(1, 1, 1, 9, 35, head_dim, v_head_dim)
        out, _ = make_gradients(q, v, q.shape[:3], dlse=False)
        with pytest.raises(
            ValueError,
            match=rf"q has a head dim of {head_dim} and v of {v_head_dim}; in float32 their "
            r"gradients need more threadgroup memory .*16-bit dtype",
        ):
            run("flash_bwd", device, out, None, q, k, v, out, torch.zeros(q.shape[:3]))

    @pytest.mark.parametrize("head_dim, v_head_dim, dtype", ODD)
    def test_what_lies_between_the_rows_is_not_read(self, head_dim, v_head_dim, dtype, device):
        """NaN behind each row of q, k, v, dout and out changes no bit."""
        q, k, v = make_qkv(head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype)
        out, lse = attention(q, k, v, causal=True)
        dout, dlse = make_gradients(q, v, q.shape[:3])
        options = {"causal": True, "exact_delta": True}
        expected = run("flash_bwd", device, dout, dlse, q, k, v, out, lse, **options)
        tensors = []
        for tensor in (q, k, v, dout, out):
            rows = torch.full((*tensor.shape[:3], tensor.shape[3] + 11), math.nan, dtype=dtype)
            rows[..., 3 : 3 + tensor.shape[3]] = tensor
            tensors.append(rows.to(device)[..., 3 : 3 + tensor.shape[3]])
        q, k, v, dout, out = tensors
        found = run("flash_bwd", device, dout, dlse, q, k, v, out, lse, **options)
        for narrow, whole in zip(found, expected, strict=True):
            assert torch.equal(narrow, whole)


class TestLengths:
    @pytest.mark.parametrize("q_length", [1, 7, 31, 33, 65])
    @pytest.mark.parametrize("kv_length", [1, 7, 31, 33, 65])
    def test_odd(self, q_length, kv_length, device):
        qkv = make_qkv(q_length=q_length, kv_length=kv_length, head_dim=HOME, dtype=torch.float16)
        check_flash_bwd(*qkv, device=device)
        check_flash_bwd(*qkv, causal=True, device=device)

    @pytest.mark.parametrize(
        "q_length, kv_length, dtype", [(1023, 129, torch.float16), (129, 1023, torch.float32)]
    )
    def test_long(self, q_length, kv_length, dtype, device):
        qkv = make_qkv(1, 1, 1, q_length, kv_length, 64, dtype=dtype)
        check_flash_bwd(*qkv, causal=True, q_offset=kv_length - q_length, device=device)

    @pytest.mark.parametrize("dtype", DTYPES[:2])
    def test_error_does_not_grow_with_the_rows(self, dtype, device, cores):
        """Of dv and dk with the queries, of dq with the keys."""
        cores(1)  # so that the tiles are those of short problems
        check_flash_bwd(*make_qkv(1, 1, 1, 4096, 32, 16, dtype=dtype), device=device)
        check_flash_bwd(*make_qkv(1, 1, 1, 32, 4096, 16, dtype=dtype), device=device)


class TestGroups:
    @pytest.mark.parametrize("heads, kv_heads", [(1, 1), (3, 1), (7, 7), (12, 4), (9, 3), (17, 1)])
    def test_ratios(self, heads, kv_heads, device):
        qkv = make_qkv(2, heads, kv_heads, head_dim=HOME, dtype=torch.float16)
        check_flash_bwd(*qkv, causal=True, device=device)

    def test_dk_and_dv_sum_over_the_group(self, device):
        """As expanded heads do, each with gradients of its own."""
        q, k, v = make_qkv(2, 6, 2, head_dim=HOME)
        dout, dlse = make_gradients(q, v, q.shape[:3])
        _, dq, dk, dv, _ = backward(q, k, v, dout, dlse, device, {})
        wide = [tensor.repeat_interleave(3, 1) for tensor in (k, v)]
        _, wide_dq, *each, _ = backward(q, *wide, dout, dlse, device, {})
        assert torch.equal(dq, wide_dq)
        for summed, parts in zip((dk, dv), each, strict=True):
            torch.testing.assert_close(summed, parts.view(2, 2, 3, *parts.shape[2:]).sum(2))


class TestEmpty:
    @pytest.mark.parametrize("batch, heads, q_length", [(0, 2, 5), (2, 0, 5), (2, 2, 0), (0, 0, 0)])
    @pytest.mark.parametrize("kv_length", [0, 7])
    def test_no_queries(self, batch, heads, q_length, kv_length, device):
        qkv = make_qkv(batch, heads, heads, q_length, kv_length, 16)
        dq, dk, dv, delta = check_flash_bwd(*qkv, causal=True, device=device)
        assert dq.numel() == delta.numel() == 0
        assert (dk == 0).all()
        assert (dv == 0).all()

    def test_no_query_heads(self, device):
        q, k, v = make_qkv(1, 0, 0, 5, 7, 16, dtype=torch.float16)
        k, v = (torch.randn(1, 2, 7, 16).half() for _ in range(2))
        lse = torch.empty(1, 0, 5)
        _, dk, dv, *_ = run("flash_bwd", device, q, None, q, k, v, q, lse)
        assert (dk == 0).all()
        assert (dv == 0).all()

    def test_no_keys(self, device):
        dq, dk, dv, _ = check_flash_bwd(*make_qkv(2, 2, 2, 35, 0, 16), device=device)
        assert (dq == 0).all()
        assert dk.numel() == dv.numel() == 0

    def test_no_keys_beside_a_sink(self, device):
        qkv = make_qkv(2, 2, 2, 35, 0, 16, dtype=torch.float16)
        sink = torch.tensor([1.0, 2.0]).half()
        dq, *_ = check_flash_bwd(*qkv, learnable_sink=sink, device=device)
        assert (dq == 0).all()


def in_order(tensor, order):
    """The same tensor, its dimensions in this order in memory."""
    back = torch.tensor(order).argsort().tolist()
    return tensor.permute(order).contiguous().permute(back)


class TestStrides:
    @pytest.mark.parametrize(
        "head_dim, v_head_dim, dtype",
        [(16, 16, torch.float32), (16, 16, torch.float16), (1, 1, torch.bfloat16)],
    )
    def test_every_order_of_dimensions(self, head_dim, v_head_dim, dtype, device):
        """Results have that of their input; the numbers are the same to the bit."""
        q, k, v = make_qkv(2, 4, 2, head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype)
        dout, dlse = make_gradients(q, v, q.shape[:3])
        out, *expected = backward(q, k, v, dout, dlse, device, {"causal": True})
        _, lse = exact_forward(q, k, v, {"causal": True})
        for order in [(0, 2, 1, 3), (1, 0, 2, 3), (2, 1, 0, 3), (2, 0, 1, 3), (1, 2, 0, 3)]:
            strided = [in_order(tensor, order) for tensor in (q, k, v)]
            gradients = in_order(dout, order), in_order(dlse[..., None], order)[..., 0]
            *found, _ = run(
                *("flash_bwd", device, *gradients, *strided, in_order(out, order), lse),
                exact_delta=True,
                causal=True,
            )
            for gradient, whole, tensor in zip(found, expected, (*strided, lse), strict=True):
                assert torch.equal(gradient.cpu(), whole)
                assert gradient.stride() == tensor.stride()

    @pytest.mark.parametrize("dim", [0, 1, 2])
    def test_expanded(self, dim, device):
        """Every copy gets gradients of its own, as autograd expects of an expanded input."""
        tensors = make_qkv(2, 2, 2, 65, 65, 16, dtype=torch.float16)
        q, k, v = (t.narrow(dim, 0, 1).expand(t.shape) for t in tensors)
        found = check_flash_bwd(q, k, v, device=device)
        whole = check_flash_bwd(*(t.clone() for t in (q, k, v)), device=device)
        for gradient, expected in zip(found, whole, strict=True):
            assert torch.equal(gradient, expected)

    def test_expanded_gradients(self, device):
        """As a mean's backward hands them on."""
        q, k, v = make_qkv(2, 4, 2, head_dim=HOME, dtype=torch.float16)
        out, lse = exact_forward(q, k, v, {})
        dout = torch.randn(16, generator=torch.Generator().manual_seed(0)).half()
        dlse = torch.tensor(0.7)
        found = run(
            *("flash_bwd", device, dout.expand(out.shape), dlse.expand(lse.shape)),
            *(q, k, v, out, lse),
        )
        copied = dout.expand(out.shape).contiguous(), dlse.expand(lse.shape).contiguous()
        expected = run("flash_bwd", device, *copied, q, k, v, out, lse)
        for gradient, whole in zip(found, expected, strict=True):
            assert torch.equal(gradient, whole)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    def test_one_packed_projection(self, dtype, device):
        q, k, v = make_qkv(2, 4, 4, 65, 65, 16, dtype=dtype)
        expected = check_flash_bwd(q, k, v, causal=True, device=device)
        packed = torch.stack([t.transpose(1, 2) for t in (q, k, v)], 2)  # (B, L, 3, H, D)
        views = [t.transpose(1, 2) for t in packed.unbind(2)]
        found = check_flash_bwd(*views, causal=True, device=device)
        for gradient, whole in zip(found, expected, strict=True):
            assert torch.equal(gradient, whole)

    @pytest.mark.parametrize("offset", [1, 2, 3])
    def test_unaligned(self, offset, device):
        """Storage offsets that only narrow loads can read."""
        tensors = make_qkv(head_dim=HOME, dtype=torch.float16)
        expected = check_flash_bwd(*tensors, device=device)
        shifted = [
            torch.cat([t.flatten()[:offset], t.flatten()])[offset:].view(t.shape) for t in tensors
        ]
        for index in range(3):
            some = [shifted[i] if i == index else t for i, t in enumerate(tensors)]
            found = check_flash_bwd(*some, device=device)
            for gradient, whole in zip(found, expected, strict=True):
                assert torch.equal(gradient, whole)


DETERMINED = [
    "plain",
    "causal",
    "mask",
    "rotary",
    "MQA",
    "softcap, all, rotary, odd",
    "slices",
]


@pytest.mark.parametrize("feature", DETERMINED)
def test_the_same_bits_in_any_order(feature):
    """No atomics: threadgroups and SIMD groups may run in any order, on any number of cores."""
    (q, k, v), options = problem(feature)
    dout, dlse = make_gradients(q, v, q.shape[:3], dlse=options.pop("dlse", True))
    runs = []
    statistics = (q, k, v, *exact_forward(q, k, v, options))
    for order in ({}, {"seed": 1, "workers": 1}, {"seed": 2, "workers": 2}):
        with simulate(check=True, **order):
            results = run("flash_bwd", "cpu", dout, dlse, *statistics, exact_delta=True, **options)
        runs.append(results[:4])
    for other in runs[1:]:
        for tensor, first in zip(other, runs[0], strict=True):
            assert torch.equal(tensor, first)


def test_determined_features_exist():
    assert set(DETERMINED) <= set(FEATURES)


def test_finite_differences(device):
    """d loss along a random direction, from the float64 oracle's forward alone."""
    q, k, v = make_qkv(2, 4, 2, 33, 65, 16)
    dout, dlse = make_gradients(q, v, q.shape[:3])
    options = {"causal": True}
    _, *found, _ = backward(q, k, v, dout, dlse, device, options)

    def loss(tensors):
        out, lse = attention(*tensors, **options, compute_dtype=torch.float64)
        return (out * dout).sum() + (lse * dlse).sum()

    tensors = [tensor.double() for tensor in (q, k, v)]
    for i, gradient in enumerate(found):
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            step = 1e-6 * torch.randn(gradient.shape, generator=generator, dtype=torch.float64)
            ahead, behind = (
                loss([t + sign * step if j == i else t for j, t in enumerate(tensors)])
                for sign in (1, -1)
            )
            slope = (ahead - behind).item() / 2e-6
            assert (gradient.double() * step).sum().item() / 1e-6 == pytest.approx(slope, rel=1e-4)
