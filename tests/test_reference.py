"""The oracle itself, against formulas written out naively and torch's own attention."""

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

from torch_metal_attn import reference
from torch_metal_attn.reference import attention


def normal(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def naive(q, k, v, scale, causal_offset=None, mask=None):
    """One query at a time, as in the papers; Python floats for the row statistics."""
    batch, heads, q_length, _ = q.shape
    group = heads // k.shape[1]
    out = torch.zeros(batch, heads, q_length, v.shape[-1], dtype=torch.float64)
    lse = torch.full((batch, heads, q_length), -math.inf, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for i in range(q_length):
                scores = {}
                for j in range(k.shape[2]):
                    seen = causal_offset is None or j <= i + causal_offset
                    score = scale * float(q[b, h, i] @ k[b, h // group, j])
                    if mask is not None:
                        seen = seen and (mask.dtype != torch.bool or bool(mask[b, h, i, j]))
                        score += 0.0 if mask.dtype == torch.bool else float(mask[b, h, i, j])
                    if seen:
                        scores[j] = score
                if scores:
                    total = math.fsum(math.exp(score) for score in scores.values())
                    lse[b, h, i] = math.log(total)
                    for j, score in scores.items():
                        out[b, h, i] += math.exp(score) / total * v[b, h // group, j]
    return out, lse


@pytest.mark.parametrize("causal_offset", [None, 0, 2, -2, -9, 9, 2**63 - 1, -(2**63)])
def test_equals_the_formula(causal_offset):
    q, k, v = normal(2, 4, 5, 8), normal(2, 2, 7, 8, seed=1), normal(2, 2, 7, 3, seed=2)
    out, lse = attention(q, k, v, softmax_scale=0.3, causal_offset=causal_offset)
    expected, expected_lse = naive(q, k, v, 0.3, causal_offset)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64])
def test_masks(dtype):
    q, k, v = normal(2, 4, 5, 8), normal(2, 2, 7, 8, seed=1), normal(2, 2, 7, 8, seed=2)
    mask = normal(2, 1, 5, 7, seed=3)
    mask = mask > 0 if dtype == torch.bool else mask
    out, lse = attention(q, k, v, softmax_scale=0.3, causal_offset=1, mask=mask)
    expected, expected_lse = naive(q, k, v, 0.3, 1, mask.expand(2, 4, 5, 7))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_default_scale_is_that_of_the_query_dim():
    q, k, v = normal(1, 1, 3, 16), normal(1, 1, 4, 16, seed=1), normal(1, 1, 4, 4, seed=2)
    torch.testing.assert_close(attention(q, k, v)[0], torch_sdpa(q, k, v))
    assert not torch.allclose(attention(q, k, v, softmax_scale=0.5)[0], torch_sdpa(q, k, v))


@pytest.mark.parametrize("causal_offset", [None, 30, -20])
@pytest.mark.parametrize("masked", [False, True])
def test_blocks_change_nothing(monkeypatch, causal_offset, masked):
    q, k, v = normal(1, 4, 67, 8), normal(1, 2, 97, 8, seed=1), normal(1, 2, 97, 8, seed=2)
    mask = normal(1, 1, 67, 97, seed=3) > 0 if masked else None
    whole = attention(q, k, v, causal_offset=causal_offset, mask=mask)
    monkeypatch.setattr(reference, "_SCORES_PER_BLOCK", 4 * 97 * 10)
    blocks = attention(q, k, v, causal_offset=causal_offset, mask=mask)
    torch.testing.assert_close(blocks[0], whole[0])
    torch.testing.assert_close(blocks[1], whole[1])


def test_long_sequences_need_little_memory():
    """All scores at once would take 17 GB; `view` of a block that large would be seen here."""
    largest = 0

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.untyped_storage().nbytes())
            return result

    q, k, v = normal(1, 1, 192, 8, dtype=torch.float32), *normal(2, 1, 1, 2**18, 8).float()
    with Watch():
        out, _ = attention(q, k, v)
    assert largest <= 2**26
    torch.testing.assert_close(out, torch_sdpa(q, k, v), rtol=1e-4, atol=1e-5)


def test_rows_without_keys():
    q, k, v = normal(1, 2, 4, 8), normal(1, 2, 3, 8, seed=1), normal(1, 2, 3, 8, seed=2)
    out, lse = attention(q, k, v, causal_offset=-2)
    assert (out[:, :, :2] == 0).all()
    assert (lse[:, :, :2] == -math.inf).all()
    assert (out[:, :, 2:] != 0).all()
    out, lse = attention(q, k[:, :, :0], v[:, :, :0])
    assert out.shape == (1, 2, 4, 8)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    assert attention(q[:, :, :0], k, v)[0].shape == (1, 2, 0, 8)
    assert attention(q[:0], k[:0], v[:0])[1].shape == (0, 2, 4)
    assert attention(q[:, :0], k, v)[0].shape == (1, 0, 4, 8)
    assert attention(q[:, :0], k[:, :0], v[:, :0])[0].shape == (1, 0, 4, 8)


def test_nan_stays_nan():
    q, k, v = normal(1, 1, 3, 8), normal(1, 1, 3, 8, seed=1), normal(1, 1, 3, 8, seed=2)
    q[0, 0, 1, 0] = math.nan
    out, lse = attention(q, k, v, causal_offset=0)
    assert out.isnan().any(-1).tolist() == [[[False, True, False]]]
    assert lse.isnan().tolist() == [[[False, True, False]]]
    q = normal(1, 1, 3, 8)
    k[0, 0, 1, 0] = math.nan
    assert attention(q, k, v, causal_offset=0)[1].isnan().tolist() == [[[False, True, True]]]


def test_dtypes():
    q, k, v = (normal(1, 2, 9, 16, seed=s).half() for s in range(3))
    out, lse = attention(q, k, v)
    assert (out.dtype, lse.dtype) == (torch.float16, torch.float32)
    exact, exact_lse = attention(q, k, v, compute_dtype=torch.float64)
    assert (exact.dtype, exact_lse.dtype) == (torch.float64, torch.float64)
    torch.testing.assert_close(exact, torch_sdpa(q.double(), k.double(), v.double()))
    # Computed in float32 and rounded once.
    torch.testing.assert_close(out, exact.half(), rtol=2**-10, atol=2**-14)


def test_refusals():
    q, k = normal(1, 4, 3, 8), normal(1, 3, 3, 8)
    with pytest.raises(ValueError, match="4 heads"):
        attention(q, k, k)
    with pytest.raises(TypeError, match=r"torch\.int64"):
        attention(q, q, q, mask=torch.ones(3, 3, dtype=torch.int64))
