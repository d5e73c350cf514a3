"""flash_attn_func and scaled_dot_product_attention: layouts, alignment, and what they refuse."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

from torch_metal_attn import flash_attn_func
from torch_metal_attn import scaled_dot_product_attention as sdpa
from torch_metal_attn.reference import attention

SIZES = [1, 7, 31, 33, 65]


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def close(actual, expected):
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-5, atol=1e-5)


def bottom_right(q_length, kv_length, left=math.inf, right=math.inf):
    """Bool (Lq, Lk), flash-attn's window."""
    query = torch.arange(q_length)[:, None] + kv_length - q_length
    distance = torch.arange(kv_length) - query
    return (distance >= -left) & (distance <= right)


# Shapes of query and of key and value.
RANKS = [
    ((5, 8), (7, 8)),
    ((4, 5, 8), (4, 7, 8)),
    ((5, 8), (4, 7, 8)),
    ((4, 5, 8), (7, 8)),
    ((2, 4, 5, 8), (4, 7, 8)),
    ((1, 4, 5, 8), (3, 4, 7, 8)),
    ((3, 4, 5, 8), (1, 1, 7, 8)),
    ((3, 1, 5, 8), (3, 4, 7, 8)),
    ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8)),
    ((6, 1, 4, 5, 8), (6, 1, 4, 7, 8)),
    ((1, 3, 4, 5, 8), (3, 4, 7, 8)),
    ((3, 2, 4, 5, 8), (4, 7, 8)),
    ((0, 4, 5, 8), (0, 4, 7, 8)),
    ((2, 0, 4, 5, 8), (2, 0, 4, 7, 8)),
    ((2, 4, 0, 8), (2, 4, 7, 8)),
]

STRIDED = {
    "transposed": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "expanded": lambda t: t[:1, :1].expand_as(t),
    "offset": lambda t: torch.cat([t, t], 2)[:, :, 3 : 3 + t.shape[2]],
    "packed": lambda t: torch.stack([t, t, t], 3)[..., 1, :],
    "wide rows": lambda t: torch.nn.functional.pad(t, (3, 5))[..., 3:-5],
}


class TestScaledDotProductAttention:
    @pytest.mark.parametrize("q_length", SIZES)
    @pytest.mark.parametrize("kv_length", SIZES)
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_sizes(self, q_length, kv_length, is_causal):
        """Through the reference: the wrapper's alignment; the kernel has test_flash_fwd.py."""
        q, k, v = normal(2, 3, q_length, 16), *normal(2, 2, 3, kv_length, 16, seed=1)
        close(sdpa(q, k, v, is_causal=is_causal), torch_sdpa(q, k, v, is_causal=is_causal))

    @pytest.mark.parametrize("is_causal", [False, True])
    def test_on_device(self, device, is_causal):
        q, k, v = normal(1, 4, 33, 16), *normal(2, 1, 2, 65, 16, seed=1)
        options = {"is_causal": is_causal, "scale": 0.2, "enable_gqa": True}
        out = sdpa(q.to(device), k.to(device), v.to(device), **options)
        close(out, torch_sdpa(q, k, v, **options))

    @pytest.mark.parametrize(("q_shape", "k_shape"), RANKS)
    def test_ranks_and_broadcasting(self, q_shape, k_shape):
        q, k, v = normal(*q_shape), normal(*k_shape, seed=1), normal(*k_shape, seed=2)
        close(sdpa(q, k, v), torch_sdpa(q, k, v))

    @pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (6, 3), (4, 1), (4, 4)])
    def test_grouped_queries(self, heads, kv_heads):
        q, k, v = normal(2, heads, 9, 16), *normal(2, 2, kv_heads, 11, 16, seed=1)
        out = sdpa(q, k, v, enable_gqa=True, is_causal=True)
        close(out, torch_sdpa(q, k, v, enable_gqa=True, is_causal=True))
        close(sdpa(q[0], k[0], v[0], enable_gqa=True), torch_sdpa(q, k, v, enable_gqa=True)[0])
        close(
            sdpa(q[:1], k, v[:, :1], enable_gqa=True),
            torch_sdpa(q[:1], k, v[:, :1], enable_gqa=True),
        )

    @pytest.mark.parametrize("layout", STRIDED)
    def test_strides(self, layout, device):
        view = STRIDED[layout]
        tensors = normal(2, 4, 9, 16), normal(2, 4, 11, 16, seed=1), normal(2, 4, 11, 24, seed=2)
        out = sdpa(*[view(tensor.to(device)) for tensor in tensors], is_causal=True)
        close(out, torch_sdpa(*[view(tensor) for tensor in tensors], is_causal=True))

    def test_queries_without_keys(self):
        q, k, v = normal(1, 2, 5, 8), *normal(2, 1, 2, 0, 8)
        assert (sdpa(q, k, v) == 0).all()
        assert sdpa(q, k, v).shape == (1, 2, 5, 8)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_nan_and_infinity(self, value, device):
        q, k, v = normal(1, 1, 9, 8), *normal(2, 1, 1, 9, 8, seed=1)
        v[0, 0, 4, 2] = value
        out = sdpa(q.to(device), k.to(device), v.to(device)).cpu()
        expected = torch_sdpa(q, k, v)
        assert not expected[..., 2].isfinite().any()
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
        q[0, 0, 3, 0] = math.nan
        out = sdpa(q.to(device), k.to(device), v.to(device)).cpu()
        assert out[0, 0, :, 0].isnan().tolist() == [row == 3 for row in range(9)]

    def test_refuses_what_torch_refuses(self):
        q, k = normal(2, 4, 5, 8), normal(2, 2, 7, 8)
        mask = torch.ones(5, 5, dtype=torch.bool)
        cases = [
            ((q, q, q), {"attn_mask": mask, "is_causal": True}, "attn_mask should not be set"),
            ((q[0, 0, 0], q, q), {}, "at least 2 dimensional"),
            ((q, q.half(), q), {}, "same dtype"),
            ((q, q, q), {"dropout_p": 1.5}, r"between 0 and 1, but got 1\.5"),
            ((q, k, k), {}, "hape"),
            ((q, normal(3, 2, 7, 8), normal(3, 2, 7, 8)), {"enable_gqa": True}, "hape"),
            ((q, normal(2, 3, 7, 8), normal(2, 3, 7, 8)), {"enable_gqa": True}, "must divide"),
            ((q, k[:, :0], k[:, :0]), {"enable_gqa": True}, "must divide"),
            ((q[0, 0], k, k), {"enable_gqa": True}, "3 dimensions"),
        ]
        for arguments, options, message in cases:
            with pytest.raises(RuntimeError, match=message):
                sdpa(*arguments, **options)

    def test_refuses_what_is_missing(self):
        q = normal(2, 4, 5, 8)
        cases = [
            ({"attn_mask": torch.ones(5, 5)}, r"attn_mask of shape \(5, 5\)"),
            ({"dropout_p": 0.1}, r"dropout_p=0\.1"),
        ]
        for options, message in cases:
            with pytest.raises(NotImplementedError, match=message):
                sdpa(q, q, q, **options)
        k, v = normal(2, 2, 5, 8), normal(2, 4, 5, 8)
        with pytest.raises(NotImplementedError, match="2 key heads and 4 value heads"):
            sdpa(q, k, v, enable_gqa=True)

    def test_never_copies(self):
        """Leading dimensions that no view can merge: an error and not a copy."""
        q = normal(2, 3, 4, 5, 8)
        swapped = q.transpose(0, 1).contiguous().transpose(0, 1)
        for name, tensors in (
            ("query", (swapped, q, q)),
            ("key", (q, swapped, q)),
            ("value", (q, q, swapped)),
        ):
            with pytest.raises(ValueError, match=rf"^{name} of shape .*{name}\.contiguous\(\)"):
                sdpa(*tensors)
        close(sdpa(swapped.contiguous(), q, q), torch_sdpa(q, q, q))
        row = normal(2, 1, 4, 5, 8)
        with pytest.raises(
            ValueError, match=r"query\.expand\(2, 3, 4, 5, 8\)\.contiguous\(\) first"
        ):
            sdpa(row, q, q)
        close(sdpa(row.expand(2, 3, 4, 5, 8).contiguous(), q, q), torch_sdpa(row, q, q))

    def test_passes_views_of_the_inputs(self):
        q = normal(3, 2, 4, 5, 8)
        seen = []
        op = torch.ops.metal_attn.flash_fwd

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                if function is op.default:
                    seen.extend(args)
                return function(*args, **(kwargs or {}))

        with Watch():
            sdpa(q, q, q[0, 0])
        assert [tensor.data_ptr() for tensor in seen] == [q.data_ptr()] * 3

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"query": [1.0]}, "query is a list"),
            ({"key": None}, "key is a NoneType"),
            ({"value": 3}, "value is a int"),
            ({"dropout_p": None}, "dropout_p is None"),
        ],
    )
    def test_wrong_types(self, arguments, message):
        q = normal(2, 4, 5, 8)
        with pytest.raises(TypeError, match=message):
            sdpa(**{"query": q, "key": q, "value": q} | arguments)

    def test_the_op_has_the_last_word(self):
        q = normal(1, 2, 5, 8)
        with pytest.raises(ValueError, match="stride"):
            sdpa(q, normal(1, 2, 8, 5).transpose(2, 3), q)
        with pytest.raises(ValueError, match="float64"):
            sdpa(q.double(), q.double(), q.double())

    @pytest.mark.parametrize("dynamic", [False, True])
    def test_compile(self, dynamic):
        compiled = torch.compile(sdpa, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        for length in (9, 12):
            q, k, v = normal(2, 4, length, 16), *normal(2, 2, 2, length, 16, seed=1)
            out = compiled(q, k, v, is_causal=True, enable_gqa=True)
            close(out, torch_sdpa(q, k, v, is_causal=True, enable_gqa=True))


class TestFlashAttnFunc:
    def reference(self, q, k, v, visible, scale=None):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out, lse = attention(
            q, k, v, softmax_scale=scale, mask=visible, compute_dtype=torch.float64
        )
        return out.transpose(1, 2).float(), lse.float()

    @pytest.mark.parametrize("q_length", SIZES)
    @pytest.mark.parametrize("kv_length", SIZES)
    def test_causal_is_bottom_right(self, q_length, kv_length):
        q, k, v = normal(2, q_length, 4, 16), *normal(2, 2, kv_length, 2, 16, seed=1)
        expected, _ = self.reference(q, k, v, bottom_right(q_length, kv_length, right=0))
        close(flash_attn_func(q, k, v, causal=True), expected)
        close(flash_attn_func(q, k, v, window_size=(-1, 0)), expected)
        expected, _ = self.reference(q, k, v, bottom_right(q_length, kv_length))
        close(flash_attn_func(q, k, v), expected)

    @given(
        right=st.integers(-2, 12), causal=st.booleans(), lengths=st.tuples(*[st.integers(1, 9)] * 2)
    )
    def test_right_window(self, right, causal, lengths):
        q, k, v = normal(1, lengths[0], 2, 8), *normal(2, 1, lengths[1], 2, 8, seed=1)
        limit = 0 if causal else right if right >= 0 else math.inf
        expected, _ = self.reference(q, k, v, bottom_right(*lengths, right=limit))
        close(flash_attn_func(q, k, v, causal=causal, window_size=(-1, right)), expected)

    def test_on_device(self, device):
        q, k, v = normal(2, 33, 4, 32), *normal(2, 2, 40, 2, 32, seed=1)
        out, lse, dropout_pattern = flash_attn_func(
            q.to(device),
            k.to(device),
            v.to(device),
            softmax_scale=0.1,
            causal=True,
            deterministic=True,
            return_attn_probs=True,
        )
        expected, expected_lse = self.reference(q, k, v, bottom_right(33, 40, right=0), 0.1)
        close(out, expected)
        close(lse, expected_lse)
        assert lse.dtype == torch.float32
        assert out.is_contiguous()
        assert dropout_pattern is None

    def test_refuses_what_is_missing(self):
        q = normal(1, 5, 2, 8)
        cases = [
            ({"dropout_p": 0.2}, r"dropout_p=0\.2"),
            ({"softcap": 30.0}, r"softcap=30\.0"),
            ({"alibi_slopes": torch.ones(2)}, r"alibi_slopes of shape \(2,\)"),
            ({"window_size": (3, 0)}, r"window_size=\(3, 0\)"),
        ]
        for options, message in cases:
            with pytest.raises(NotImplementedError, match=message):
                flash_attn_func(q, q, q, **options)

    @pytest.mark.parametrize("position", [0, 1, 2])
    @pytest.mark.parametrize("shape", [(), (8,), (5, 2, 8), (1, 1, 5, 2, 8)])
    def test_refuses_other_ranks(self, position, shape):
        tensors = [normal(1, 5, 2, 8)] * 3
        tensors[position] = normal(*shape)
        message = f"{'qkv'[position]} has shape {shape}; it must be (B, L, H, D)"
        with pytest.raises(ValueError, match=re.escape(message)):
            flash_attn_func(*tensors)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"q": [1.0]}, "q is a list"),
            ({"v": None}, "v is a NoneType"),
            ({"window_size": 3}, "window_size is 3; it must be two ints"),
            ({"window_size": (-1,)}, r"window_size is \(-1,\)"),
            ({"window_size": (None, None)}, r"window_size is \(None, None\)"),
            ({"window_size": (-1, 2.5)}, r"window_size is \(-1, 2\.5\)"),
        ],
    )
    def test_wrong_types(self, arguments, message):
        q = normal(1, 5, 2, 8)
        with pytest.raises(TypeError, match=message):
            flash_attn_func(**{"q": q, "k": q, "v": q} | arguments)

    @pytest.mark.parametrize("right", [2**31, 2**63 - 1, 2**70])
    def test_right_window_beyond_int64(self, right):
        q, k = normal(1, 5, 2, 8), normal(1, 9, 2, 8)
        close(flash_attn_func(q, k, k, window_size=(-1, right)), flash_attn_func(q, k, k))

    @pytest.mark.parametrize("dynamic", [False, True])
    def test_compile(self, dynamic):
        compiled = torch.compile(
            flash_attn_func, fullgraph=True, dynamic=dynamic, backend="aot_eager"
        )
        for length in (9, 12):
            q, k, v = normal(1, length, 2, 8), *normal(2, 1, 15, 2, 8, seed=1)
            out = compiled(q, k, v, causal=True)
            close(out, flash_attn_func(q, k, v, causal=True))
            assert out.stride() == flash_attn_func(q, k, v, causal=True).stride()
