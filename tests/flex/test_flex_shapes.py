"""dtypes, head dims, empty problems, autocast, and how often a mod is compiled."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from tests.flex import gallery
from tests.flex.flex_check import check_flex, check_flex_gradients, home
from torch_metal_attn import flex_attention, simulate


def causal_mask(q_length=80, kv_length=96):
    return create_block_mask(
        gallery.causal, None, None, q_length, kv_length, device="cpu", BLOCK_SIZE=(32, 32)
    )


@pytest.mark.parametrize(
    "dtype, head_dim, v_head_dim", [(torch.float32, 65, 33), (torch.bfloat16, 128, 64)]
)
def test_dtypes_and_head_dims(dtype, head_dim, v_head_dim):
    qkv = home(dtype=dtype, head_dim=head_dim, v_head_dim=v_head_dim)
    check_flex(*qkv, gallery.tanh_softcap, causal_mask())
    check_flex_gradients(*qkv, gallery.tanh_softcap, causal_mask())


def test_scale_and_strides():
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in home())
    out, _ = check_flex(q, k, v, gallery.tanh_softcap, scale=0.3)
    assert out.stride() == q.stride()


@pytest.mark.parametrize("sizes", [{"q_length": 0}, {"kv_length": 0}, {"batch": 0}, {"heads": 0}])
@pytest.mark.parametrize("listed", [True, False])
def test_empty(sizes, listed):
    qkv = [x.requires_grad_() for x in home(**sizes)]
    mask = causal_mask(qkv[0].shape[2], qkv[1].shape[2]) if listed else None
    with simulate(check=True):
        out, lse = flex_attention(*qkv, block_mask=mask, return_lse=True)
        gradients = torch.autograd.grad(out.sum(), qkv)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    assert all((x == 0).all() for x in gradients)


def test_autocast():
    with simulate(), torch.autocast("cpu", torch.bfloat16):
        out = flex_attention(*home(dtype=torch.float32, head_dim=128))
    assert out.dtype == torch.bfloat16


def test_a_text_is_compiled_once():
    """The same mod of other tensors and sizes is the same specialisation; another number is not."""

    def attend(slopes, factor, q_length):
        def mod(score, b, h, q_idx, kv_idx):
            return score * factor + slopes[h] * (q_idx - kv_idx)

        with simulate(record=True) as run:
            flex_attention(*home(q_length=q_length), mod)
        return run.recorded[0].defines

    first = attend(torch.ones(2), 2.0, 80)
    assert attend(torch.zeros(7, 2).T[1], 2.0, 33) == first
    assert attend(torch.ones(2), 3.0, 80) != first


def test_second_derivatives_raise():
    q, k, v = (x.requires_grad_() for x in home())
    with simulate():
        out = flex_attention(q, k, v, gallery.tanh_softcap)
        (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        with pytest.raises(NotImplementedError, match="second derivative"):
            dq.sum().backward()
