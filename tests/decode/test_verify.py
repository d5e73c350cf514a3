"""Decoding of sequences that differ in their number of queries, as speculation has them."""

import pytest
import torch

from tests.attention.held_cases import case, hold
from tests.decode import flash_decode_problems as problems
from tests.helpers.steps import step
from torch_metal_attn import simulate

ops = torch.ops.metal_attn


def test_packed_alone():
    """The unchanged kernels of test_flash_decode_mutants.py pass the other problems."""
    with simulate(check=True):
        problems.packed_alone()


def test_many_rows_of_a_kv_head(device):
    lengths = {"q_lengths": (1, 64, 16, 4), "seqused_k": (70, 64, 100, 9), "kv_length": 100}
    many = {"call": "flash_decode", "batch": 4, "q_length": 1, "heads": 8, "kv_heads": 1}
    hold([case(**many, **lengths, head_dim=64, causal=True, num_splits=2)], device)


def test_steps_on_quantised_caches(device):
    """New rows of another number than the queries, in a format of keys and one of values."""
    made = step(
        packed=((3, 3), (0, 2), (5, 5), (1, 4)),
        lengths=(13, 20, 2, 9),
        cache="paged",
        format="q4_0",
        v_format="fp8_e4m3",
        rotary_columns=32,
        causal=True,
    )
    hold([made], device)


def test_with_kvcache(device):
    """flash-attn's function, with new rows and without."""
    function = {"call": "flash_attn_with_kvcache", "causal": True}
    new = step(packed=((3, 3), (0, 0), (5, 4)), lengths=(20, 6, 33), **function)
    sizes = {"batch": 3, "heads": 4, "kv_heads": 2, "head_dim": 64, "kv_length": 33}
    lengths = {"q_length": 1, "q_lengths": (3, 0, 5), "seqused_k": (20, 6, 33)}
    hold([new, case(**lengths, **sizes, **function)], device)


def test_lists_of_packed_queries_have_no_gradient():
    arguments, options = problems.packed_q((3, 4), (60, 70), spare=0)
    leaves = [x.nan_to_num(0).requires_grad_() for x in arguments]
    out, _ = ops.flash_decode(*leaves, **options, indices=torch.zeros(1, 1, 7, 2).int())
    with pytest.raises(NotImplementedError, match="indices a batch without cu_seqlens_q"):
        out.sum().backward()
