"""Gradients of listed keys. Their memory is linear in the lists."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.attention.flash_fwd_check import make_qkv
from tests.attention.held_cases import case, hold
from tests.decode.flash_decode_problems import packed_q
from torch_metal_attn.ops import listed_bwd


@pytest.mark.parametrize("gathered", [1, 2**13, 2**24])
def test_any_number_of_keys_is_gathered_at_once(gathered, monkeypatch):
    """The last list has fewer queries, and keys outside the lengths are NaN."""
    monkeypatch.setattr(listed_bwd, "GATHERED", gathered)
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "q_length": 17, "kv_length": 50}
    lists = {"listed": 4, "list_dims": "bh", "kv_block_size": 5, "q_block_size": 3}
    options = {"causal": True, "window_size_left": 40, "softcap": 2.0, "dtype": "float32"}
    used = {"seqused_k": (50, 33), "leftpad_k": (0, 2)}
    listed_case = case(call="flash_decode", **sizes, **lists, **options, **used)
    hold([listed_case], torch.device("cpu"))


def test_memory_is_linear():
    length, listed, columns = 256, 4, 8
    q, k, v = make_qkv(1, heads=1, kv_heads=1, q_length=length, kv_length=length, head_dim=columns)
    entries = torch.randint(length, (1, 1, length, listed)).int()
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            results = function(*arguments, **(options or {}))
            sizes.extend(x.numel() for x in tree_leaves(results) if isinstance(x, torch.Tensor))
            return results

    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, _ = torch.ops.metal_attn.flash_decode(*leaves, indices=entries)
    with Sizes():
        torch.autograd.grad(out.sum(), leaves)
    assert max(sizes) <= length * listed * columns < length * length


@pytest.mark.parametrize(
    "batch, lists, entries, keys", [(0, 3, 2, 5), (1, 0, 2, 5), (1, 3, 0, 5), (1, 3, 2, 0)]
)
def test_gradients_of_empty_lists_are_zero(batch, lists, entries, keys):
    q, k, v = make_qkv(batch, heads=2, kv_heads=1, q_length=lists, kv_length=keys, head_dim=8)
    indices = torch.full((batch, 1, lists, entries), -1).int()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = torch.ops.metal_attn.flash_decode(*leaves, indices=indices)
    loss = out.sum() + lse.masked_fill(lse.isinf(), 0).sum()
    assert all((x == 0).all() for x in torch.autograd.grad(loss, leaves))


def test_packed_queries_have_no_gradient():
    arguments, options = packed_q((3, 4), (60, 70))
    leaves = [x.nan_to_num(0).requires_grad_() for x in arguments]
    indices = torch.zeros(1, 1, 7, 2).int()
    out, _ = torch.ops.metal_attn.flash_decode(*leaves, **options, indices=indices)
    with pytest.raises(NotImplementedError, match="or indices without cu_seqlens_q"):
        out.sum().backward()
