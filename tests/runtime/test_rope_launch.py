"""What Metal would get of rope, rope_ and rope_tables: text, buffers and grid, run on the CPU."""

import pytest
import torch

from tests.rope.rope_check import make_problem
from tests.runtime.test_launch import run_what_was_launched, words
from torch_metal_attn import rope


# Specialisations that differ between the tests, as their libraries stay cached.
@pytest.mark.parametrize(
    "options, dtype",
    [
        ({"positions": torch.arange(18).view(2, 9) % 13, "interleaved": True}, torch.float32),
        ({"seqlen_offsets": torch.tensor([4, 0], dtype=torch.int32)}, torch.bfloat16),
        ({"seqlen_offset": 3, "conjugate": True}, torch.float16),
    ],
    ids=["positions", "offsets", "offset"],
)
def test_rope(served, options, dtype):
    q, k, cos, sin = make_problem(dtype=dtype, head_dim=22, rotary_dim=16)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    expected = torch.ops.metal_attn.rope(q, k, cos, sin, **options)
    outs = served.ops.rope(q, k, cos, sin, **options)
    given = [value for value in options.values() if torch.is_tensor(value)]
    run_what_was_launched(served, "rope", [q, k, cos, sin, *outs, *given])
    for out, value in zip(outs, expected, strict=True):
        assert out.stride() == value.stride()
        torch.testing.assert_close(out, value, rtol=1e-2, atol=1e-6)


def test_rope_in_place(served):
    q, k, cos, sin = make_problem(head_dim=24)
    expected = torch.ops.metal_attn.rope(q, k, cos, sin, seqlen_offset=1)
    served.ops.rope_(q, k, cos, sin, seqlen_offset=1)
    run_what_was_launched(served, "rope", [q, k, cos, sin])
    torch.testing.assert_close((q, k), expected)


def test_rope_tables(served):
    inv_freq, _ = rope.default(48)
    positions = torch.arange(90).view(5, 6, 3).permute(2, 0, 1)
    tables = served.ops.rope_tables(inv_freq, positions, attention_factor=1.5)
    run_what_was_launched(served, "rope_tables", [inv_freq, positions, *tables])
    expected = rope.tables(inv_freq, positions, attention_factor=1.5)
    torch.testing.assert_close(tables, expected)


def test_a_slot_without_memory_holds_another(any_fake):
    any_fake.add_family("rope", "kernel void rope() {}")
    q, k, cos, sin = make_problem(heads=0)
    q_out, k_out = any_fake.ops.rope(q, k, cos, sin)
    addresses = [int(address) for _, _, address in words(any_fake, "tensor")]
    expected = [k, k, cos, sin, k_out, k_out]
    assert addresses == [tensor.data_ptr() for tensor in expected]
    assert q_out.shape == q.shape


@pytest.mark.parametrize(
    "empty", [{"batch": 0}, {"length": 0}, {"heads": 0, "kv_heads": 0}], ids=str
)
def test_nothing_to_rotate_launches_nothing(any_fake, empty):
    q, k, cos, sin = make_problem(**empty)
    any_fake.ops.rope(q, k, cos, sin)
    any_fake.ops.rope_(q, k, cos, sin)
    any_fake.ops.rope_tables(torch.zeros(4), torch.arange(0))
    assert any_fake.log() == []
