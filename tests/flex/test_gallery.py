"""The FlexAttention gallery (PyTorch's blog and attention-gym) against torch's own in float64.

One example for each way to capture tensors and to compose; each op has its case in test_mods.py.
"""

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, or_masks

from tests.attention.autograd_check import normal
from tests.flex.flex_check import block_mask, check_flex_gradients, home
from tests.flex.gallery import HEADS, KV_LENGTH, Q_LENGTH, causal, sliding_window_causal

DOCUMENT = torch.repeat_interleave(torch.arange(4), torch.tensor([17, 40, 3, KV_LENGTH - 60]))
PREFIX = torch.tensor([11, 37])
RELATIVE_BIAS = normal(HEADS, 2 * KV_LENGTH)
WHOLE_BIAS = normal(2, HEADS, Q_LENGTH, KV_LENGTH).half()
# Tokens of images, in transfusion.
MODALITIES = torch.tensor([[0, 24], [40, 64]])


def relative_bias(score, b, h, q_idx, kv_idx):
    return score + RELATIVE_BIAS[h, q_idx - kv_idx + KV_LENGTH]


def whole_bias(score, b, h, q_idx, kv_idx):
    return score + WHOLE_BIAS[b][h][q_idx, kv_idx]


def alibi(score, b, h, q_idx, kv_idx):
    scale = torch.exp2(-((h + 1) * 8.0 / HEADS))
    return score + (kv_idx - q_idx) * scale


def prefix_lm(b, h, q_idx, kv_idx):
    return or_masks(causal, lambda b, h, q_idx, kv_idx: kv_idx <= PREFIX[b])(b, h, q_idx, kv_idx)


def document_sliding_window(b, h, q_idx, kv_idx):
    def same_document(b, h, q_idx, kv_idx):
        return DOCUMENT[q_idx] == DOCUMENT[kv_idx]

    return and_masks(sliding_window_causal, same_document)(b, h, q_idx, kv_idx)


def transfusion(b, h, q_idx, kv_idx):
    """Causal, and whole within each image."""
    seen = causal(b, h, q_idx, kv_idx)
    for i in range(len(MODALITIES)):
        first, end = MODALITIES[i][0], MODALITIES[i][1]
        both = (q_idx >= first) & (q_idx < end) & (kv_idx >= first) & (kv_idx < end)
        seen = seen | both
    return seen


def seldom_seen(b, h, q_idx, kv_idx):
    """Rows that see nothing, and heads that differ."""
    return (kv_idx % 5 == h) & (q_idx % 3 != 0)


PAIRS = [
    (relative_bias, document_sliding_window),
    (whole_bias, transfusion),
    (alibi, prefix_lm),
    (None, seldom_seen),
]


@pytest.mark.parametrize(
    "pair, simulated", [*((pair, False) for pair in PAIRS), *((pair, True) for pair in PAIRS[:2])]
)
def test_examples(pair, simulated):
    """The kernels of a pair are a specialisation, which the smallest blocks keep small."""
    score_mod, mask_mod = pair
    mask = block_mask(mask_mod, 2, HEADS, block=8)
    check_flex_gradients(*home(batch=2), score_mod, mask, simulated=simulated)
