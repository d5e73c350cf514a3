"""Strides and shapes: transposed views, broadcasts, five dimensions, values of another width."""

import torch

from tests.sdpa.reports import Report, normal, qkv, reported
from tests.sdpa.sdpa_check import check
from torch_metal_attn import scaled_dot_product_attention as sdpa


def from_rows(batch, length, heads, head_dim):
    """As models make them: (batch, length, heads, head_dim), heads and rows then swapped."""
    return [t.transpose(1, 2) for t in qkv((batch, length, heads, head_dim))]


@reported(
    Report(
        "pytorch#163597",
        "2.8.0: wrong for transposed q of at most 8 rows.",
        "Reads q, k and v with their strides.",
        lambda: from_rows(1, 8, 4, 64),
    ),
    Report(
        "pytorch#181133",
        "Wrong for permuted q, k and v; right if contiguous.",
        "Reads q, k and v with their strides.",
        lambda: from_rows(84, 3, 3, 64),
    ),
    Report(
        "pytorch#189631",
        "A query with fewer batch dimensions than key raises.",
        "Broadcasts as on the CPU.",
        lambda: [normal(1, 1, 64), *[normal(2, 1, 1, 64, seed=1)] * 2],
    ),
    Report(
        "pytorch#147443",
        "2.6.0: five dimensions crash.",
        "Runs; leading dimensions are merged without a copy.",
        lambda: qkv((3, 2, 4, 49, 32)),  # of the report's 592 windows 2
    ),
    Report(
        "pytorch#176767",
        "The output is as wide as q where v is narrower.",
        "The output is as wide as v.",
        lambda: qkv((1, 1, 16, 32), v_shape=(1, 1, 16, 24)),
    ),
)
def test_layouts(report, device):
    check(*report.problem(), device=device)


@reported(
    Report(
        "pytorch#170837 pytorch#170874",
        "2.9.1: BERT differs in a batch (transposed inputs).",
        "The same bits in a batch and alone.",
        lambda: from_rows(1, 7, 12, 64),
    ),
)
def test_batched(report, device):
    alone = report.problem()
    twice = [torch.cat([t.transpose(1, 2)] * 2).transpose(1, 2) for t in alone]
    mask = torch.ones(2, 1, 7, 7, dtype=torch.bool)
    out = check(*twice, mask, device=device)
    expected = sdpa(*(t.to(device) for t in alone), mask[:1].to(device)).cpu()
    assert torch.equal(out, torch.cat([expected] * 2))
