"""score_mods and mask_mods that several tests share; test_gallery.py has the others."""

import torch

Q_LENGTH, KV_LENGTH, HEADS = 80, 96, 2
SLOPES = torch.tensor([0.5, 0.0625])


def alibi_of_slopes(score, b, h, q_idx, kv_idx):
    return score - (q_idx - kv_idx).abs() * SLOPES[h]


def tanh_softcap(score, b, h, q_idx, kv_idx):
    return 2 * torch.tanh(score / 2)


def full(b, h, q_idx, kv_idx):
    return b.new_ones(size=(), dtype=torch.bool, device=b.device)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def sliding_window_causal(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx <= 20)
