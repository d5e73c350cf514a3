"""Decoding with trees of new tokens, as speculation drafts them."""

import pytest
import torch

from tests.decode import tree_problems as problems
from torch_metal_attn import simulate


@pytest.mark.parametrize("problem", problems.PROBLEMS, ids=lambda problem: problem.__name__)
def test_tree(problem):
    with simulate(check=True):
        problem()
