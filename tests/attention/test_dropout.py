"""Dropout: the random numbers, and the same mask in every kernel."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.attention.flash_bwd_check import run
from tests.attention.held_cases import case
from tests.helpers.judged import judge
from tests.helpers.mutants import mutant_tests
from torch_metal_attn import dropout_mask
from torch_metal_attn.call import philox

STATE = (2**40 + 12345, -7)  # all four words differ


def check_masks(device, *, head_dim=48, v_head_dim=48, dtype=torch.float32, p=0.3, state=STATE):
    """Scores of 0 make weights equal, and identity matrices make each result a single weight."""
    batch, heads, q_length, kv_length = 2, 3, 37, 43

    def unit(length, columns):
        return torch.eye(length, columns).to(dtype).expand(batch, heads, length, columns)

    def filled(length, columns, value):
        return torch.full((batch, heads, length, columns), value, dtype=dtype)

    zero_q, zero_k = filled(q_length, head_dim, 0.0), filled(kv_length, head_dim, 0.0)
    options = {"dropout_p": p, "rng_state": torch.tensor(state)}
    unit_v = unit(kv_length, v_head_dim)
    out, lse = run("flash_fwd", device, zero_q, zero_k, unit_v, **options)

    def gradients(dout, q, k, v):
        # delta is 0 if out is 0. The gradient of a score is then its weight, or 0 if it is dropped.
        zero_out = torch.zeros_like(dout)
        return run("flash_bwd", device, dout, None, q, k, v, zero_out, lse, **options)

    ones = filled(q_length, v_head_dim, 1.0), filled(kv_length, v_head_dim, 1.0)
    dq, *_ = gradients(ones[0], zero_q, unit(kv_length, head_dim), ones[1])
    _, dk, *_ = gradients(ones[0], unit(q_length, head_dim), zero_k, ones[1])
    _, _, dv, *_ = gradients(unit(q_length, v_head_dim), zero_q, zero_k, unit_v)
    masks = {"forward": out, "dq": dq, "dk": dk[..., :q_length].mT, "dv": dv[..., :q_length].mT}
    expected = dropout_mask(options["rng_state"], p, batch, heads, q_length, kv_length)
    for name, mask in masks.items():
        kept = (mask[..., :kv_length] != 0).cpu()
        assert torch.equal(kept, expected), f"{name} differs from dropout_mask"


# kat_vectors in the Random123 library of the paper's authors. A line has 4 words of the counter, 2
# words of the key and the 4 words of the result.
KNOWN_ANSWERS = [
    "00000000 " * 6 + "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    "ffffffff " * 6 + "408f276d 41c83b0e a20bc7c6 6d5451fd",
    "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 d16cfe09 94fdcceb 5001e420 24126ea1",
]
INT64 = st.integers(-(2**63), 2**63 - 1)


def one_philox(counter, key):
    """The paper's algorithm on Python's integers."""
    a, b, c, d = counter
    steps = (0x9E3779B9, 0xBB67AE85)
    for i in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        keys = [(word + i * step) % 2**32 for word, step in zip(key, steps, strict=True)]
        a, b = second >> 32 ^ b ^ keys[0], second % 2**32
        c, d = first >> 32 ^ d ^ keys[1], first % 2**32
    return a, b, c, d


class TestPhilox:
    @pytest.mark.parametrize("text", KNOWN_ANSWERS)
    def test_known_answers(self, text):
        words = [int(word, 16) for word in text.split()]
        assert one_philox(words[:4], words[4:6]) == tuple(words[6:])

    @given(st.lists(st.integers(0, 2**32 - 1), min_size=6, max_size=6))
    def test_philox4x32_equals_the_paper_for_any_words(self, words):
        counter, key = words[:4], words[4:]
        actual = philox.philox4x32(torch.tensor(counter).unbind(), torch.tensor(key).unbind())
        assert tuple(map(int, actual)) == one_philox(counter, key)

    @given(INT64, INT64, st.floats(0, 1, exclude_min=True))
    def test_the_mask_compares_these_words_with_p(self, seed, offset, p):
        kept = dropout_mask(torch.tensor([seed, offset]), p, 2, 2, 3, 6)
        assert kept.shape == (2, 2, 3, 6)
        halves = [(x % 2**32, x >> 32 & 0xFFFFFFFF) for x in (seed, offset)]
        key = one_philox((*halves[1], 0, 0), halves[0])[:2]
        for b, h, i, j in torch.cartesian_prod(*map(torch.arange, kept.shape)).tolist():
            word = one_philox((j // 4, i, h, b), key)[j % 4]
            assert kept[b, h, i, j] == (word / 2**32 >= p)

    def test_a_part_of_the_mask_equals_the_full_mask(self):
        state = torch.tensor([3, 4])
        whole = dropout_mask(state, 0.4, 3, 4, 65, 70)
        part = philox.keep_mask(state, 0.4, range(1, 3), 4, range(20, 50), 70)
        assert torch.equal(part, whole[1:, :, 20:50])


@pytest.mark.parametrize(
    "options",
    [
        # These cases have tiles with one and two row fragments, blocks of 8 to 32 keys, SIMD groups
        # that share rows, and sliced results. Rows of 45 columns are read element by element.
        {"head_dim": 128, "v_head_dim": 128, "dtype": torch.bfloat16},
        {"head_dim": 288, "v_head_dim": 45, "dtype": torch.float16},
        {"p": 1e-9, "state": (0, 0)},
        {"p": 0.05, "state": (-1, -1)},
        {"state": (2**63 - 1, -(2**63))},
    ],
    ids=str,
)
def test_the_mask_is_the_same_in_every_kernel(device, options):
    check_masks(device, **options)


def masks():
    check_masks(torch.device("cpu"))


def values():
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 48, "dtype": "float32"}
    judge(case(**sizes, dropout_p=0.3))


# All kernels include the dropout header. Each fault of the header is planted in one kernel only.
MUTANTS = {
    masks: """
        flash_bwd_dq: other numbers in backward: uint4(key_index / 4, query{~=> + 1~}, head, batch)
        flash_fwd: transposed: uint4({~key_index / 4, query => query, key_index / 4~}, head, batch)
        flash_bwd_dq: head ignored: uint4(key_index / 4, query, {~head => 0~}, batch)
        flash_bwd_dkv: batch ignored: uint4(key_index / 4, query, head, {~batch => 0~})
        flash_fwd: head, batch swapped: uint4(key_index / 4, query, {~head, batch => batch, head~})
        flash_bwd_dkv: head of dk and dv not moved: head = {~query_head => 0~}
        flash_bwd_dq: seed's high word ignored: {~uint(seed >> 32) => 0~}
        flash_bwd_dkv: offset ignored: {~ulong(rng_state[1]) => 0~}
        flash_fwd: offset's high word ignored: {~uint(offset >> 32) => 0~}
        flash_bwd_dq: nine rounds: round < {~10 => 9~}
        flash_bwd_dkv: kept weights dropped: word {~> => <=~} last_dropped
        flash_fwd: one word of two: lane == 0 ? words.{~xy => xx~}
        flash_bwd_dq: words not exchanged:
            {~simd_shuffle_xor(other_words.x, ushort(1)) => other_words.x~}
        flash_bwd_dkv: words of keys not exchanged:
            {~simd_shuffle_xor(word_of(words, other), ushort(2 * step) => word_of(words, other~})
    """,
    values: """
        flash_bwd_dq, flash_bwd_dkv: other mask: uint4(key_index / 4, query, head, batch{~=> + 1~})
        flash_bwd_dkv, flash_fwd, flash_bwd_dq: no 1 / (1 - p): {~tile.scale(keep_scale); =>~}
        flash_fwd: forward without dropout: if ({~DROPOUT => false~}) { //
        flash_bwd_dkv: dv of all weights: {~dropout.apply(dropped, kept); =>~}
        flash_bwd_dkv: dk of all products: {~dropout.apply(gradients, kept); =>~}
        flash_bwd_dq: dq of all products: {~dropout.apply(gradients, => (void)(~} dropout.kept<
        flash_bwd_dkv: dk of dropped weights:
            {~=> dropout.apply(weights, kept);~} differentiate(gradients, weights, block_statistics)
    """,
}

test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(MUTANTS)
