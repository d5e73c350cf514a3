"""Tensors of flash_fwd's options."""

import math

import torch

from torch_metal_attn.testing.judge import ints

__all__ = ["ints", "random_mask", "rotary_tables"]


def rotary_tables(length, pairs, *, batch=None, dtype=torch.float32, seed=0):
    """cos and sin of random angles: (length, pairs), or (batch, length, pairs)."""
    shape = (length, pairs) if batch is None else (batch, length, pairs)
    angles = 6.3 * torch.rand(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return angles.cos().to(dtype), angles.sin().to(dtype)


def random_mask(*shape, dtype=torch.bool, seed=3, hidden=0.4):
    """Bool, or additive with -inf where the bool one would be False."""
    generator = torch.Generator().manual_seed(seed)
    visible = torch.rand(shape, generator=generator) >= hidden
    if dtype == torch.bool:
        return visible
    return torch.randn(shape, generator=generator).to(dtype).masked_fill(~visible, -math.inf)
