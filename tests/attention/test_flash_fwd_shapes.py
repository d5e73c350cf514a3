"""flash_fwd at every kind of head dim, group, length and stride, against the oracle."""

import math

import pytest
import torch

from tests.attention.flash_fwd_check import check_flash_fwd, make_qkv
from tests.attention.flash_fwd_options import ints, random_mask, rotary_tables
from tests.attention.head_dims import ALIKE, ALIKE_FORWARD, DIFFERENT, DIFFERENT_FORWARD, ODD


class TestHeadDims:
    @pytest.mark.parametrize("head_dim, dtype", ALIKE + ALIKE_FORWARD)
    def test_alike(self, head_dim, dtype, device):
        q, k, v = make_qkv(head_dim=head_dim, dtype=dtype)
        check_flash_fwd(q, k, v, causal=True, q_offset=20, device=device)

    @pytest.mark.parametrize("head_dim, v_head_dim, dtype", DIFFERENT + DIFFERENT_FORWARD)
    def test_that_differ(self, head_dim, v_head_dim, dtype, device):
        q, k, v = make_qkv(1, 4, 2, 9, 35, head_dim, v_head_dim, dtype)
        check_flash_fwd(q, k, v, causal=True, device=device)

    @pytest.mark.parametrize("head_dim, v_head_dim, dtype", ODD)
    def test_what_lies_between_the_rows_is_not_read(self, head_dim, v_head_dim, dtype, device):
        """Rows that end before their tile's last column, with NaN behind each."""
        tensors = []
        for tensor in make_qkv(head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype):
            rows = torch.full((*tensor.shape[:3], tensor.shape[3] + 11), math.nan, dtype=dtype)
            rows[..., 3 : 3 + tensor.shape[3]] = tensor
            tensors.append(rows.to(device)[..., 3 : 3 + tensor.shape[3]])
        out, lse = torch.ops.metal_attn.flash_fwd(*tensors, causal=True)
        contiguous = (tensor.contiguous() for tensor in tensors)
        compact = torch.ops.metal_attn.flash_fwd(*contiguous, causal=True)
        assert out.isfinite().all()
        torch.testing.assert_close(out, compact[0])
        torch.testing.assert_close(lse, compact[1])

    def test_every_slice_of_v_has_the_whole_softmax(self, device):
        """Each slice of v computes its own scores: with masks, caps and sinks too."""
        q, k, v = make_qkv(heads=2, kv_heads=1, head_dim=8, v_head_dim=264)
        check_flash_fwd(
            q,
            k,
            v,
            causal=True,
            softcap=2.0,
            attn_mask=random_mask(33, 65),
            alibi_slopes=torch.tensor([0.1, 0.2]),
            learnable_sink=torch.tensor([1.0, -1.0]),
            device=device,
        )

    @pytest.mark.parametrize("head_dim, v_head_dim", [(8, 257), (64, 512)])
    def test_slices_read_their_own_columns_only(self, head_dim, v_head_dim, device):
        shape = {"head_dim": head_dim, "v_head_dim": v_head_dim, "dtype": torch.bfloat16}
        q, k, v = (tensor.to(device) for tensor in make_qkv(**shape))
        out, _ = torch.ops.metal_attn.flash_fwd(q, k, v, causal=True)
        for column in (0, 100, 129, 136, 150, v_head_dim - head_dim):
            columns = slice(column, column + head_dim)
            narrow = v[..., columns].contiguous()
            alone, _ = torch.ops.metal_attn.flash_fwd(q, k, narrow, causal=True)
            # Another tile may sum in another order.
            torch.testing.assert_close(out[..., columns], alone, rtol=2**-7, atol=1e-5)


class TestGroups:
    @pytest.mark.parametrize("heads, kv_heads", [(1, 1), (3, 1), (7, 7), (12, 4), (9, 3), (17, 1)])
    def test_ratios(self, heads, kv_heads, device):
        q, k, v = make_qkv(batch=2, heads=heads, kv_heads=kv_heads, head_dim=16)
        check_flash_fwd(q, k, v, causal=True, device=device)


ALL_FEATURES = {
    "causal": True,
    "window_size_left": 40,
    "attention_chunk": 50,
    "softcap": 3.0,
    "rotary_interleaved": True,
}


def all_features(batch, heads, q_length, kv_length):
    tables = {}
    for side, length in (("q", q_length), ("k", kv_length)):
        cos, sin = rotary_tables(length, 3)
        tables |= {f"{side}_rotary_cos": cos, f"{side}_rotary_sin": sin}
    return (
        ALL_FEATURES
        | tables
        | {
            "seqused_k": ints(*([kv_length] * batch)),
            "leftpad_k": ints(*([0] * batch)),
            "attn_mask": random_mask(batch, heads, q_length, kv_length),
            "attn_bias": torch.randn(batch, heads, q_length, kv_length),
            "alibi_slopes": torch.rand(batch, heads),
            "learnable_sink": torch.randn(heads),
        }
    )


class TestEmpty:
    @pytest.mark.parametrize("batch, heads, q_length", [(0, 2, 5), (2, 0, 5), (2, 2, 0), (0, 0, 0)])
    @pytest.mark.parametrize("kv_length", [0, 7])
    def test_no_queries(self, batch, heads, q_length, kv_length, device):
        q, k, v = make_qkv(batch, heads, heads, q_length, kv_length, 8)
        for options in ({}, all_features(batch, heads, q_length, kv_length)):
            out, lse = check_flash_fwd(q, k, v, **options, device=device)
            assert out.numel() == lse.numel() == 0

    def test_no_keys(self, device):
        q, k, v = make_qkv(2, 2, 2, 35, 0, 16)
        out, lse = check_flash_fwd(q, k, v, **all_features(2, 2, 35, 0), device=device)
        assert (out == 0).all()
        assert lse.isfinite().all()
        _, lse = check_flash_fwd(q, k, v, device=device)
        assert (lse == -math.inf).all()

    def test_no_keys_of_a_tensor_without_memory(self, device):
        q = torch.randn(1, 1, 3, 16).to(device)
        empty = torch.empty(1, 1, 0, 16).to(device)
        out, _ = torch.ops.metal_attn.flash_fwd(q, empty, empty, attn_mask=torch.empty(3, 0) > 0)
        assert (out == 0).all()


class TestStrides:
    @pytest.mark.parametrize(
        "head_dim, v_head_dim, dtype",
        [(16, 16, torch.float32), (16, 16, torch.float16), (1, 1, torch.bfloat16)],
    )
    def test_every_order_of_dimensions(self, head_dim, v_head_dim, dtype, device):
        q, k, v = make_qkv(2, 4, 2, head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype)
        expected, _ = check_flash_fwd(q, k, v, causal=True, device=device)
        orders = [(0, 2, 1, 3), (1, 0, 2, 3), (2, 1, 0, 3), (2, 0, 1, 3), (1, 2, 0, 3)]
        for i, order in enumerate(orders):
            back = torch.tensor(order).argsort().tolist()
            strided = [
                tensor.permute(order).contiguous().permute(back).to(device) for tensor in (q, k, v)
            ]
            # q alone, then k and v alone, then all.
            kept = [[1, 2], [0], []][i % 3]
            for index in kept:
                strided[index] = (q, k, v)[index].to(device)
            out, _ = torch.ops.metal_attn.flash_fwd(*strided, causal=True)
            assert torch.equal(out.cpu(), expected)

    def test_rows_that_overlap(self, device):
        """A window over one sequence: rows of a stride below their length."""
        line = torch.randn(200, generator=torch.Generator().manual_seed(0))
        q, k, v = (line[shift:].as_strided((1, 1, 33, 16), (0, 0, 3, 1)) for shift in (0, 1, 7))
        strided = [tensor.to(device) for tensor in (q, k, v)]
        out, _ = torch.ops.metal_attn.flash_fwd(*strided, causal=True)
        compact = [tensor.contiguous() for tensor in strided]
        torch.testing.assert_close(out, torch.ops.metal_attn.flash_fwd(*compact, causal=True)[0])
