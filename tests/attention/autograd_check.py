"""Shared by the tests of gradients: problems, leaves and a loss."""

import math

import torch

from torch_metal_attn.testing.judge import normal


def make_qkv(batch=2, heads=4, kv_heads=2, q_length=9, kv_length=13, head_dim=16, v_head_dim=8):
    return (
        normal(batch, q_length, heads, head_dim).transpose(1, 2),
        normal(batch, kv_heads, kv_length, head_dim, seed=1),
        normal(batch, kv_heads, kv_length, v_head_dim, seed=2),
    )


def make_leaves(tensors, dtype=None):
    return [x.detach().to(dtype, copy=True).requires_grad_() for x in tensors]


def loss_of(out, lse):
    """A loss whose gradients differ by element. It ignores the lse of rows without keys."""
    lse = lse.masked_fill(lse == -math.inf, 0.0)
    weight = torch.arange(out.numel()).cos().view(out.shape).to(out)
    return (out * weight).sum() + lse.sin().sum()
