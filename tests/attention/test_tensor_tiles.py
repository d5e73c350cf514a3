"""flash_fwd on tensor tiles: every feature in half precision, on the matrix units of M5."""

from functools import partial

import pytest
import torch

from tests.attention import flash_fwd_problems as problems
from torch_metal_attn import simulate

F16, BF16 = torch.float16, torch.bfloat16

PROBLEMS = [
    *(problems.windows, problems.chunks, problems.lengths, problems.masks, problems.biases),
    *(problems.softcap, problems.slices_of_v, problems.odd_head_dims, problems.packed),
    *(problems.pages, problems.indices, problems.formats),
    partial(problems.alibi, dtype=BF16),
    partial(problems.sinks, dtype=BF16),
    partial(problems.rotary, dtype=F16),
    partial(problems.pages_of_packed, dtype=BF16),
]


@pytest.fixture
def simulated(gpu):
    """An M5 in the simulator: what ran there."""
    gpu("Apple M5")
    with simulate(check=True) as run:
        yield run


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: getattr(p, "func", p).__name__)
def test_feature(problem, simulated):
    problem(torch.device("cpu"))
    assert set(simulated.counters) == {"flash_fwd_tensor"}
