"""Rotary embeddings that flash_fwd applies while it loads q and k, against the oracle."""

import math

import pytest
import torch

from tests.attention.flash_fwd_check import PAIRS_OF_DTYPES, check_flash_fwd, make_qkv
from tests.attention.flash_fwd_options import ints, random_mask, rotary_tables

SHAPE = {"batch": 2, "heads": 2, "kv_heads": 1, "q_length": 35, "kv_length": 70}


def options_for(sides, pairs, *, interleaved=False, spare=0, **tables):
    """Tables of the sides "q", "k" or "qk", for SHAPE."""
    options = {"rotary_interleaved": interleaved}
    for seed, side in enumerate(sides):
        length = {"q": 35, "k": 70}[side] + spare
        cos, sin = rotary_tables(length, pairs, seed=seed, **tables)
        options |= {f"{side}_rotary_cos": cos, f"{side}_rotary_sin": sin}
    return options


class TestRotations:
    @pytest.mark.parametrize(
        "sides, interleaved, dtype",
        [
            ("q", False, torch.float32),
            ("q", True, torch.float32),
            ("k", False, torch.float16),
            ("k", True, torch.float32),
            ("qk", False, torch.bfloat16),
            ("qk", True, torch.float16),
            ("qk", True, torch.float32),
        ],
    )
    def test_sides(self, sides, interleaved, dtype, device):
        q, k, v = make_qkv(**SHAPE, head_dim=16, dtype=dtype)
        options = options_for(sides, 8, interleaved=interleaved)
        check_flash_fwd(q, k, v, **options, device=device)

    @pytest.mark.parametrize(
        "head_dim, pairs, interleaved",
        [
            (16, 3, True),
            (16, 4, True),
            (7, 3, False),
            (129, 64, True),
        ],
    )
    def test_partial_dims(self, head_dim, pairs, interleaved, device):
        """Columns behind the rotated ones stay; odd counts of pairs cross chunks of 16 bytes."""
        q, k, v = make_qkv(**SHAPE, head_dim=head_dim, dtype=torch.float16)
        options = options_for("qk", pairs, interleaved=interleaved)
        check_flash_fwd(q, k, v, **options, device=device)

    @pytest.mark.parametrize("dtype, table_dtype", PAIRS_OF_DTYPES)
    def test_table_dtypes(self, dtype, table_dtype, device):
        q, k, v = make_qkv(**SHAPE, head_dim=16, dtype=dtype)
        check_flash_fwd(q, k, v, **options_for("qk", 8, dtype=table_dtype), device=device)

    @pytest.mark.parametrize("dtype, interleaved", [(torch.float32, False), (torch.float16, True)])
    def test_wide_and_narrow_loads_agree(self, dtype, interleaved, device):
        """One table off 16 bytes makes k be rotated element by element: to the same bits."""
        q, k, v = make_qkv(**SHAPE, head_dim=16, dtype=dtype)
        options = options_for("qk", 8, interleaved=interleaved)
        expected = check_flash_fwd(q, k, v, **options, device=device)
        for name in ("q_rotary_cos", "k_rotary_sin"):
            table = options[name]
            shifted = torch.cat([table.new_full((1,), math.nan), table.flatten()])[1:]
            unaligned = options | {name: shifted.view(table.shape)}
            out, lse = check_flash_fwd(q, k, v, **unaligned, device=device)
            assert torch.equal(out, expected[0])
            assert torch.equal(lse, expected[1])

    @pytest.mark.parametrize("batch", [1, 2])
    def test_tables_of_each_sequence(self, batch, device):
        """Positions of their own, as left padding gives them."""
        q, k, v = make_qkv(**SHAPE, head_dim=16)
        check_flash_fwd(q, k, v, **options_for("qk", 8, batch=batch), device=device)

    def test_tables_differ_in_their_batches(self, device):
        q, k, v = make_qkv(**SHAPE, head_dim=16)
        options = options_for("q", 8, batch=2) | {"rotary_interleaved": True}
        check_flash_fwd(q, k, v, **options | options_for("k", 8, interleaved=True), device=device)

    @pytest.mark.parametrize("batch", [None, 2])
    def test_strided_tables(self, batch, device):
        """Rows cut out of wider, longer tables of NaN; expanded ones."""
        q, k, v = make_qkv(**SHAPE, head_dim=16)
        options = options_for("qk", 8, batch=batch, spare=3)
        for name in list(options)[1:]:
            table = options[name]
            wide = torch.full((*table.shape[:-1], 13), math.nan)
            wide[..., 2:10] = table
            options[name] = wide[..., 2:10]
        options["q_rotary_cos"] = options["q_rotary_cos"][..., :1, :].expand(
            *options["q_rotary_cos"].shape
        )
        check_flash_fwd(q, k, v, **options, device=device)

    def test_queries_that_are_read_again_for_each_block(self, device):
        """float32 at this head dim holds no q in registers."""
        q, k, v = make_qkv(**SHAPE, head_dim=320, v_head_dim=256)
        check_flash_fwd(q, k, v, **options_for("qk", 40), device=device)

    @pytest.mark.parametrize("interleaved", [False, True])
    def test_rotation_by_a_right_angle(self, interleaved, device):
        """cos 0, sin 1: (x, y) becomes (-y, x), seen by keys that pick one column each."""
        q = torch.arange(1.0, 17.0).view(1, 1, 1, 16)
        k, v = torch.eye(16)[None, None], torch.eye(16)[None, None]
        tables = {"q_rotary_cos": torch.zeros(1, 8), "q_rotary_sin": torch.ones(1, 8)}
        out, _ = torch.ops.metal_attn.flash_fwd(
            *(tensor.to(device) for tensor in (q, k, v)),
            **{name: table.to(device) for name, table in tables.items()},
            rotary_interleaved=interleaved,
            softmax_scale=0.1,
        )
        pairs = torch.arange(1, 17).view(8, 2) if interleaved else torch.arange(1, 17).view(2, 8).T
        rotated = torch.stack([-pairs[:, 1], pairs[:, 0]], 1)
        rotated = rotated if interleaved else rotated.T
        expected = (rotated.flatten() * 0.1).softmax(0)
        torch.testing.assert_close(out.cpu().flatten(), expected)

    def test_equals_rotating_beforehand(self, device):
        """In float32, where rounding the rotated rows is far below the tolerance."""
        q, k, v = make_qkv(**SHAPE, head_dim=16)
        cos, sin = rotary_tables(70, 8)

        def rotated(x):
            first, second = x.chunk(2, -1)
            whole_cos, whole_sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
            rows = x.shape[2]
            return x * whole_cos[:rows] + torch.cat([-second, first], -1) * whole_sin[:rows]

        beforehand = [tensor.to(device) for tensor in (rotated(q), rotated(k), v)]
        expected, _ = torch.ops.metal_attn.flash_fwd(*beforehand)
        tables = dict.fromkeys(("q_rotary_cos", "k_rotary_cos"), cos.to(device))
        tables |= dict.fromkeys(("q_rotary_sin", "k_rotary_sin"), sin.to(device))
        plain = [tensor.to(device) for tensor in (q, k, v)]
        out, _ = torch.ops.metal_attn.flash_fwd(*plain, **tables)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


class TestWithLengths:
    def test_keys_that_do_not_exist_may_have_nan_tables(self, device):
        q, k, v = make_qkv(**SHAPE, head_dim=16)
        options = options_for("qk", 8, batch=2)
        lengths = {"seqused_k": ints(61, 40), "leftpad_k": ints(3, 33)}
        expected = check_flash_fwd(q, k, v, **options, **lengths, causal=True, device=device)
        for b, (first, end) in enumerate([(3, 61), (33, 40)]):
            for tensor in (k, v):
                tensor[b, :, :first] = math.nan
                tensor[b, :, end:] = math.nan
            for name in ("k_rotary_cos", "k_rotary_sin"):
                options[name] = options[name].clone()
                options[name][b, :first] = math.nan
                options[name][b, end:] = math.nan
        out, lse = torch.ops.metal_attn.flash_fwd(
            *(tensor.to(device) for tensor in (q, k, v)),
            **{n: t.to(device) if torch.is_tensor(t) else t for n, t in options.items()},
            **{name: tensor.to(device) for name, tensor in lengths.items()},
            causal=True,
        )
        assert torch.equal(out.cpu(), expected[0])
        assert torch.equal(lse.cpu(), expected[1])

    @pytest.mark.parametrize("q_length, kv_length", [(1, 1), (1, 70), (35, 1), (7, 31)])
    def test_tables_as_short_as_allowed(self, q_length, kv_length, device):
        """Reads behind a table's last row would fault."""
        q, k, v = make_qkv(q_length=q_length, kv_length=kv_length, head_dim=16)
        options = {}
        for side, length in (("q", q_length), ("k", kv_length)):
            cos, sin = rotary_tables(length, 8)
            options |= {f"{side}_rotary_cos": cos, f"{side}_rotary_sin": sin}
        check_flash_fwd(q, k, v, **options, device=device)

    def test_rows_are_those_of_the_tensors_whatever_the_offset(self, device):
        q, k, v = make_qkv(**SHAPE, head_dim=16)
        mask = random_mask(35, 70)
        for q_offset in (None, 0, -7, 200):
            check_flash_fwd(
                q,
                k,
                v,
                **options_for("qk", 8),
                q_offset=q_offset,
                window_size_left=9,
                attn_mask=mask,
                device=device,
            )
