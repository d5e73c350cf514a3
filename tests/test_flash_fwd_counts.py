"""The inner loop of flash_fwd does no more than it was designed to: counts, not times."""

import pytest
import torch

from bench.bench_flash_fwd import ours

# Loads of either address space, converts and barriers at most; matrix operations exactly.
LIMITS = {64: (34, 0, 2, 64), 128: (68, 0, 2, 128)}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", LIMITS)
def test_inner_loop(head_dim, dtype):
    loads, converts, barriers, matrix_operations = LIMITS[head_dim]
    loop = ours(head_dim, dtype)
    assert loop.matrix_operations == matrix_operations
    assert loop.loads <= loads
    assert loop.converts <= converts
    assert loop.barriers <= barriers
    assert loop.shuffles <= 2
    assert loop.exps <= 9


def test_a_block_past_the_diagonal_costs_nothing():
    """With causal attention, the work of a tile ends at its diagonal."""
    q = torch.randn(1, 1, 64, 64).half()
    k = torch.randn(1, 1, 1024, 64).half()
    from torch_metal_attn import simulate

    def operations(kv_length):
        with simulate(count=True) as run:
            torch.ops.metal_attn.flash_fwd(
                q, k[:, :, :kv_length], k[:, :, :kv_length], causal=True, q_offset=0
            )
        return run.counters["flash_fwd"].matrix_operations

    assert operations(64) == operations(1024)
