"""Counts of the inner loop of flash_fwd."""

import torch

from bench.inner_loop import InnerLoop, measure
from torch_metal_attn import simulate
from torch_metal_attn.simulator import Counters


def ours(head_dim: int, dtype: torch.dtype) -> InnerLoop:
    """Counts of the specialisation that the op chooses for full attention."""
    row_fragments = 0

    def run(kv_length: int) -> Counters:
        nonlocal row_fragments
        q = torch.randn(1, 1, 64, head_dim).to(dtype)
        k = torch.randn(1, 1, kv_length, head_dim).to(dtype)
        with simulate(count=True) as session:
            torch.ops.metal_attn.flash_fwd(q, k, k)
        row_fragments = int(session.launches[0].defines["ROW_FRAGMENTS"])
        return session.counters["flash_fwd"]

    run(8)
    return measure(run, 8 * row_fragments)
