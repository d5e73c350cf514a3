"""flash_fwd_tensor with score_mod, mask_mod and block lists."""

import pytest
import torch

from tests.flex.flex_check import alibi_of_slopes, block_mask, check_flex, rand, tanh_softcap
from tests.flex.test_blocks import FAULT_KINDS, LIST_MUTANTS, contradictory, invalid_entries_are_nan
from tests.helpers.mutants import mutant_tests
from torch_metal_attn import allow_tf32, explain, flex_attention, simulate

pytestmark = pytest.mark.usefixtures("m5")
KERNEL = "flash_fwd_tensor"


def check_all():
    ours = (alibi_of_slopes, contradictory())
    check_flex(*rand(), alibi_of_slopes, block_mask(), simulated=False, ours=ours)


def test_features_on_tensor_tiles():
    with simulate(check=True) as run:
        check_all()
    assert set(run.counters) == {KERNEL}
    assert "tensor tiles" in explain(flex_attention, *rand(), None, contradictory()).reason


def test_features_in_tf32():
    """TF32 has as many bits as half precision, so both have the same bound."""
    q, k, v = (x.float() for x in rand())
    exact = flex_attention(q, k, v, alibi_of_slopes, contradictory())
    with simulate(check=True) as run, allow_tf32():
        out = flex_attention(q, k, v, alibi_of_slopes, contradictory())
    assert set(run.counters) == {KERNEL}
    assert not torch.equal(out, exact)
    torch.testing.assert_close(out, exact, rtol=2**-9, atol=2**-9 * exact.abs().max().item())


def test_entries_out_of_range_are_nan():
    with simulate(check=True) as run:
        invalid_entries_are_nan()
    assert set(run.counters) == {KERNEL}


def test_without_lists():
    check_flex(*rand(heads=4, kv_heads=2), tanh_softcap)


@pytest.mark.parametrize("block", [(24, 32), (16, 24)])
def test_blocks_that_no_tensor_tile_fits(block):
    mask = block_mask(block=block)
    shown = explain(flex_attention, *rand(), None, mask)
    assert shown.kernel == "flash_fwd"
    assert "would span two blocks of the BlockMask" in shown.reason


test_mutant_is_caught, test_the_unchanged_kernel_passes = mutant_tests(
    {check_all: LIST_MUTANTS}, KERNEL, fault=FAULT_KINDS
)
