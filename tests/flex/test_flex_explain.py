"""explain(flex_attention, ...): the texts, the share of blocks that are skipped, the cost."""

from torch.nn.attention.flex_attention import create_block_mask

from tests.flex import gallery
from tests.flex.flex_check import home
from torch_metal_attn import explain, flex_attention


def test_texts_blocks_and_cost():
    mask = create_block_mask(gallery.causal, None, None, 80, 96, device="cpu", BLOCK_SIZE=16)
    shown = explain(flex_attention, *home(), gallery.tanh_softcap, mask)
    assert shown.kernel == "flash_fwd"
    assert "precise::tanh(t0)" in shown.specialisation["FLEX_SCORE"]
    assert "query >= key" in shown.specialisation["FLEX_MASK"]
    # 15 of 5 x 6 blocks.
    assert shown.reason.startswith("50.0% of the blocks skipped; ")
    whole = explain(flex_attention, *home())
    assert shown.cost.flops * 2 == whole.cost.flops


def test_refusals():
    q, k, v = home()
    assert explain(flex_attention, q, k[..., :8], v).refusal == (
        "key has a head dim of 8 and query of 16; they must be equal"
    )
    assert "must be a function of" in explain(flex_attention, q, k, v, lambda s: s).refusal
    assert "BLOCK_M" in explain(flex_attention, q, k, v, kernel_options={"BLOCK_M": 8}).refusal
