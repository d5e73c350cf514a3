"""Checks that scaled_dot_product_attention has at most twice torch's error in the same dtype."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

import torch_metal_attn
from torch_metal_attn import scaled_dot_product_attention as sdpa
from torch_metal_attn.integrations import sdpa_replacement as replacement
from torch_metal_attn.testing.judge import near, normal, worst_of


def check(q, k, v, attn_mask=None, device="cpu", attend=sdpa, **options):
    """Runs `attend` on `device` and checks it against float64, within twice torch's error."""
    mask = attn_mask if attn_mask is None else to_device(attn_mask, device)
    out = attend(*(x.to(device) for x in (q, k, v)), mask, **options).cpu()
    additive = attn_mask is not None and attn_mask.dtype != torch.bool
    exact_mask = attn_mask.double() if additive else attn_mask
    with sdpa_kernel(SDPBackend.MATH):
        oracle = torch_sdpa(q.double(), k.double(), v.double(), exact_mask, **options)
        low = torch_sdpa(q, k, v, attn_mask, **options)
    assert out.dtype == q.dtype
    assert out.shape == oracle.shape
    measure = near("out", out, oracle, worst_of([(low, oracle)]))
    assert measure.ok, measure
    return out


class Graphs:
    """A backend of torch.compile that counts the calls of our kernel in each graph."""

    def __init__(self):
        self.calls = []

    def __call__(self, graph, inputs):
        self.calls.append(sum("flash_fwd" in str(node.target) for node in graph.graph.nodes))
        return graph.forward


def close(actual, expected):
    torch.testing.assert_close(actual.cpu(), expected.cpu(), rtol=1e-5, atol=1e-5)


def to_device(tensor, device):
    if tensor.device == torch.device(device):
        return tensor
    base = tensor.as_strided((tensor.untyped_storage().size() // tensor.element_size(),), (1,), 0)
    return base.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


simulate = functools.partial(torch_metal_attn.simulate, check=True)
BUILTIN = [torch._C._nn.scaled_dot_product_attention]  # blocks do not replace functions in lists
OUTSIDE = "CPU tensors run the kernels only inside torch_metal_attn.simulate()"
LEFT_TO_TORCH = "leaves calls of scaled_dot_product_attention to torch"
NO_CALL = "replaced no call of scaled_dot_product_attention"
SCALE = "scale is 1e+39; its product with log2(e) must be finite in float32"


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
