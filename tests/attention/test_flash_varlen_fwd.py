"""flash_varlen_fwd, the kernel on packed sequences, against the oracle and the dense op."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.attention.flash_fwd_check import DTYPES, check_flash_varlen_fwd, make_packed, on
from tests.attention.flash_fwd_options import (
    DRAWN_HEAD_DIMS,
    any_options,
    few_examples,
    ints,
    random_mask,
    rotary_tables,
)
from tests.attention.head_dims import HOME

SMALL = {"heads": 4, "kv_heads": 2, "head_dim": HOME}

# Lengths of queries and keys, a pair for each sequence.
LENGTHS = {
    "one": [(33, 65)],
    "three": [(33, 65), (7, 31), (70, 40)],
    "single tokens": [(1, 1), (1, 2), (1, 33), (1, 64)],
    "empty in the middle": [(33, 40), (0, 0), (20, 33)],
    "empty at the ends": [(0, 0), (33, 40), (0, 0), (0, 0)],
    "no queries": [(33, 40), (0, 20), (9, 9)],
    "no keys": [(33, 40), (20, 0), (9, 9)],
    "no keys at the ends": [(20, 0), (33, 40), (9, 0)],
    "nothing": [(0, 0), (0, 0)],
    "only queries": [(5, 0), (40, 0)],
    "only keys": [(0, 5), (0, 40)],
    "whole blocks": [(64, 64), (64, 32), (32, 64)],
    "more queries than keys": [(65, 7), (70, 33)],
}


HEAD_DIMS = [(12, 300, torch.bfloat16)]


def packed(lengths, spare=(0, 0), longest=(0, 0), **shape):
    """The op's arguments; `spare` rows behind the last sequence, `longest` added to the maxima."""
    q_lengths, kv_lengths = zip(*lengths, strict=True)
    q, k, v, *ends, max_q, max_k = make_packed(q_lengths, kv_lengths, **SMALL | shape)
    # What no sequence has may be anything.
    q = torch.cat([q, q.new_full((spare[0], *q.shape[1:]), math.nan)])
    k, v = (torch.cat([t, t.new_full((spare[1], *t.shape[1:]), math.nan)]) for t in (k, v))
    return q, k, v, *ends, max_q + longest[0], max_k + longest[1]


class TestSequences:
    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize("case", LENGTHS)
    def test_lengths(self, case, causal, device):
        check_flash_varlen_fwd(*packed(LENGTHS[case]), causal=causal, device=device)

    @pytest.mark.parametrize("dtype", DTYPES[:2])
    @pytest.mark.parametrize("case", ["three", "empty in the middle"])
    def test_dtypes(self, case, dtype, device):
        arguments = packed(LENGTHS[case], dtype=dtype)
        check_flash_varlen_fwd(*arguments, causal=True, device=device)

    @pytest.mark.parametrize("case", ["three", "no keys at the ends", "nothing", "only keys"])
    def test_rows_behind_the_last_sequence(self, case, device):
        """Queries get 0 and -inf; keys, NaN here, are nobody's."""
        arguments = packed(LENGTHS[case], spare=(70, 9), longest=(5, 80))
        end = arguments[3][-1]
        out, lse = check_flash_varlen_fwd(*arguments, causal=True, device=device)
        assert (out[end:] == 0).all()
        assert (lse[:, end:] == -math.inf).all()
        sink = torch.tensor([1.0, 2.0, 3.0, -math.inf])
        out, lse = check_flash_varlen_fwd(*arguments, learnable_sink=sink, device=device)
        assert (out[end:] == 0).all()
        assert (lse[:, end:] == -math.inf).all()

    def test_no_sequence(self, device):
        q, k, v = (torch.full((length, 2, 16), math.nan).to(device) for length in (9, 5, 5))
        ends = ints(0).to(device)
        out, lse = torch.ops.metal_attn.flash_varlen_fwd(q, k, v, ends, ends, 0, 0)
        assert (out == 0).all()
        assert (lse == -math.inf).all()
        out, lse = torch.ops.metal_attn.flash_varlen_fwd(q[:0], k, v, ends, ends, 0, 0)
        assert out.shape == (0, 2, 16)
        assert lse.shape == (2, 0)

    @pytest.mark.parametrize("head_dim, v_head_dim, dtype", HEAD_DIMS)
    def test_head_dims(self, head_dim, v_head_dim, dtype, device):
        shape = {"head_dim": head_dim, "v_head_dim": v_head_dim, "dtype": dtype}
        arguments = packed(LENGTHS["three"], **shape)
        check_flash_varlen_fwd(*arguments, device=device)

    def test_equals_each_sequence_alone(self, device):
        """To the bit: where a sequence lies in the tensors changes nothing."""
        q, k, v, ends_q, ends_k, *longest = packed(LENGTHS["three"])
        q, k, v = (tensor.to(device) for tensor in (q, k, v))
        packing = [ends_q.to(device), ends_k.to(device), *longest]
        out, lse = torch.ops.metal_attn.flash_varlen_fwd(q, k, v, *packing, causal=True)
        for b in range(3):
            rows, keys = slice(*ends_q[b : b + 2]), slice(*ends_k[b : b + 2])
            alone, alone_lse = torch.ops.metal_attn.flash_fwd(
                *(t.transpose(0, 1)[None] for t in (q[rows], k[keys], v[keys])), causal=True
            )
            assert torch.equal(out[rows], alone[0].transpose(0, 1))
            assert torch.equal(lse[:, rows], alone_lse[0])

    def test_strides(self, device):
        """q, k and v of one packed projection; heads outermost."""
        q, k, v, *packing = packed([(33, 33), (20, 20)], kv_heads=4)
        expected, _ = check_flash_varlen_fwd(q, k, v, *packing, device=device)
        packing = [value.to(device) if torch.is_tensor(value) else value for value in packing]
        projection = torch.stack([q, k, v], 1).to(device)
        out, _ = torch.ops.metal_attn.flash_varlen_fwd(*projection.unbind(1), *packing)
        assert torch.equal(out.cpu(), expected)
        outermost = [t.transpose(0, 1).contiguous().to(device).transpose(0, 1) for t in (q, k, v)]
        out, _ = torch.ops.metal_attn.flash_varlen_fwd(*outermost, *packing)
        assert torch.equal(out.cpu(), expected)
        assert out.transpose(0, 1).is_contiguous()


def tables(max_q, max_k, batch=None):
    options = {}
    for seed, (side, length) in enumerate((("q", max_q), ("k", max_k))):
        cos, sin = rotary_tables(length, 8, batch=batch, seed=seed)
        options |= {f"{side}_rotary_cos": cos, f"{side}_rotary_sin": sin}
    return options


# Sequences of (33, 65), (0, 0), (7, 31) and (70, 40); maxima of 70 and 65. Features that do not
# interact share a case.
FEATURED = [(33, 65), (0, 0), (7, 31), (70, 40)]
FEATURES = {
    "windows to seqused_k, additive mask, sinks": {
        "window_size_left": 9,
        "window_size_right": 20,
        "seqused_k": ints(60, 0, 31, 1),
        "attn_mask": random_mask(4, 4, 70, 65, dtype=torch.float16),
        "softcap": 1.5,
        "learnable_sink": torch.tensor([1.0, -1.0, -math.inf, 5.0]),
    },
    "causal window at an offset, mask, slopes of each, tables": {
        "window_size_left": 9,
        "causal": True,
        "q_offset": 3,
        "attn_mask": random_mask(4, 4, 70, 65),
        "alibi_slopes": torch.rand(4, 4, generator=torch.Generator().manual_seed(0)),
        **tables(70, 65),
    },
    "chunks, mask of an even width, additive mask of one": {
        "attention_chunk": 16,
        "attn_mask": random_mask(4, 1, 70, 66),
        "attn_bias": random_mask(1, 4, 70, 66, dtype=torch.float32),
    },
    "causal chunks behind padding, interleaved": {
        "attention_chunk": 16,
        "causal": True,
        "leftpad_k": ints(3, 0, 31, 17),
        **tables(70, 65),
        "rotary_interleaved": True,
    },
    "both lengths, mask of queries, slopes, tables of each": {
        "seqused_k": ints(60, 0, 31, 30),
        "leftpad_k": ints(33, 0, 2, 35),
        "attn_mask": random_mask(4, 1, 70, 1),
        "alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4]),
        **tables(70, 65, batch=4),
    },
}


@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature, device):
    options = FEATURES[feature]
    widths = [t.shape[-1] for name, t in options.items() if name in ("attn_mask", "attn_bias")]
    longest = (0, 1) if widths and widths[0] == 66 else (0, 0)
    arguments = packed(FEATURED, spare=(3, 3), longest=longest)
    check_flash_varlen_fwd(*arguments, **options, device=device)


def test_what_lies_outside_a_sequences_keys_is_not_seen(device):
    q, k, v, *packing = packed(FEATURED)
    lengths = {"seqused_k": ints(60, 0, 31, 30), "leftpad_k": ints(33, 0, 2, 5)}
    expected = check_flash_varlen_fwd(q, k, v, *packing, **lengths, causal=True, device=device)
    starts = packing[1].tolist()
    for b, start in enumerate(starts[:-1]):
        for tensor in (k, v):
            tensor[start : start + lengths["leftpad_k"][b]] = math.nan
            tensor[start + lengths["seqused_k"][b] : starts[b + 1]] = math.nan
    arguments = on(device, dict(enumerate((q, k, v, *packing)))).values()
    out, lse = torch.ops.metal_attn.flash_varlen_fwd(*arguments, **on(device, lengths), causal=True)
    assert torch.equal(out.cpu(), expected[0])
    assert torch.equal(lse.cpu(), expected[1])


@few_examples
@given(data=st.data())
def test_every_feature_at_once(device, data):
    lengths = data.draw(
        st.lists(st.tuples(st.integers(0, 70), st.integers(0, 100)), min_size=1, max_size=3)
    )
    spare = data.draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    longest = data.draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    kv_heads, group = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    head_dim, v_head_dim = data.draw(st.sampled_from(DRAWN_HEAD_DIMS))
    arguments = packed(
        lengths,
        spare,
        longest,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        dtype=data.draw(st.sampled_from(DTYPES)),
    )
    options = any_options(
        data.draw,
        len(lengths),
        kv_heads * group,
        arguments[5],
        arguments[6],
        head_dim,
        kv_lengths=[kv_length for _, kv_length in lengths],
    )
    check_flash_varlen_fwd(*arguments, **options, device=device)
