"""explain(flex_attention, ...): the texts, the share of blocks that are skipped, the cost."""

import torch

from tests.flex import gallery
from tests.flex.flex_check import block_mask, home
from torch_metal_attn import explain, flex_attention, simulate


def test_texts_blocks_and_cost():
    mask = block_mask(block=16)
    shown = explain(flex_attention, *home(), gallery.tanh_softcap, mask)
    assert shown.kernel == "flash_fwd"
    assert "precise::tanh(t0)" in shown.specialisation["FLEX_SCORE"]
    assert "query >= key" in shown.specialisation["FLEX_MASK"]
    # 15 of 5 x 6 blocks.
    assert shown.reason.startswith("50.0% of the blocks skipped; ")
    whole = explain(flex_attention, *home())
    assert shown.cost.flops * 2 == whole.cost.flops
    refused = explain(flex_attention, *home(), kernel_options={"BLOCK_K": 8})
    assert "BLOCK_K" in refused.refusal


def test_gradients():
    """Those of captured tensors compute scores and dP again: two products each, beside seven."""
    table, hidden = torch.zeros(2, 3, requires_grad=True), torch.zeros(96)

    def mod(score, b, h, q_idx, kv_idx):
        return score * table[h, 0] + table[h, kv_idx % 3] + hidden[kv_idx]

    training = explain(flex_attention, *home(), mod, backward=True).training
    assert list(training.kernels) == [
        *("flash_bwd_dq", "flash_bwd_dkv"),
        *("flash_bwd_captures[0]", "flash_bwd_captures[1]"),
    ]
    assert training.inputs["captures[0]"] == table.nbytes
    alone = explain(flex_attention, *home(), backward=True).training
    assert "copies" not in alone.allocated
    assert 7 * training.cost.flops == (7 + 4) * alone.cost.flops
    leaves = [x.requires_grad_() for x in home(q_length=64, kv_length=64)]
    with simulate(count=True) as run:
        out = flex_attention(*leaves, mod)
        torch.autograd.grad(out.sum(), [*leaves, table])
    kernels = run.counters
    assert kernels["flash_bwd_captures"].launches == 2
    walks = kernels["flash_bwd_dq"].matrix_operations + kernels["flash_bwd_dkv"].matrix_operations
    assert 7 * kernels["flash_bwd_captures"].matrix_operations == 4 * walks
