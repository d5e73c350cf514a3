"""Planted faults of dropout: the tests' own checks must see every one of them."""

import pytest
import torch

from tests.attention.dropout_check import check_dropout, check_masks
from tests.helpers.mutants import each_unchanged, expect_caught, plant_among
from torch_metal_attn import simulate

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
    "other numbers in backward": (masks, DQ, COUNTER, COUNTER.replace("query", "query + 1")),
    "dq with another mask": (values, DQ, COUNTER, COUNTER.replace("batch", "batch + 1")),
    "dk and dv with another mask": (values, DKV, COUNTER, COUNTER.replace("batch", "batch + 1")),
    "no 1 / (1 - p) in dk and dv": (values, DKV, SCALED, ""),
    "no 1 / (1 - p) in forward": (values, FORWARD, SCALED, ""),
    "no 1 / (1 - p) in dq": (values, DQ, SCALED, ""),
    "row and column swapped": (masks, FORWARD, COUNTER, "uint4(query, key_index / 4, head, batch)"),
    "head ignored": (masks, DQ, COUNTER, COUNTER.replace("head", "0")),
    "batch ignored": (masks, DKV, COUNTER, COUNTER.replace("batch", "0")),
    "head and batch swapped": (
        masks,
        FORWARD,
        COUNTER,
        COUNTER.replace("head, batch", "batch, head"),
    ),
    "head of dk and dv not moved": (masks, DKV, "head = query_head", "head = 0"),
    "seed's high word ignored": (masks, DQ, "uint(seed >> 32)", "0"),
    "offset ignored": (masks, DKV, "ulong(rng_state[1])", "0"),
    "offset's high word ignored": (masks, FORWARD, "uint(offset >> 32)", "0"),
    "nine rounds": (masks, DQ, "round < 10", "round < 9"),
    "the others dropped": (masks, DKV, "word > last_dropped", "word <= last_dropped"),
    "one word of two": (masks, FORWARD, "lane == 0 ? words.xy", "lane == 0 ? words.xx"),
    "words not exchanged": (masks, DQ, "simd_shuffle_xor(others.x, ushort(1))", "others.x"),
    "words of keys not exchanged": (masks, DKV, EXCHANGED, "word_of(words, other)"),
    "forward without dropout": (values, FORWARD, "#if DROPOUT\n    // Sums", "#if 0\n    // Sums"),
    "dv of all weights": (values, DKV, "dropout.apply(dropped, kept);", ""),
    "dk of all products": (values, DKV, "dropout.apply(gradients, kept);", ""),
    "dq of all products": (
        values,
        DQ,
        "#if DROPOUT\n        dropout.apply(gradients",
        "#if 0\n        dropout.apply(gradients",
    ),
    "dk of dropped weights": (
        *(
            values,
            DKV,
            "weights.fragments[i][j] * (gradients",
            "dropped.fragments[i][j] * (gradients",
        ),
    ),
}


def shown_by(check, family):
    return [mutant[2:] for mutant in MUTANTS.values() if mutant[:2] == (check, family)]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_is_caught(mutant, monkeypatch):
    check, family, old, new = MUTANTS[mutant]
    plant_among(monkeypatch, family, old, new, shown_by(check, family))
    expect_caught(check)


@pytest.mark.parametrize("check", [masks, values])
def test_the_unchanged_kernels_pass(check):
    for family in {mutant[1] for mutant in MUTANTS.values()}:
        for _ in each_unchanged(family, shown_by(check, family)):
            with simulate(check=True):
                check()
