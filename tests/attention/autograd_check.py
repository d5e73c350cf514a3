"""Shared by the tests of gradients: problems, options, the oracle's gradients and the judge."""

import math

import torch

from torch_metal_attn.reference import attention
from torch_metal_attn.testing.judge import ints, normal


def make_qkv(batch=2, heads=4, kv_heads=2, q_length=9, kv_length=13, head_dim=16, v_head_dim=8):
    return (
        normal(batch, q_length, heads, head_dim).transpose(1, 2),
        normal(batch, kv_heads, kv_length, head_dim, seed=1),
        normal(batch, kv_heads, kv_length, v_head_dim, seed=2),
    )


def make_packed():
    """q, k, v of 20 and 25 tokens, the last of which belong to no sequence, and their packing."""
    lengths = (5, 0, 9, 3), (7, 4, 0, 12)
    bounds = [torch.tensor([0, *each]).cumsum(0).int() for each in lengths]
    qkv = normal(20, 4, 16), normal(25, 2, 16, seed=1), normal(25, 2, 8, seed=2)
    return qkv, (*bounds, 9, 12)


def make_leaves(tensors, dtype=None, device=None):
    return [x.detach().to(device=device, dtype=dtype, copy=True).requires_grad_() for x in tensors]


def loss_of(out, lse):
    """Its gradients differ for each element; rows without keys or sink have no lse."""
    lse = lse.masked_fill(lse == -math.inf, 0.0)
    weight = torch.arange(out.numel()).cos().view(out.shape).to(out)
    return (out * weight).sum() + lse.sin().sum()


def gradients(function, tensors, *arguments, **options):
    leaves = make_leaves(tensors)
    return torch.autograd.grad(loss_of(*function(*leaves, *arguments, **options)), leaves)


def expected_gradients(tensors, **options):
    """Through the oracle, in float64; the tensors' dtype does not round."""
    tensors = [x.double() for x in tensors]
    return gradients(attention, tensors, **options, compute_dtype=torch.float64)


def check(actual, expected, tolerance=2e-5):
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape
        scale = max(other.abs().max().item(), 1e-3) if other.numel() else 1.0
        torch.testing.assert_close(
            one.detach().cpu().double(),
            other.detach().cpu().double(),
            rtol=0.0,
            atol=tolerance * scale,
        )


def tables(rows, columns, batch=None, seed=7, factor=1.3):
    """cos and sin of random angles, times a factor, as in YaRN."""
    shape = (rows, columns) if batch is None else (batch, rows, columns)
    angles = normal(*shape, seed=seed)
    return factor * angles.cos(), factor * angles.sin()


def rotary(q_tables=None, k_tables=None, interleaved=False):
    options = {"rotary_interleaved": interleaved}
    for side, pair in (("q", q_tables), ("k", k_tables)):
        if pair is not None:
            options[f"{side}_rotary_cos"], options[f"{side}_rotary_sin"] = pair
    return options


ROTARY = rotary(tables(11, 6), tables(13, 6, seed=8))
# A sequence with a part of its keys, and one without keys.
LENGTHS = {"seqused_k": ints(13, 4), "leftpad_k": ints(2, 4), "causal": True}
# Options for make_packed's sequences, with a table each.
PACKED = {"seqused_k": ints(3, 0, 0, 12), "causal": True} | rotary(
    tables(10, 8, batch=4), (tables(12, 8, batch=4)[0], tables(13, 8)[1]), interleaved=True
)
