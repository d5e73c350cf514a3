"""The FlexAttention gallery against torch's own flex_attention in float64, forward and backward."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from tests.flex import gallery
from tests.flex.flex_check import check_flex_gradients, home

NAMES = {mod.__name__: mod for mod in (*gallery.SCORE_MODS, *gallery.MASK_MODS)}
WHICH = torch.zeros((), dtype=torch.int32)


def one_of(mods):
    """The mod whose number WHICH holds: all of them are one specialisation."""

    def chosen(*arguments):
        # Of a position, so that it is not computed before the kernel runs.
        which = WHICH + 0 * arguments[-1]
        result = mods[0](*arguments)
        for i, mod in enumerate(mods[1:], start=1):
            result = torch.where(which == i, mod(*arguments), result)
        return result

    return chosen


ONE_SCORE_MOD = one_of(gallery.SCORE_MODS)
ONE_MASK_MOD = one_of(gallery.MASK_MODS)


def problem(name):
    """q, k, v of two batches, and what torch and the kernels are given of score and mask."""
    mod = NAMES[name]
    sizes = (2, 2, gallery.Q_LENGTH, gallery.KV_LENGTH)
    mask_mod = mod if mod in gallery.MASK_MODS else gallery.full
    # The smallest tiles have the least code.
    block_mask = create_block_mask(mask_mod, *sizes, device="cpu", BLOCK_SIZE=8)
    return home(batch=2), mod if mod in gallery.SCORE_MODS else None, block_mask


def select(name):
    """What the kernels are given in place of the example."""
    _, score_mod, block_mask = problem(name)
    among = gallery.MASK_MODS if score_mod is None else gallery.SCORE_MODS
    WHICH.fill_(among.index(NAMES[name]))
    if score_mod is None:
        block_mask.mask_mod = ONE_MASK_MOD
        return None, block_mask
    return ONE_SCORE_MOD, block_mask


@pytest.mark.parametrize("simulated", [False, True], ids=["reference", "kernels"])
@pytest.mark.parametrize("name", NAMES)
def test_examples(name, simulated):
    qkv, score_mod, block_mask = problem(name)
    ours = select(name) if simulated else None
    check_flex_gradients(*qkv, score_mod, block_mask, simulated=simulated, ours=ours)
