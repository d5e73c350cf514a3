"""Where a score does not exist or is masked, an infinite derivative of score_mod gives no NaN."""

import torch

from tests.attention.autograd_check import normal
from tests.flex.flex_check import assert_within_twice, block_mask, gradients, home, torch_flex
from tests.helpers.mutants import mutant_tests
from torch_metal_attn import flex_attention

QUERIES, KEYS = 77, 91  # multiples of no tile
SEEN = torch.arange(KEYS) // 20 != 2


def roots(factors):
    """Its derivatives by the score and by a factor are infinite at 0."""

    def mod(score, b, h, q_idx, kv_idx):
        return torch.sqrt((score * factors[kv_idx]).abs())

    return mod


def shown(b, h, q_idx, kv_idx):
    return SEEN[kv_idx]


def problem():
    """Keys that are masked are 0, as padding is."""
    q, k, v = home(q_length=QUERIES, kv_length=KEYS)
    return (q, k * SEEN[:, None], v), normal(KEYS)


def check():
    """Against torch's function of the keys that are seen alone."""
    (q, k, v), factors = problem()
    mask = block_mask(shown, sizes=(QUERIES, KEYS))
    given = (q, k, v), roots, mask, q.dtype, [factors]
    dq, dk, dv, dfactors = gradients(flex_attention, *given, return_lse=True)[2:]
    few, own = ((q, k[:, :, SEEN], v[:, :, SEEN]), roots, None), [factors[SEEN]]
    exact = gradients(torch_flex, *few, torch.float64, own, torch.float64)[2:]
    rounded = gradients(torch_flex, *few, q.dtype, own)[2:]
    hidden = ~SEEN
    assert_within_twice(dq, exact[0], rounded[0])
    for i, gradient in ((1, dk), (2, dv)):
        assert_within_twice(gradient[:, :, SEEN], exact[i], rounded[i])
        assert (gradient[:, :, hidden] == 0).all()
    assert_within_twice(dfactors[SEEN], exact[3], rounded[3])
    assert (dfactors[hidden] == 0).all()


def test_reference():
    check()


# By kernel: its text, and what a fault makes of it.
MUTANTS = {
    check: """
        flash_bwd_dq: keys that do not exist:
            {~visible.apply<false>(slopes, first_query, block + column, 0.0f); =>~}
        flash_bwd_dkv: queries that do not exist:
            {~visible.apply<true>(slopes, lane_key, lane_query, 0.0f); =>~}
        flash_bwd_dq, flash_bwd_dkv: masked keys: {~slope = 0.0f; =>~}
        flash_bwd_captures: captured tensors: exists {~&& score.y != -INFINITY =>~}
    """,
}


test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(MUTANTS)
