"""Examples of the FlexAttention gallery (PyTorch's blog and attention-gym), by name.

One for each way to capture tensors and to compose; each op has its case in test_mods.py.
"""

import torch
from torch.nn.attention.flex_attention import and_masks, or_masks

from tests.attention.autograd_check import normal

Q_LENGTH, KV_LENGTH, HEADS = 80, 96, 2
LONGEST = max(Q_LENGTH, KV_LENGTH)

# Tensors that the examples index.
DOCUMENT = torch.repeat_interleave(torch.arange(4), torch.tensor([17, 40, 3, LONGEST - 60]))
PREFIX = torch.tensor([11, 37])
RELATIVE_BIAS = normal(HEADS, 2 * LONGEST)
WHOLE_BIAS = normal(2, HEADS, Q_LENGTH, KV_LENGTH).half()
SLOPES = torch.tensor([0.5, 0.0625])
# Kinds of tokens, of transfusion: those of an image see all of it.
MODALITIES = torch.tensor([[0, 24], [40, 64]])


def relative_bias(score, b, h, q_idx, kv_idx):
    return score + RELATIVE_BIAS[h, q_idx - kv_idx + LONGEST]


def whole_bias(score, b, h, q_idx, kv_idx):
    return score + WHOLE_BIAS[b][h][q_idx, kv_idx]


def alibi(score, b, h, q_idx, kv_idx):
    scale = torch.exp2(-((h + 1) * 8.0 / HEADS))
    return score + (kv_idx - q_idx) * scale


def alibi_of_slopes(score, b, h, q_idx, kv_idx):
    return score - (q_idx - kv_idx).abs() * SLOPES[h]


def tanh_softcap(score, b, h, q_idx, kv_idx):
    return 2 * torch.tanh(score / 2)


SCORE_MODS = [relative_bias, whole_bias, alibi, alibi_of_slopes, tanh_softcap]


def full(b, h, q_idx, kv_idx):
    return b.new_ones(size=(), dtype=torch.bool, device=b.device)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def sliding_window_causal(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx <= 20)


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


MASK_MODS = [full, causal, prefix_lm, document_sliding_window, transfusion, seldom_seen]
