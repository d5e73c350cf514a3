"""What the tests of sdpa_replaced() share."""

import functools

import pytest
import torch
import torch.nn.functional as F

import torch_metal_attn
from tests.sdpa.sdpa_check import close, normal  # noqa: F401
from torch_metal_attn.integrations import sdpa_replacement as replacement

# Checked, as the other tests of attention are: their kernels are the same.
simulate = functools.partial(torch_metal_attn.simulate, check=True)
BUILTIN = [torch._C._nn.scaled_dot_product_attention]  # a list, which process_wide does not reach
OUTSIDE = "CPU tensors run the kernels only inside torch_metal_attn.simulate()"
LEAVES = "leaves calls of scaled_dot_product_attention to torch"
NO_CALL = "replaced no call of scaled_dot_product_attention"
SCALE = "scale is 1e+39; it must be finite in float32"


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    blocks = replacement._blocks
    monkeypatch.setattr(blocks, "warned", set())
    monkeypatch.setattr(blocks, "compiled", False)
    yield
    assert F.scaled_dot_product_attention is BUILTIN[0]
    assert (blocks.open, blocks.process_wide, blocks.in_every_thread) == (0, (), False)
    assert blocks.renaming is None
    assert not blocks.this_thread.entered
    assert not blocks.this_thread.deciding
    for owner, name, _ in replacement._REPLACED:
        assert not hasattr(getattr(owner, name), "__wrapped__")
    assert torch._C._len_torch_function_stack() == 0


def qkv():
    return normal(2, 4, 9, 8), normal(2, 4, 11, 8, seed=1), normal(2, 4, 11, 8, seed=2)
