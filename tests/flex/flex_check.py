"""Checks flex_attention against torch's in float64, within twice torch's error."""

import contextlib
import math

import torch
from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention.flex_attention import _create_empty_block_mask, _identity, create_block_mask

import torch_metal_attn
from tests.attention.autograd_check import loss_of, make_leaves
from tests.attention.flash_fwd_check import make_qkv
from torch_metal_attn import simulate
from torch_metal_attn.testing.judge import near, worst_of

# The sizes and the dtype of most tests of this folder, so that they share kernels.
SHAPE = {"heads": 2, "q_length": 80, "kv_length": 96, "head_dim": 16, "dtype": torch.float16}


def rand(**options):
    return make_qkv(**SHAPE | options)


SIZES = 80, 96
BLOCK = (16, 32)  # for tests that do not check block sizes
SLOPES = torch.tensor([0.5, 0.0625])


def alibi_of_slopes(score, b, h, q_idx, kv_idx):
    return score - (q_idx - kv_idx).abs() * SLOPES[h]


def tanh_softcap(score, b, h, q_idx, kv_idx):
    return 2 * torch.tanh(score / 2)


def full(b, h, q_idx, kv_idx):
    return b.new_ones(size=(), dtype=torch.bool, device=b.device)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def sliding_window_causal(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx <= 20)


def block_mask(mod=causal, batch=None, heads=None, sizes=SIZES, block=BLOCK, **options):
    return create_block_mask(mod, batch, heads, *sizes, device="cpu", BLOCK_SIZE=block, **options)


def contradictory(mask, mask_mod):
    """The BlockMask with this mask_mod, which hides what full blocks show."""
    assert mask.full_kv_num_blocks.sum() > 0
    mask.mask_mod = mask_mod
    return mask


def torch_flex(query, key, value, score_mod=None, block_mask=None, scale=None):
    """torch's flex_attention on CPU tensors, with gradients."""
    if block_mask is None:
        block_mask = _create_empty_block_mask(query, key)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    lists = block_mask.as_tuple()
    out, lse, _ = math_attention(query, key, value, score_mod or _identity, lists, scale, {})
    return out, lse * math.log(2)


def assert_within_twice(actual, exact, rounded):
    """`actual` has at most twice the error of `rounded`, torch's result in the same dtype."""
    assert actual.dtype == rounded.dtype
    measure = near("the result", actual, exact, worst_of([(rounded, exact)]))
    assert measure.ok, measure


def check_results(out, lse, exact, exact_lse, rounded):
    assert_within_twice(out, exact, rounded)
    assert (out[exact_lse == -math.inf] == 0).all()
    torch.testing.assert_close(lse.double(), exact_lse.double(), rtol=1e-5, atol=1e-5)


def check_flex(
    query, key, value, score_mod=None, block_mask=None, simulated=True, ours=None, **options
):
    """Checks the forward, in the simulator or on the CPU kernels, and returns out and lse.

    ours: score_mod and block_mask of our flex_attention, if they differ from torch's.
    """
    mods, scale = (score_mod, block_mask), options.get("scale")
    exact, exact_lse = torch_flex(query.double(), key.double(), value.double(), *mods, scale)
    rounded, _ = torch_flex(query, key, value, *mods, scale)
    options |= {"return_lse": True, "enable_gqa": query.shape[1] != key.shape[1]}
    with simulate(check=True) if simulated else contextlib.nullcontext():
        out, lse = torch_metal_attn.flex_attention(query, key, value, *(ours or mods), **options)
    check_results(out, lse, exact, exact_lse, rounded)
    return out, lse


def gradients(function, qkv, mod, mask, dtype, captured=(), captured_dtype=None, **options):
    """out, lse and gradients. With captured tensors, `mod` returns a score_mod that uses them."""
    leaves = make_leaves(qkv, dtype)
    captured = [make_leaves([x], captured_dtype or x.dtype)[0] for x in captured]
    out, lse = function(*leaves, mod(*captured) if captured else mod, mask, **options)
    return out.detach(), lse.detach(), *torch.autograd.grad(loss_of(out, lse), (*leaves, *captured))


def check_flex_gradients(
    query, key, value, score_mod=None, block_mask=None, simulated=True, ours=None, captured=()
):
    """Checks results and gradients, and returns the gradients. `ours` is as in check_flex."""
    qkv, mods = (query, key, value), (score_mod, block_mask)
    exact = gradients(torch_flex, qkv, *mods, torch.float64, captured, torch.float64)
    rounded = gradients(torch_flex, qkv, *mods, query.dtype, captured)
    options = {"return_lse": True, "enable_gqa": query.shape[1] != key.shape[1]}
    with simulate(check=True) if simulated else contextlib.nullcontext():
        function = torch_metal_attn.flex_attention
        actual = gradients(function, qkv, *(ours or mods), query.dtype, captured, **options)
    if not captured:  # the dtype of a captured tensor rounds score_mod's result
        check_results(*actual[:2], *exact[:2], rounded[0])
    for gradient, exact_one, by_torch in zip(actual[2:], exact[2:], rounded[2:], strict=True):
        if by_torch.dtype == torch.float64:  # kernels compute float64 gradients in float32
            assert gradient.dtype == torch.float64
            gradient, by_torch = gradient.float(), by_torch.float()
        assert_within_twice(gradient, exact_one, by_torch)
    return actual[2:]
