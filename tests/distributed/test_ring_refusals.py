"""What ring_attention refuses, it refuses on every process: none waits for another."""

import re

import pytest
import torch

from tests.distributed import refusals
from torch_metal_attn.distributed import ring_attention


@pytest.mark.parametrize("message", refusals.REFUSED)
def test_every_process_raises(message, processes):
    for rank, found in enumerate(processes):
        told = found["refused"][message]
        assert re.search(message, told)
        if rank != 1 and message in refusals.ON_RANK_1:
            assert f"{refusals.ON_RANK_1[message]} was refused on rank 1: " in told


def test_groups(processes):
    for rank, found in enumerate(processes):
        errors, out = found["groups"]
        assert "mesh with 2 dimensions" in errors["mesh"]
        assert ("pair" in errors) == (rank > 1)
        assert torch.equal(out, torch.ones(1, 2, 2, 16))  # of a mesh with one dimension
        if rank > 1:
            assert "group does not contain this process" in errors["pair"]


def test_without_a_process_group():
    with pytest.raises(ValueError, match=r"torch\.distributed has no process group"):
        ring_attention(*refusals.qkv())
