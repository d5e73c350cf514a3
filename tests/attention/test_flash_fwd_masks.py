"""Which keys a query of flash_fwd sees: masks, windows, chunks and lengths, against the oracle."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.attention.flash_fwd_check import (
    PAIRS_OF_DTYPES,
    ROUNDING,
    check_flash_fwd,
    make_qkv,
)
from tests.attention.flash_fwd_options import DRAWN_DTYPES, ints, random_mask
from tests.attention.head_dims import HOME
from torch_metal_attn.reference import attention

FURTHEST = 2**31 - 1024


# What broadcasts to (2, 4, 35, 70).
BROADCASTS = [
    (1,),
    (70,),
    (35, 70),
    (35, 1),
    (1, 70),
    (1, 1),
    (4, 35, 70),
    (4, 1, 1),
    (1, 35, 70),
    (2, 4, 35, 70),
    (2, 1, 35, 70),
    (2, 1, 1, 70),
    (1, 4, 1, 70),
    (2, 4, 35, 1),
    (2, 4, 1, 1),
    (1, 1, 1, 1),
]


MASKED = {"batch": 2, "heads": 4, "kv_heads": 2, "q_length": 35, "kv_length": 70, "head_dim": HOME}

# Of a contiguous (B, H, Lq, Lk) mask, and of another's values to put where nothing may look.
MASK_LAYOUTS = {
    "expanded batch": lambda m, other: m[:1].expand(2, 4, 35, 70),
    "expanded head": lambda m, other: m[:, :1].expand(2, 4, 35, 70),
    "expanded queries": lambda m, other: m[:, :, :1].expand(2, 4, 35, 70),
    "expanded keys": lambda m, other: m[..., :1].expand(2, 4, 35, 70),
    "all expanded": lambda m, other: m[:1, :1, :1, :1].expand(2, 4, 35, 70),
    "transposed": lambda m, other: m.transpose(2, 3).contiguous().transpose(2, 3),
    "heads last": lambda m, other: m.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "every other key": lambda m, other: torch.stack([m, other], -1).flatten(-2)[..., ::2],
    "every other head": lambda m, other: torch.stack([m, other], 2).flatten(1, 2)[:, ::2],
    "rows of odd length": lambda m, other: torch.cat([m, other[..., :3]], -1)[..., :70],
    "odd offset": lambda m, other: torch.cat([other[..., :2], m], -1)[..., 2:],
    "even offset": lambda m, other: torch.cat([other[..., :1], m, other], -1)[..., 1:71],
    "odd storage offset": lambda m, other: torch.cat([other.flatten()[:1], m.flatten()])[1:].view(
        m.shape
    ),
}


class TestMasks:
    """Bool and additive, of any shape that broadcasts and any strides."""

    @pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
    @pytest.mark.parametrize("shape", BROADCASTS, ids=str)
    def test_broadcasts(self, shape, dtype, device):
        q, k, v = make_qkv(**MASKED)
        mask = random_mask(*shape, dtype=dtype)
        check_flash_fwd(q, k, v, attn_mask=mask, device=device)
        if dtype != torch.bool:
            check_flash_fwd(q, k, v, attn_bias=mask, causal=True, device=device)

    @pytest.mark.parametrize("dtype, mask_dtype", [(torch.float32, torch.bool), *PAIRS_OF_DTYPES])
    def test_dtypes(self, dtype, mask_dtype, device):
        q, k, v = make_qkv(**MASKED, dtype=dtype)
        mask = random_mask(2, 4, 35, 70, dtype=mask_dtype)
        check_flash_fwd(q, k, v, attn_mask=mask, device=device)

    @pytest.mark.parametrize(
        "dtype, mask_dtype",
        [
            (torch.float32, torch.bool),
            (torch.float16, torch.bfloat16),
            (torch.float32, torch.float32),
        ],
    )
    @pytest.mark.parametrize("layout", MASK_LAYOUTS)
    def test_strides(self, layout, dtype, mask_dtype, device):
        q, k, v = make_qkv(**MASKED, dtype=dtype)
        mask = random_mask(2, 4, 35, 70, dtype=mask_dtype)
        other = ~mask if mask_dtype == torch.bool else torch.full_like(mask, 50.0)
        check_flash_fwd(q, k, v, attn_mask=MASK_LAYOUTS[layout](mask, other), device=device)

    @pytest.mark.parametrize("q_length, kv_length", [(1, 1), (1, 2), (2, 1), (7, 31), (33, 65)])
    @pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
    def test_odd_lengths(self, q_length, kv_length, dtype, device):
        q, k, v = make_qkv(q_length=q_length, kv_length=kv_length, head_dim=HOME)
        mask = random_mask(q_length, kv_length, dtype=dtype)
        check_flash_fwd(q, k, v, attn_mask=mask, device=device)

    def test_surroundings_are_not_read(self, device):
        """The checked run has guards around each storage: the mask ends with its last key."""
        q, k, v = make_qkv(**MASKED)
        for dtype in (torch.bool, torch.float32):
            mask = random_mask(2, 4, 35, 70, dtype=dtype)
            check_flash_fwd(q, k, v, attn_mask=mask[1:, 3:, 34:].clone(), device=device)

    @pytest.mark.parametrize("hidden_until", [1, 31, 32, 33, 64])
    @pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
    def test_first_visible_key_in_a_later_block(self, hidden_until, dtype, device):
        q, k, v = make_qkv(**MASKED)
        mask = random_mask(2, 1, 35, 70, dtype=dtype)
        mask[:, :, 3:20, :hidden_until] = False if dtype == torch.bool else -math.inf
        check_flash_fwd(q, k, v, attn_mask=mask, device=device)

    @pytest.mark.parametrize("dtype, mask_dtype", [(torch.float32, torch.bool), *PAIRS_OF_DTYPES])
    def test_fully_masked_rows(self, dtype, mask_dtype, device):
        """Whole rows, a whole head and a whole batch."""
        q, k, v = make_qkv(**MASKED, dtype=dtype)
        hides = False if mask_dtype == torch.bool else -math.inf
        mask = random_mask(2, 4, 35, 70, dtype=mask_dtype)
        mask[:, :, 5:17] = hides
        mask[0, 2] = hides
        out, lse = check_flash_fwd(q, k, v, attn_mask=mask, device=device)
        assert (out[0, 2] == 0).all()
        assert (lse[:, :, 5:17] == -math.inf).all()
        mask[1] = hides
        out, _ = check_flash_fwd(q, k, v, attn_mask=mask, device=device)
        assert (out[1] == 0).all()

    @pytest.mark.parametrize("dtype, mask_dtype", PAIRS_OF_DTYPES)
    def test_the_lowest_number_hides_and_a_row_of_it_is_uniform(self, dtype, mask_dtype, device):
        """As in every softmax of finite scores; Hugging Face masks are made of it."""
        q, k, v = make_qkv(**MASKED, dtype=dtype)
        lowest = torch.finfo(mask_dtype).min
        visible = random_mask(2, 1, 35, 70)
        mask = torch.zeros(2, 1, 35, 70, dtype=mask_dtype).masked_fill(~visible, lowest)
        out, lse = check_flash_fwd(q, k, v, attn_mask=mask, device=device)
        mask[:, :, 4:9] = lowest
        q[:, :, 4:9] = 0.0  # it absorbs the scores in float32, but not in float64
        uniform, uniform_lse = torch.ops.metal_attn.flash_fwd(
            *(tensor.to(device) for tensor in (q, k, v)), attn_mask=mask.to(device)
        )
        mean = v.double().mean(2, keepdim=True).repeat_interleave(2, 1).expand(-1, -1, 5, -1)
        rounding = ROUNDING[dtype]
        torch.testing.assert_close(
            uniform[:, :, 4:9].cpu().double(), mean, atol=2 * rounding, rtol=2 * rounding
        )
        assert uniform_lse[:, :, 4:9].isfinite().all()
        assert (uniform_lse[:, :, 4:9] < lowest / 2).all()
        assert torch.equal(uniform[:, :, 9:].cpu(), out[:, :, 9:])
        assert torch.equal(uniform_lse[:, :, 9:].cpu(), lse[:, :, 9:])

    def test_nan_and_infinity_in_a_bias(self, device):
        q, k, v = (tensor.to(device) for tensor in make_qkv(**MASKED))
        bias = torch.zeros(35, 70)
        bias[3, 40] = math.nan
        bias[4, 40] = math.inf
        bias[5, 50] = math.nan  # behind the diagonal
        out, lse = torch.ops.metal_attn.flash_fwd(
            q, k, v, attn_bias=bias.to(device), causal=True, q_offset=40
        )
        assert out[:, :, 3:5].isnan().all()
        assert lse[:, :, 3].isnan().all()
        out[:, :, 3:5] = 0
        assert out.isfinite().all()

    def test_bool_and_additive_at_once(self, device):
        q, k, v = make_qkv(**MASKED)
        bias = random_mask(4, 35, 70, dtype=torch.float32, hidden=0.2)
        mask = random_mask(2, 1, 1, 70)
        check_flash_fwd(
            q, k, v, attn_mask=mask, attn_bias=bias, causal=True, q_offset=50, device=device
        )


WINDOWED = {
    "batch": 2,
    "heads": 2,
    "kv_heads": 1,
    "q_length": 65,
    "kv_length": 97,
    "head_dim": HOME,
}


class TestWindows:
    @pytest.mark.parametrize("q_offset", [None, 0, -40, 40, 96, 97, 140, FURTHEST, -FURTHEST])
    @pytest.mark.parametrize(
        "left, right",
        [(0, -1), (5, -1), (32, -1), (-1, 0), (-1, 7), (-1, 33), (0, 0), (7, 9), (40, 3), (64, 64)],
    )
    def test_left_and_right(self, left, right, q_offset, device):
        q, k, v = make_qkv(**WINDOWED)
        check_flash_fwd(
            q,
            k,
            v,
            window_size_left=left,
            window_size_right=right,
            q_offset=q_offset,
            device=device,
        )

    @pytest.mark.parametrize("left", [-1, 0, 1, 31, 32, 33, 200])
    @pytest.mark.parametrize("q_offset", [None, 0, -3, 70])
    def test_causal(self, left, q_offset, device):
        q, k, v = make_qkv(**WINDOWED, dtype=torch.float16)
        options = {"window_size_left": left, "causal": True, "q_offset": q_offset}
        out, lse = check_flash_fwd(q, k, v, **options, device=device)
        again = check_flash_fwd(q, k, v, **options, window_size_right=0, device=device)
        assert torch.equal(out, again[0])
        assert torch.equal(lse, again[1])

    @pytest.mark.parametrize("size", [2**31, 2**33 + 1, 2**63 - 1])
    @pytest.mark.parametrize("q_offset", [0, FURTHEST, -FURTHEST])
    def test_sizes_beyond_32_bits_are_no_limit(self, size, q_offset, device):
        q, k, v = make_qkv(**WINDOWED)
        reach = {"window_size_left": size, "window_size_right": size}
        out, _ = check_flash_fwd(q, k, v, **reach, q_offset=q_offset, device=device)
        if q_offset == 0:
            assert torch.equal(out, check_flash_fwd(q, k, v, device=device)[0])

    @pytest.mark.parametrize("distance", [-1, 0, 1])
    def test_windows_at_the_furthest_offsets(self, distance, device):
        """Windows as far as the offset reach the first keys from there, to the key."""
        q, k, v = make_qkv(**WINDOWED)
        reach = FURTHEST + distance
        check_flash_fwd(q, k, v, window_size_left=reach, q_offset=FURTHEST, device=device)
        check_flash_fwd(q, k, v, window_size_right=reach, q_offset=-FURTHEST, device=device)

    def test_shape_of_a_window(self, device):
        """Weights of one query, by values that are the keys' own numbers."""
        q, k = torch.zeros(1, 1, 9, HOME), torch.zeros(1, 1, 9, HOME)
        v = torch.eye(9, HOME)[None, None]
        out, _ = torch.ops.metal_attn.flash_fwd(
            *(tensor.to(device) for tensor in (q, k, v)), window_size_left=2, window_size_right=1
        )
        assert (out.cpu()[0, 0, 4] > 0).nonzero().flatten().tolist() == [2, 3, 4, 5]
        assert (out.cpu()[0, 0, 0] > 0).nonzero().flatten().tolist() == [0, 1]


class TestChunks:
    """Llama 4's: a query sees the keys of its own chunk."""

    @pytest.mark.parametrize("chunk", [1, 5, 16, 32, 33, 64, 97, 1000])
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("q_offset", [None, 0, -40, 90])
    def test_sizes(self, chunk, causal, q_offset, device):
        q, k, v = make_qkv(**WINDOWED, dtype=torch.float16)
        options = {"attention_chunk": chunk, "causal": causal, "q_offset": q_offset}
        check_flash_fwd(q, k, v, **options, device=device)

    @pytest.mark.parametrize("chunk", [5, 32, 50])
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("q_offset", [None, 0, -40])
    def test_chunks_begin_behind_the_padding(self, chunk, causal, q_offset, device):
        q, k, v = make_qkv(**WINDOWED, dtype=torch.float16)
        options = {"attention_chunk": chunk, "causal": causal, "q_offset": q_offset}
        for first, end in (((3, 41), (97, 97)), ((90, 0), (60, 70))):
            lengths = {"leftpad_k": ints(*first), "seqused_k": ints(*end)}
            check_flash_fwd(q, k, v, **options, **lengths, device=device)

    def test_with_a_window(self, device):
        q, k, v = make_qkv(**WINDOWED, dtype=torch.float16)
        check_flash_fwd(
            q, k, v, attention_chunk=20, window_size_left=7, window_size_right=9, device=device
        )

    @pytest.mark.parametrize("chunk", [2**31 - 1024, 2**30, 7])
    @pytest.mark.parametrize("q_offset", [FURTHEST, FURTHEST - 90, -FURTHEST, 5])
    def test_furthest_offsets(self, chunk, q_offset, device):
        q, k, v = make_qkv(**WINDOWED, dtype=torch.float16)
        check_flash_fwd(q, k, v, attention_chunk=chunk, q_offset=q_offset, device=device)


def without(tensor, first, end):
    """NaN in the rows of keys that do not exist."""
    tensor = tensor.clone()
    for b, (begin, stop) in enumerate(zip(first, end, strict=True)):
        tensor[b, :, :begin] = math.nan
        tensor[b, :, stop:] = math.nan
    return tensor


OF_LENGTHS = WINDOWED | {"batch": 4, "q_length": 35}
# First keys and ends of the four sequences.
LENGTHS = {
    "ends": ((0, 0, 0, 0), (97, 40, 0, 1)),
    "paddings": ((0, 33, 97, 96), (97, 97, 97, 97)),
    "both": ((0, 33, 5, 64), (96, 65, 6, 97)),
    "padding behind the end": ((50, 33, 97, 1), (40, 33, 0, 0)),
    "blocks": ((32, 64, 31, 33), (64, 96, 65, 95)),
}


class TestLengths:
    @pytest.mark.parametrize(
        "dtype, options",
        [
            (torch.float16, {}),
            (torch.float32, {"causal": True}),
            (torch.float32, {"causal": True, "q_offset": 20}),
            (torch.float32, {"window_size_left": 9, "window_size_right": 14}),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("case", LENGTHS)
    def test_only_existing_keys_are_seen(self, case, options, dtype, device):
        first, end = LENGTHS[case]
        q, k, v = make_qkv(**OF_LENGTHS, dtype=dtype)
        lengths = {}
        if any(first):
            lengths["leftpad_k"] = ints(*first)
        if any(n != 97 for n in end):
            lengths["seqused_k"] = ints(*end)
        out, lse = check_flash_fwd(q, k, v, **lengths, **options, device=device)
        poisoned = check_flash_fwd(
            q,
            without(k, first, end),
            without(v, first, end),
            **lengths,
            **options,
            device=device,
        )
        assert torch.equal(out, poisoned[0])
        assert torch.equal(lse, poisoned[1])

    def test_bottom_right_is_that_of_each_sequence(self, device):
        """As if each had been cut to its keys."""
        q, k, v = make_qkv(**OF_LENGTHS)
        out, _ = check_flash_fwd(
            q, k, v, seqused_k=ints(97, 60, 40, 35), causal=True, device=device
        )
        for b, end in enumerate((97, 60, 40, 35)):
            single = [tensor[b : b + 1] for tensor in (q, k[:, :, :end], v[:, :, :end])]
            expected, _ = attention(*single, causal=True)
            torch.testing.assert_close(out[b : b + 1], expected, atol=1e-5, rtol=1e-5)

    def test_masks_are_not_read_as_if_shorter(self, device):
        """Pairs of a mask's keys stay pairs where the keys end within one."""
        q, k, v = make_qkv(**OF_LENGTHS | {"kv_length": 70})
        check_flash_fwd(
            q,
            k,
            v,
            attn_mask=random_mask(4, 2, 35, 70, hidden=0.2),
            attn_bias=random_mask(4, 2, 35, 70, dtype=torch.float32, seed=4, hidden=0.2),
            seqused_k=ints(69, 41, 1, 33),
            leftpad_k=ints(1, 0, 0, 31),
            device=device,
        )


@given(data=st.data())
def test_every_rule_at_once(device, data):
    """Sizes are drawn, the head dim is not: few kernels serve all examples."""
    batch, q_length, kv_length = (data.draw(st.integers(1, n)) for n in (2, 70, 100))
    dtype = data.draw(st.sampled_from(DRAWN_DTYPES))
    q, k, v = make_qkv(batch, 2, 1, q_length, kv_length, HOME, HOME, dtype)
    causal = data.draw(st.booleans())
    options = {
        "causal": causal,
        "window_size_left": data.draw(st.integers(0, 100)),
        "window_size_right": -1 if causal else data.draw(st.integers(0, 100)),
        "attention_chunk": data.draw(st.integers(1, 100)),
        "q_offset": data.draw(st.none() | st.integers(-100, 100)),
        "attn_mask": random_mask(
            *(data.draw(st.sampled_from([1, n])) for n in (batch, 2, q_length, kv_length)),
            seed=data.draw(st.integers(0, 2**31)),
            hidden=data.draw(st.sampled_from([0.1, 0.7])),
        ),
    }
    for name in ("seqused_k", "leftpad_k"):
        options[name] = ints(*(data.draw(st.integers(0, kv_length)) for _ in range(batch)))
    check_flash_fwd(q, k, v, **options, device=device)
