"""The private functions of flash_attn_interface that other packages import."""

import pytest
import torch

from torch_metal_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from torch_metal_attn.flash_attn import flash_attn_interface as interface
from torch_metal_attn.testing.judge import normal

GPU = interface.flash_attn_gpu
SCALE = 0.3
ENDS = torch.tensor([0, 3, 3, 12], dtype=torch.int32)


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("packed", [False, True])
def test_forward_and_backward(packed, dropout_p):
    """Ring attention makes such calls. Results and gradients are those of the public function."""
    lead = (12,) if packed else (2, 7)
    q, dout = normal(*lead, 4, 16), normal(*lead, 4, 16, seed=3)
    k, v = normal(*lead, 2, 16, seed=1), normal(*lead, 2, 16, seed=2)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    packing = (ENDS, ENDS, 9, 9) if packed else ()
    public = flash_attn_varlen_func if packed else flash_attn_func
    torch.manual_seed(0)
    options = {"causal": True, "window_size": (4, -1), "softcap": 2.0, "return_attn_probs": True}
    out, lse, weights = public(*leaves, *packing, dropout_p, SCALE, **options)
    gradients = torch.autograd.grad(out, leaves, dout)

    name = "_varlen_" if packed else "_"
    features = (dropout_p, SCALE, True, 4, -1, 2.0, None)
    torch.manual_seed(0)
    forward = getattr(interface, f"_flash_attn{name}forward")
    actual, actual_lse, pattern, rng_state = forward(q, k, v, *packing, *features, True)
    assert torch.equal(actual, out)
    assert torch.equal(actual_lse, lse)
    assert pattern.shape == (0,) if weights is None else torch.equal(pattern, weights)
    assert (rng_state.shape, rng_state.dtype) == ((2,), torch.int64)

    into = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    backward = getattr(interface, f"_flash_attn{name}backward")
    options = (*features, False, *([rng_state] if dropout_p else []))
    softmax_d = backward(dout, q, k, v, actual, actual_lse, *into, *packing, *options)
    for mine, theirs in zip(into, gradients, strict=True):
        torch.testing.assert_close(mine, theirs)
    expected = (dout * out.detach()).sum(-1)
    expected = expected.T if packed else expected.transpose(1, 2)
    torch.testing.assert_close(softmax_d, expected)


def test_caches_equal_the_public_functions():
    q, cache = normal(2, 1, 4, 16), normal(2, 8, 2, 16, seed=1)
    new, used = normal(2, 1, 2, 16, seed=2), torch.tensor([3, 5]).int()
    caches = [cache.clone() for _ in range(4)]
    options = (None, SCALE, True, -1, -1, 0.0, False, 0)
    out, lse = GPU.fwd_kvcache(q, *caches[:2], new, new, used, *[None] * 6, *options)
    expected = flash_attn_with_kvcache(
        q, *caches[2:], new, new, cache_seqlens=used, softmax_scale=SCALE, causal=True
    )
    assert torch.equal(out, expected)
    assert torch.equal(caches[0], caches[2])
    assert lse.shape == (2, 4, 1)

    pages, table = cache.flip(0), torch.tensor([[1], [0]]).int()
    ends = torch.tensor([0, 1, 2]).int(), torch.tensor([0, 8, 16]).int()
    paged, *_ = interface._flash_attn_varlen_forward(
        *(q[:, 0], pages, pages, *ends, 1, 8, 0.0, SCALE, False),
        block_table=table,
        leftpad_k=torch.tensor([2, 0]).int(),
        seqused_k=torch.tensor([8, 5]).int(),
        num_splits=1,
    )
    for b, keys in enumerate((slice(2, 8), slice(0, 5))):
        one = cache[b : b + 1, keys]
        alone = flash_attn_func(q[b : b + 1], one, one, softmax_scale=SCALE)
        torch.testing.assert_close(paged[b], alone[0, 0])


def test_unsupported_arguments_are_refused():
    q = normal(1, 5, 2, 16)
    features = (None, 0.0, SCALE, False, -1, -1, 0.0, False)
    with pytest.raises(NotImplementedError, match=r"out is a .* tensor .*; it must be None"):
        GPU.fwd(q, q, q, q, *features, None)
    with pytest.raises(NotImplementedError, match="gen is a Generator; it must be None"):
        GPU.fwd(q, q, q, None, *features, torch.Generator())
    packed = *[normal(12, 2, 16)] * 3, ENDS, ENDS, 9, 9
    with pytest.raises(RuntimeError, match="num_splits > 1 is not supported"):
        interface._flash_attn_varlen_forward(*packed, 0.0, SCALE, False, num_splits=2)
    out, lse, *_ = GPU.fwd(q, q, q, None, *features, None)
    options = (SCALE, False, -1, -1, 0.0, None, False)
    with pytest.raises(ValueError, match=r"rng_state is None and p_dropout 0\.5"):
        interface._flash_attn_backward(q, q, q, q, out, lse, None, None, None, 0.5, *options)
    small = q[:, :1].clone()
    with pytest.raises(ValueError, match=r"dk has shape \(1, 1, 2, 16\); it must be \(1, 5, 2, 16"):
        interface._flash_attn_backward(q, q, q, q, out, lse, None, small, None, 0.0, *options)
    assert torch.equal(small, q[:, :1])
