"""Planted faults of dropout: the tests' own checks must see every one of them."""

import torch

from tests.attention.dropout_check import check_masks
from tests.attention.held_cases import case
from tests.helpers.judged import judge
from tests.helpers.mutants import mutant_tests

CPU = torch.device("cpu")


def masks():
    check_masks(CPU)


def values():
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 48, "dtype": "float32"}
    judge(case(**sizes, dropout_p=0.3))


FORWARD, DQ, DKV = "flash_fwd", "flash_bwd_dq", "flash_bwd_dkv"

# The check that sees the fault, the kernel that has it, and what it changes in its text. What is
# wrong in the header that all share is planted in one, in turn.
MUTANTS = {
    masks: """
        flash_bwd_dq: other numbers in backward: uint4(key_index / 4, query{~=> + 1~}, head, batch)
        flash_fwd: row and column swapped:
            uint4({~key_index / 4, query => query, key_index / 4~}, head, batch)
        flash_bwd_dq: head ignored: uint4(key_index / 4, query, {~head => 0~}, batch)
        flash_bwd_dkv: batch ignored: uint4(key_index / 4, query, head, {~batch => 0~})
        flash_fwd: head and batch swapped:
            uint4(key_index / 4, query, {~head, batch => batch, head~})
        flash_bwd_dkv: head of dk and dv not moved: head = {~query_head => 0~}
        flash_bwd_dq: seed's high word ignored: {~uint(seed >> 32) => 0~}
        flash_bwd_dkv: offset ignored: {~ulong(rng_state[1]) => 0~}
        flash_fwd: offset's high word ignored: {~uint(offset >> 32) => 0~}
        flash_bwd_dq: nine rounds: round < {~10 => 9~}
        flash_bwd_dkv: the others dropped: word {~> => <=~} last_dropped
        flash_fwd: one word of two: lane == 0 ? words.{~xy => xx~}
        flash_bwd_dq: words not exchanged: {~simd_shuffle_xor(others.x, ushort(1)) => others.x~}
        flash_bwd_dkv: words of keys not exchanged:
            {~simd_shuffle_xor(word_of(words, other), ushort(2 * step) => word_of(words, other~})
    """,
    values: """
        flash_bwd_dq: dq with another mask: uint4(key_index / 4, query, head, batch{~=> + 1~})
        flash_bwd_dkv: dk and dv with another mask:
            uint4(key_index / 4, query, head, batch{~=> + 1~})
        flash_bwd_dkv: no 1 / (1 - p) in dk and dv: {~tile.scale(keep_scale); =>~}
        flash_fwd: no 1 / (1 - p) in forward: {~tile.scale(keep_scale); =>~}
        flash_bwd_dq: no 1 / (1 - p) in dq: {~tile.scale(keep_scale); =>~}
        flash_fwd: forward without dropout: if ({~DROPOUT => false~}) { //
        flash_bwd_dkv: dv of all weights: {~dropout.apply(dropped, kept); =>~}
        flash_bwd_dkv: dk of all products: {~dropout.apply(gradients, kept); =>~}
        flash_bwd_dq: dq of all products: {~dropout.apply(gradients, => (void)(~} dropout.kept<
        flash_bwd_dkv: dk of dropped weights:
            differentiate(gradients, {~weights => dropped~}, block_statistics)
    """,
}

test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(MUTANTS)
