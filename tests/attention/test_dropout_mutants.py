"""Planted faults of dropout: the tests' own checks must see every one of them."""

import torch

from tests.attention.dropout_check import check_dropout, check_masks
from tests.helpers.mutants import mutant_tests

CPU = torch.device("cpu")


def masks():
    check_masks(CPU)


def values():
    check_dropout(CPU, shape={"batch": 2})


FORWARD, DQ, DKV = "flash_fwd", "flash_bwd_dq", "flash_bwd_dkv"
COUNTER = "uint4(key_index / 4, query, head, batch)"
SCALED = "tile.scale(keep_scale);"
EXCHANGED = "simd_shuffle_xor(word_of(words, other), ushort(2 * step))"

# The check that sees the fault, the kernel that has it, and what it changes in its text. What is
# wrong in the header that all share is planted in one, in turn.
MUTANTS = {
    masks: {
        "other numbers in backward": (DQ, COUNTER, COUNTER.replace("query", "query + 1")),
        "row and column swapped": (FORWARD, COUNTER, "uint4(query, key_index / 4, head, batch)"),
        "head ignored": (DQ, COUNTER, COUNTER.replace("head", "0")),
        "batch ignored": (DKV, COUNTER, COUNTER.replace("batch", "0")),
        "head and batch swapped": (FORWARD, COUNTER, COUNTER.replace("head, batch", "batch, head")),
        "head of dk and dv not moved": (DKV, "head = query_head", "head = 0"),
        "seed's high word ignored": (DQ, "uint(seed >> 32)", "0"),
        "offset ignored": (DKV, "ulong(rng_state[1])", "0"),
        "offset's high word ignored": (FORWARD, "uint(offset >> 32)", "0"),
        "nine rounds": (DQ, "round < 10", "round < 9"),
        "the others dropped": (DKV, "word > last_dropped", "word <= last_dropped"),
        "one word of two": (FORWARD, "lane == 0 ? words.xy", "lane == 0 ? words.xx"),
        "words not exchanged": (DQ, "simd_shuffle_xor(others.x, ushort(1))", "others.x"),
        "words of keys not exchanged": (DKV, EXCHANGED, "word_of(words, other)"),
    },
    values: {
        "dq with another mask": (DQ, COUNTER, COUNTER.replace("batch", "batch + 1")),
        "dk and dv with another mask": (DKV, COUNTER, COUNTER.replace("batch", "batch + 1")),
        "no 1 / (1 - p) in dk and dv": (DKV, SCALED, ""),
        "no 1 / (1 - p) in forward": (FORWARD, SCALED, ""),
        "no 1 / (1 - p) in dq": (DQ, SCALED, ""),
        "forward without dropout": (FORWARD, "if (DROPOUT) {\n      //", "if (false) {\n      //"),
        "dv of all weights": (DKV, "dropout.apply(dropped, kept);", ""),
        "dk of all products": (DKV, "dropout.apply(gradients, kept);", ""),
        "dq of all products": (
            DQ,
            "dropout.apply(gradients, dropout.kept<",
            "(void)(dropout.kept<",
        ),
        "dk of dropped weights": (
            DKV,
            "differentiate(gradients, weights, block_statistics)",
            "differentiate(gradients, dropped, block_statistics)",
        ),
    },
}

test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(MUTANTS)
