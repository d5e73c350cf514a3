"""Strides of rope's q, k and tables, long offsets, and tensors that must not overlap."""

import pytest
import torch

from tests.helpers.sparse import sparse
from tests.rope.rope_check import LAYOUTS, check_close, make_problem, make_tables, normal
from torch_metal_attn import simulate

rope, rope_ = torch.ops.metal_attn.rope, torch.ops.metal_attn.rope_


class TestStrides:
    @pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "columns first"])
    def test_tables_may_have_any_strides(self, layout, device):
        q, k, _, _ = make_problem()
        cos, sin = make_tables(24, 16, batch=2)
        views = [LAYOUTS[layout](t[:, None])[:, 0].to(device) for t in (cos, sin)]
        results = rope(q.to(device), k.to(device), *views, seqlen_offset=3)
        for x, result in zip((q, k), results, strict=True):
            check_close(result.cpu(), x, cos, sin, seqlen_offset=3)

    def test_layouts_of_packed_projections(self, device):
        """q and k are parts of one tensor without common elements."""
        cos, sin = (t.to(device) for t in make_tables(5, 8))
        packed = normal(2, 5, 6, 8).to(device)
        parts = {
            "k before q": (packed[:, :, 2:6], packed[:, :, :2]),
            "alternating": (packed[:, :, 0::2], packed[:, :, 1::2]),
            "one head of k": (packed[:, :, :5], packed[:, :, 5:]),
            "halves of a batch": (packed[:1], packed[1:]),
        }
        for name, (q, k) in parts.items():
            q, k = q.transpose(1, 2), k.transpose(1, 2)
            expected = rope(q, k, cos, sin)
            rope_(q, k, cos, sin)
            assert torch.equal(q, expected[0]), name
            assert torch.equal(k, expected[1]), name

    def test_more_than_2_to_31_elements(self):
        """Offsets exceed 32 bits, in sparse memory. Checks are off, because they would copy it."""
        far = 2**31 + 64
        flat = sparse(far + 4096)
        values, k, cos, sin = make_problem(length=2, head_dim=8, dtype=torch.float16)
        for strides in ((far, 64, 8, 1), (64, far // 4, 8, 1), (64, 8, far, 1)):
            q = flat.as_strided(values.shape, strides)
            q.copy_(values)
            with simulate():
                out, _ = rope(q, None, cos, sin)
                check_close(out, values, cos, sin)
                rope_(q, k, cos, sin)
            assert torch.equal(q, out)
            q.zero_()
        table = flat.as_strided((6, 4), (far // 8, 1))
        with simulate():
            table.copy_(cos.half())
            out, _ = rope(values, None, table, sin.half(), seqlen_offset=4)
            check_close(out, values, cos.half(), sin.half(), seqlen_offset=4)


def test_q_and_k_may_not_overlap_in_place(device):
    cos, sin = (t.to(device) for t in make_tables(5, 8))
    whole = torch.zeros(2, 4, 5, 8, device=device)
    first = whole[:1]
    pairs = [(whole, k) for k in (whole, whole[:, 1:], whole[:, :1], whole[:, 1:3])]
    pairs.append((first, first.as_strided(first.shape, first.stride(), 4)))
    for q, k in pairs:
        with pytest.raises(ValueError, match="k may share elements with q"):
            rope_(q, k, cos, sin)
