"""flash-attn's functions: layouts, bottom-right alignment, every option, and what they refuse."""

import inspect
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

from tests.attention.flash_fwd_check import ACCUMULATION, DTYPES, ROUNDING
from torch_metal_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    scaled_dot_product_attention,
)
from torch_metal_attn.call.options import ScoreOptions
from torch_metal_attn.testing.judge import normal

SIZES = [1, 7, 31, 33, 65]


def make(batch, q_length, kv_length, heads=4, kv_heads=2, head_dim=16, dtype=torch.float32):
    q = normal(batch, q_length, heads, head_dim, dtype=dtype)
    k, v = normal(2, batch, kv_length, kv_heads, head_dim, seed=1, dtype=dtype)
    return q, k, v


def close(actual, expected):
    torch.testing.assert_close(actual.cpu(), expected.to(actual.dtype), rtol=1e-5, atol=1e-5)


def loop(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    attention_chunk=0,
    learnable_sink=None,
):
    """flash-attn's documentation, one query at a time, in float64: (out, softmax_lse).

    q (B, Lq, H, D), k (B, Lk, Hkv, D), v (B, Lk, Hkv, Dv). Shares nothing with the reference.
    """
    q, k, v = q.double(), k.double(), v.double()
    (batch, q_length, heads, head_dim), kv_length = q.shape, k.shape[1]
    group = heads // k.shape[2]
    scale = 1 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale
    left, right = (
        math.inf if limit is None or limit < 0 else min(limit, 2**40) for limit in window_size
    )
    right = 0 if causal else right
    out = torch.zeros(batch, q_length, heads, v.shape[3], dtype=torch.float64)
    lse = torch.full((batch, heads, q_length), -math.inf, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            sink = -math.inf if learnable_sink is None else float(learnable_sink[h])
            slope = 0.0
            if alibi_slopes is not None:
                slope = float(alibi_slopes[h] if alibi_slopes.dim() == 1 else alibi_slopes[b, h])
            for i in range(q_length):
                position = i + kv_length - q_length
                keys = [
                    j
                    for j in range(kv_length)
                    if position - left <= j <= position + right
                    and (not attention_chunk or j // attention_chunk == position // attention_chunk)
                ]
                scores = k[b, keys, h // group] @ q[b, i, h] * scale
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                distance = torch.tensor([abs(position - j) for j in keys], dtype=torch.float64)
                scores = scores - slope * distance
                logits = torch.cat([scores, torch.tensor([sink], dtype=torch.float64)])
                lse[b, h, i] = logits.logsumexp(0)
                if keys:
                    out[b, i, h] = logits.softmax(0)[:-1] @ v[b, keys, h // group]
    return out, lse


def torch_error(q, k, v):
    """Largest error of torch's own attention on these inputs without any option."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    low = torch_sdpa(q, k, v, enable_gqa=True)
    exact = torch_sdpa(q.double(), k.double(), v.double(), enable_gqa=True)
    return (low - exact).abs().max().item()


def check(q, k, v, device="cpu", **options):
    """Holds flash_attn_func to twice torch's error against the loop."""
    on_device = {
        name: value.to(device) if torch.is_tensor(value) else value
        for name, value in options.items()
    }
    out, lse, dropout_pattern = flash_attn_func(
        q.to(device), k.to(device), v.to(device), return_attn_probs=True, **on_device
    )
    expected, expected_lse = loop(q, k, v, **options)
    assert out.dtype == q.dtype
    assert lse.dtype == torch.float32
    assert out.is_contiguous()
    assert dropout_pattern is None
    slack = ROUNDING[q.dtype] * expected.abs() + ACCUMULATION * expected.abs().max()
    assert ((out.cpu().double() - expected).abs() <= 2 * torch_error(q, k, v) + slack).all()
    close(lse, expected_lse)
    return out


FEATURES = {
    "window": {"window_size": (5, 2)},
    "window of one key": {"window_size": (0, 0)},
    "left window": {"window_size": (7, -1)},
    "causal left window": {"causal": True, "window_size": (7, -1)},
    "causal wins on the right": {"causal": True, "window_size": (-1, 9)},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    "alibi of each batch": {"alibi_slopes": torch.rand(2, 4) - 0.2, "causal": True},
    "chunk": {"attention_chunk": 8, "causal": True},
    "sink": {"learnable_sink": torch.tensor([0.5, -1.0, 2.0, -math.inf])},
    "everything": {
        "softmax_scale": 0.4,
        "causal": True,
        "window_size": (11, -1),
        "softcap": 3.0,
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625]),
        "attention_chunk": 16,
        "learnable_sink": torch.tensor([0.5, -1.0, 2.0, 0.0]),
    },
}


# Every way to pass one; what each does in the kernels is in tests of the ops.
ON_DEVICE = ["window", "alibi of each batch", "sink", "everything"]


class TestFlashAttnFunc:
    @pytest.mark.parametrize("q_length", SIZES)
    @pytest.mark.parametrize("kv_length", SIZES)
    def test_causal_is_bottom_right(self, q_length, kv_length):
        q, k, v = make(1, q_length, kv_length)
        expected, _ = loop(q, k, v, causal=True)
        close(flash_attn_func(q, k, v, causal=True), expected)
        close(flash_attn_func(q, k, v, window_size=(-1, 0)), expected)
        close(flash_attn_func(q, k, v), loop(q, k, v)[0])

    @pytest.mark.parametrize(
        "feature, dtype", [(feature, DTYPES[i % 3]) for i, feature in enumerate(ON_DEVICE)]
    )
    def test_features_on_device(self, device, feature, dtype):
        check(*make(2, 33, 40, dtype=dtype), device=device, **FEATURES[feature])

    @pytest.mark.parametrize("feature", FEATURES)
    @pytest.mark.parametrize("lengths", [(1, 65), (40, 7), (31, 33)])
    def test_features(self, feature, lengths):
        check(*make(2, *lengths), **FEATURES[feature])

    def test_each_feature_matters(self):
        """No case above gives the plain result."""
        q, k, v = make(2, 33, 40)
        plain, _ = loop(q, k, v)
        causal, _ = loop(q, k, v, causal=True)
        for name, options in FEATURES.items():
            same = causal if options == FEATURES["causal wins on the right"] else plain
            differs = (loop(q, k, v, **options)[0] - same).abs().max() > 0.01
            assert differs == (same is plain), name

    @given(
        window=st.tuples(*[st.none() | st.integers(-2, 12)] * 2),
        causal=st.booleans(),
        lengths=st.tuples(*[st.integers(0, 9)] * 2),
        chunk=st.integers(0, 5),
        softcap=st.sampled_from([0.0, 0.5, 10.0]),
        alibi=st.sampled_from([None, (2,), (1, 2)]),
        sink=st.booleans(),
    )
    def test_any_combination(self, window, causal, lengths, chunk, softcap, alibi, sink):
        q, k, v = make(1, *lengths, heads=2, kv_heads=1, head_dim=8)
        options = {
            "window_size": window,
            "causal": causal,
            "attention_chunk": chunk,
            "softcap": softcap,
            "alibi_slopes": None if alibi is None else normal(*alibi, seed=3),
            "learnable_sink": normal(2, seed=4) if sink else None,
        }
        out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, **options)
        expected, expected_lse = loop(q, k, v, **options)
        close(out, expected)
        close(lse, expected_lse)

    @pytest.mark.parametrize("position", [0, 1, 2])
    @pytest.mark.parametrize("shape", [(), (8,), (5, 2, 8), (1, 1, 5, 2, 8)])
    def test_refuses_other_ranks(self, position, shape):
        tensors = [normal(1, 5, 2, 8)] * 3
        tensors[position] = normal(*shape)
        message = f"{'qkv'[position]} has shape {shape}; it must be (B, L, H, D)"
        with pytest.raises(ValueError, match=re.escape(message)):
            flash_attn_func(*tensors)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"softcap": -1.0}, "softcap is -1; it must be 0"),
            ({"attention_chunk": -2}, "attention_chunk is -2"),
            ({"alibi_slopes": torch.ones(3)}, r"alibi_slopes has shape \(3,?\)"),
            ({"alibi_slopes": torch.ones(2).half()}, "alibi_slopes has dtype float16"),
            ({"learnable_sink": torch.ones(2, 1)}, "learnable_sink has shape"),
        ],
    )
    def test_the_op_has_the_last_word(self, options, message):
        q = normal(1, 5, 2, 8)
        with pytest.raises(ValueError, match=message):
            flash_attn_func(q, q, q, **options)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"q": [1.0]}, "q is a list"),
            ({"v": None}, "v is a NoneType"),
            ({"causal": 2}, "causal is 2; it must be a bool"),
            ({"causal": torch.ones(2)}, "causal is tensor.*; it must be a bool"),
            ({"return_attn_probs": "a"}, "return_attn_probs is 'a'; it must be a bool"),
            ({"deterministic": None}, "deterministic is None; it must be a bool"),
            ({"softmax_scale": "a"}, "softmax_scale is 'a'; it must be a number"),
            ({"softcap": None}, "softcap is None; it must be a number"),
            ({"softcap": True}, "softcap is True; it must be a number"),
            ({"attention_chunk": 2.5}, r"attention_chunk is 2\.5; it must be an int"),
            ({"alibi_slopes": [0.5, 0.5]}, "alibi_slopes is a list; it must be a tensor or None"),
            ({"learnable_sink": 1.0}, "learnable_sink is a float; it must be a tensor or None"),
            ({"window_size": torch.ones(2)}, r"window_size is tensor.*; it must be two ints"),
            ({"window_size": (True, 1)}, r"window_size is \(True, 1\)"),
            ({"window_size": 3}, "window_size is 3; it must be two ints"),
            ({"window_size": (-1,)}, r"window_size is \(-1,\)"),
            ({"window_size": (-1, 2.5)}, r"window_size is \(-1, 2\.5\)"),
        ],
    )
    def test_wrong_types(self, arguments, message):
        q = normal(1, 5, 2, 8)
        with pytest.raises(TypeError, match=message):
            flash_attn_func(**{"q": q, "k": q, "v": q} | arguments)

    @pytest.mark.parametrize("name", ["softmax_scale", "softcap"])
    def test_a_number_whose_gradient_would_be_lost(self, name):
        q, number = normal(1, 5, 2, 8), torch.tensor(0.5, requires_grad=True)
        with pytest.raises(NotImplementedError, match=f"{name} requires grad, .*: detach it"):
            flash_attn_func(q, q, q, **{name: number})
        expected = flash_attn_func(q, q, q, **{name: 0.5})
        with torch.no_grad():
            assert torch.equal(flash_attn_func(q, q, q, **{name: number}), expected)

    @pytest.mark.parametrize(
        "options",
        [
            {"window_size": torch.tensor([2, 1])},
            {"window_size": np.array([2, 1])},
            {"window_size": [np.int64(2), torch.tensor(1)]},
            {"causal": 1, "window_size": (2, -1)},
            {"causal": np.True_, "window_size": (np.int32(2), None)},
            {"causal": torch.tensor(True), "window_size": (2, 7), "softcap": 0},
            {"softcap": np.float32(2.0), "softmax_scale": torch.tensor(0.5)},
            {"softcap": 2, "softmax_scale": np.float64(0.5), "attention_chunk": np.int64(0)},
        ],
        ids=str,
    )
    def test_numbers_of_any_kind(self, options):
        """NumPy's and tensors, as flash-attn takes them."""
        plain = {"causal": bool(options.get("causal", False))}
        if "window_size" in options:
            plain["window_size"] = (2, -1 if plain["causal"] else 1)
        if options.get("softcap"):
            plain |= {"softcap": 2.0, "softmax_scale": 0.5}
        q, k = normal(1, 5, 2, 8), normal(1, 9, 2, 8)
        assert torch.equal(flash_attn_func(q, k, k, **options), flash_attn_func(q, k, k, **plain))

    @pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16, torch.tensor])
    @pytest.mark.parametrize("function", [flash_attn_func, scaled_dot_product_attention])
    def test_dropout_of_any_kind(self, kind, function):
        q = normal(1, 5, 2, 8)
        results = []
        for dropout_p in (0.5, kind(0.5)):
            torch.manual_seed(0)
            results.append(function(q, q, q, dropout_p=dropout_p))
        assert torch.equal(*results)

    @pytest.mark.parametrize("shape", [(0, 3), (1, 0), (0, 33), (0, 0)])
    @pytest.mark.parametrize("function", [flash_attn_func, flash_attn_with_kvcache])
    def test_strides_of_no_elements(self, function, shape):
        """They mean nothing, whatever is empty; `contiguous` would keep them."""
        batch, length = shape
        q, k = normal(batch, length, 2, 16)[..., ::2], normal(batch, 9, 1, 8)
        assert q.stride(-1) == 2
        assert function(q, k, k).shape == (batch, length, 2, 8)
        with pytest.raises(ValueError, match=r"k.* has strides .*; the last must be 1"):
            function(normal(1, length, 2, 8), normal(1, 9, 1, 16)[..., ::2], normal(1, 9, 1, 8))

    @pytest.mark.parametrize("far", [2**31, 2**63 - 1, 2**70, -(2**70)])
    def test_windows_beyond_int64(self, far):
        q, k = normal(1, 5, 2, 8), normal(1, 9, 2, 8)
        close(flash_attn_func(q, k, k, window_size=(-1, far)), flash_attn_func(q, k, k))
        close(flash_attn_func(q, k, k, window_size=(far, -1)), flash_attn_func(q, k, k))
        close(flash_attn_func(q, k, k, window_size=(far, 0)), flash_attn_func(q, k, k, causal=True))


def make_packed(q_lengths, kv_lengths, **shape):
    """q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k and each sequence alone."""
    sequences = [
        make(1, q_length, kv_length, **shape)
        for q_length, kv_length in zip(q_lengths, kv_lengths, strict=True)
    ]
    sequences = [tuple(t * (1 + b) for t in one) for b, one in enumerate(sequences)]
    tensors = [torch.cat([one[i][0] for one in sequences]) for i in range(3)]
    cu_seqlens = [
        torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (q_lengths, kv_lengths)
    ]
    return (*tensors, *cu_seqlens, max(q_lengths), max(kv_lengths)), sequences


Q_LENGTHS, KV_LENGTHS = [7, 0, 33, 1, 12], [9, 5, 40, 31, 0]


class TestFlashAttnVarlenFunc:
    def check(self, device="cpu", q_lengths=Q_LENGTHS, kv_lengths=KV_LENGTHS, **options):
        packed, sequences = make_packed(q_lengths, kv_lengths)
        packed = [t.to(device) if torch.is_tensor(t) else t for t in packed]
        on_device = {
            name: value.to(device) if torch.is_tensor(value) else value
            for name, value in options.items()
        }
        out, lse, pattern = flash_attn_varlen_func(*packed, return_attn_probs=True, **on_device)
        assert out.is_contiguous()
        assert lse.shape == (4, sum(q_lengths))
        assert pattern is None
        used = options.pop("seqused_k", None)
        slopes = options.pop("alibi_slopes", None)
        start = 0
        for b, (q, k, v) in enumerate(sequences):
            if slopes is not None:
                options["alibi_slopes"] = slopes if slopes.dim() == 1 else slopes[b]
            keys = k.shape[1] if used is None else int(used[b])
            expected, expected_lse = loop(q, k[:, :keys], v[:, :keys], **options)
            rows = slice(start, start + q.shape[1])
            close(out[rows], expected[0])
            close(lse[:, rows], expected_lse[0])
            start = rows.stop

    @pytest.mark.parametrize("feature", ON_DEVICE)
    def test_features_on_device(self, device, feature):
        options = dict(FEATURES[feature])
        if options.get("alibi_slopes", torch.ones(1)).dim() == 2:
            options["alibi_slopes"] = normal(5, 4, seed=3) / 4
        self.check(device, **options)

    @pytest.mark.parametrize("causal", [False, True])
    def test_used_keys_on_device(self, device, causal):
        used = torch.tensor([9, 2, 33, 0, 0], dtype=torch.int32)
        self.check(device, seqused_k=used, causal=causal)

    @given(
        lengths=st.lists(st.tuples(*[st.integers(0, 6)] * 2), min_size=1, max_size=4),
        window=st.tuples(*[st.integers(-2, 5)] * 2),
        causal=st.booleans(),
    )
    def test_any_lengths(self, lengths, window, causal):
        q_lengths, kv_lengths = (list(side) for side in zip(*lengths, strict=True))
        self.check("cpu", q_lengths, kv_lengths, window_size=window, causal=causal)

    def test_pages(self, device):
        """flash-attn's layout, (pages, page, Hkv, D); sequence b has every fifth page from b on."""
        (q, k, v, *packing), sequences = make_packed(Q_LENGTHS, KV_LENGTHS)
        expected = flash_attn_varlen_func(q, k, v, *packing, causal=True)
        table = torch.arange(5)[:, None] + torch.arange(0, 25, 5)
        pages = [torch.full((25, 8, *x.shape[1:]), torch.nan) for x in (k, v)]
        for b, (_, *operands) in enumerate(sequences):
            for cache, x in zip(pages, operands, strict=True):
                rows = cache[table[b]].flatten(0, 1)
                rows[: x.shape[1]] = x[0]
                cache[table[b]] = rows.unflatten(0, (5, 8))
        arguments = (q, *pages, *packing)
        out = flash_attn_varlen_func(
            *(x.to(device) if torch.is_tensor(x) else x for x in arguments),
            causal=True,
            block_table=table.int().to(device),
        )
        close(out, expected)

    @pytest.mark.parametrize("kind", [np.int64, torch.tensor])
    def test_lengths_of_any_kind(self, kind):
        (*tensors, q_length, kv_length), _ = make_packed(Q_LENGTHS, KV_LENGTHS)
        found = flash_attn_varlen_func(*tensors, kind(q_length), kind(kv_length))
        assert torch.equal(found, flash_attn_varlen_func(*tensors, q_length, kv_length))

    @pytest.mark.parametrize(
        ("index", "value", "error", "message"),
        [
            (0, [1.0], TypeError, "q is a list"),
            (3, [0, 5], TypeError, "cu_seqlens_q is a list"),
            (5, None, TypeError, "max_seqlen_q is None; it must be an int"),
            (6, 40.0, TypeError, r"max_seqlen_k is 40\.0; it must be an int"),
            (1, torch.ones(1, 85, 2, 16), ValueError, r"k has shape .* be \(T, H, D\)"),
            (4, torch.tensor([0, 9, 14, 54, 85, 85]), ValueError, "cu_seqlens_k has dtype int64"),
            (5, torch.ones(2), TypeError, r"max_seqlen_q is tensor.*; it must be an int"),
            (5, 32, ValueError, "cu_seqlens_q has a sequence of 33 rows and max_seqlen_q is 32"),
        ],
    )
    def test_refuses(self, index, value, error, message):
        packed, _ = make_packed(Q_LENGTHS, KV_LENGTHS)
        with pytest.raises(error, match=message):
            flash_attn_varlen_func(*packed[:index], value, *packed[index + 1 :])


class TestPacked:
    OPTIONS = (0.0, 0.3, True, (7, -1), 2.0, torch.tensor([0.5, 0.25, 0.125, 0.0625]), True, True)

    def same(self, packed, plain):
        for one, other in zip(packed[:2], plain[:2], strict=True):
            assert torch.equal(one.cpu(), other.cpu())

    def options(self, device):
        options = [v.to(device) if torch.is_tensor(v) else v for v in self.OPTIONS]
        # With these the kernels are those of "everything".
        sink = torch.tensor([0.5, -1.0, 2.0, -math.inf]).to(device)
        return options, {"attention_chunk": 5, "learnable_sink": sink}

    def test_dense(self, device):
        qkv, q = normal(2, 33, 3, 4, 16).to(device), normal(2, 9, 8, 16).to(device)
        options, named = self.options(device)
        self.same(
            flash_attn_qkvpacked_func(qkv, *options, **named),
            flash_attn_func(*qkv.unbind(2), *options, **named),
        )
        kv, options[5] = qkv[:, :, 1:], normal(8).to(device)
        named["learnable_sink"] = normal(8).to(device)
        self.same(
            flash_attn_kvpacked_func(q, kv, *options, **named),
            flash_attn_func(q, *kv.unbind(2), *options, **named),
        )

    def test_varlen(self, device):
        qkv, cu_seqlens = normal(33, 3, 4, 16), torch.tensor([0, 12, 12, 33], dtype=torch.int32)
        qkv, cu_seqlens = qkv.to(device), cu_seqlens.to(device)
        options, named = self.options(device)
        packing = cu_seqlens, cu_seqlens, 21, 21
        self.same(
            flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, 21, *options, **named),
            flash_attn_varlen_func(*qkv.unbind(1), *packing, *options, **named),
        )
        q, kv = normal(7, 4, 16, seed=2).to(device), qkv[:, 1:]
        cu_seqlens_q = torch.tensor([0, 2, 3, 7], dtype=torch.int32, device=device)
        packing = cu_seqlens_q, cu_seqlens, 4, 21
        self.same(
            flash_attn_varlen_kvpacked_func(q, kv, *packing, *options, **named),
            flash_attn_varlen_func(q, *kv.unbind(1), *packing, *options, **named),
        )

    def test_passes_views(self):
        qkv = normal(2, 9, 3, 4, 16)
        seen = []

        class Watch(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                if function.namespace == "metal_attn":
                    seen.extend(args[:3])
                return function(*args, **(kwargs or {}))

        with Watch():
            flash_attn_qkvpacked_func(qkv)
            flash_attn_varlen_qkvpacked_func(qkv[0], torch.tensor([0, 9], dtype=torch.int32), 9)
        assert [t.data_ptr() for t in seen] == [qkv[:, :, i].data_ptr() for i in range(3)] * 2

    @pytest.mark.parametrize("shape", [(2, 9, 2, 4, 16), (2, 9, 3, 4), (9, 3, 4, 16)])
    def test_refuses_other_shapes(self, shape):
        with pytest.raises(ValueError, match=r"qkv has shape .* must be \(B, L, 3, H, D\)"):
            flash_attn_qkvpacked_func(normal(*shape))
        with pytest.raises(ValueError, match=r"kv has shape .* must be \(T, 2, Hkv, D\)"):
            flash_attn_varlen_kvpacked_func(None, normal(9, 3, 4, 16), None, None, 1, 1)

    def test_errors_name_the_packed_tensor(self):
        """They name the part of it that the op refuses."""
        qkv, ends = normal(9, 3, 4, 16), torch.tensor([0, 10], dtype=torch.int32)
        with pytest.raises(ValueError, match=r"^cu_seqlens ends at 10 of 9 rows"):
            flash_attn_varlen_qkvpacked_func(qkv, ends, 10)
        with pytest.raises(ValueError, match=r"^qkv\[:, :, 0\] has dtype float64"):
            flash_attn_qkvpacked_func(qkv[None].double())
        q, kv = normal(1, 9, 3, 16), normal(1, 9, 2, 2, 16)
        with pytest.raises(ValueError, match=r"q has 3 heads and kv\[:, :, 0\] 2;"):
            flash_attn_kvpacked_func(q, kv)
        with pytest.raises(ValueError, match=r"q has 3 heads and kv\[:, 0\] 2;"):
            flash_attn_varlen_kvpacked_func(q[0], kv[0], ends - 1, ends - 1, 9, 9)


class TestCompile:
    @pytest.fixture(autouse=True)
    def nothing_compiled(self):
        torch._dynamo.reset()

    @pytest.mark.parametrize(
        "feature, dynamic",
        [("causal left window", False), ("window", True), ("everything", True)],
    )
    def test_dense(self, dynamic, feature):
        options = FEATURES[feature]
        compiled = torch.compile(
            flash_attn_func, fullgraph=True, dynamic=dynamic, backend="aot_eager"
        )
        for length in (9, 12):
            q, k, v = make(2, length, 15)
            out, expected = compiled(q, k, v, **options), flash_attn_func(q, k, v, **options)
            close(out, expected)
            assert out.stride() == expected.stride()

    def test_varlen(self):
        compiled = torch.compile(
            flash_attn_varlen_func, fullgraph=True, dynamic=True, backend="aot_eager"
        )
        for lengths in (Q_LENGTHS, [3, 4, 5, 6, 0]):
            packed, _ = make_packed(lengths, KV_LENGTHS)
            options = {"causal": True, "softcap": 2.0}
            close(compiled(*packed, **options), flash_attn_varlen_func(*packed, **options))

    def test_packed(self):
        compiled = torch.compile(
            flash_attn_qkvpacked_func, fullgraph=True, dynamic=False, backend="aot_eager"
        )
        for length in (9, 12):
            qkv = normal(2, length, 3, 4, 16)
            close(compiled(qkv, causal=True), flash_attn_qkvpacked_func(qkv, causal=True))


class TestOptions:
    """What torch_metal_attn/call/options.py describes once."""

    FUNCTIONS = (
        flash_attn_func,
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
        flash_attn_with_kvcache,
    )

    @pytest.mark.parametrize("function", FUNCTIONS)
    def test_each_function_shows_them_with_the_ops_defaults(self, function):
        shown = inspect.signature(function).parameters
        arguments = torch.ops.metal_attn.flash_fwd.default._schema.arguments
        defaults = {argument.name: argument.default_value for argument in arguments}
        for name in ScoreOptions.__annotations__:
            assert shown[name].default == defaults[name]

    def test_others_are_refused(self):
        q = normal(1, 3, 2, 8)
        for function in (flash_attn_func, flash_attn_with_kvcache):
            with pytest.raises(TypeError, match="no argument 'logit_bias'"):
                function(q, q, q, logit_bias=1.0)
        with pytest.raises(TypeError, match="no argument 'logit_bias'"):
            flash_attn_qkvpacked_func(normal(1, 3, 3, 2, 8), logit_bias=1.0)
