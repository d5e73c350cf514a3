"""Masks and causality: broadcasts, rows without a key, long masks, leaks of later keys."""

import contextlib
import math

import pytest
import torch

from tests.sdpa.reports import Report, normal, qkv, reported
from tests.sdpa.sdpa_check import check
from torch_metal_attn import scaled_dot_product_attention as sdpa
from torch_metal_attn import sdpa_replaced, simulate


def broadcast_over_heads():
    mask = torch.zeros(2, 1, 8, 8)
    mask[0, 0, 4:, :4] = -math.inf
    return [normal(2, 4, 8, 64)] * 3, {"attn_mask": mask}


def grouped_queries():
    tensors = qkv((2, 4, 3, 8), (2, 2, 3, 8))
    return tensors, {"attn_mask": torch.ones(3, 3), "enable_gqa": True}


def last_keys_of_many():
    """A little over 2**15, of which the last are visible; fewer queries and heads than reported."""
    keys, visible = 2**15 + 256, 512
    mask = torch.full((1, 1, 1, keys), -1e4, dtype=torch.bfloat16)
    mask[..., keys - visible :] = 0.0
    tensors = qkv((1, 2, 8, 64), (1, 1, keys, 64), dtype=torch.bfloat16)
    return tensors, {"attn_mask": mask, "enable_gqa": True, "scale": 64**-0.5}


@reported(
    Report(
        "pytorch#184180",
        "A mask broadcast over heads is read at a wrong offset.",
        "Masks have strides, 0 where they broadcast.",
        broadcast_over_heads,
    ),
    Report(
        "pytorch#149132",
        "A mask with grouped queries ends the process (2.7.0.dev).",
        "Runs; both are arguments of one kernel.",
        grouped_queries,
    ),
    Report(
        "mlx#3361",
        "A mask's column is a 16-bit number: wrong beyond 32,768 keys.",
        "Right beyond 32,768 keys.",
        last_keys_of_many,
    ),
)
def test_masks(report, device):
    tensors, options = report.problem()
    check(*tensors, device=device, **options)


def one_row_hidden():
    mask = torch.tensor([[[[False, False], [True, True]]]])
    return qkv((1, 1, 2, 4)), mask


def one_sequence_padded():
    """Of a batch of two, the second has no keys at all."""
    mask = torch.ones(2, 1, 8, 8, dtype=torch.bool)
    mask[1] = False
    return qkv((2, 4, 8, 64)), mask


@reported(
    Report(
        "pytorch#156707",
        "A row whose keys are all masked is NaN; on the CPU it is 0.",
        "The row is 0.",
        one_row_hidden,
    ),
    Report(
        "mlx#2608",
        "A row whose keys are all masked is NaN, which spreads.",
        "The row is 0, and the others are right.",
        one_sequence_padded,
    ),
)
def test_hidden_rows(report, device):
    tensors, mask = report.problem()
    out = check(*tensors, mask, device=device)
    hidden = ~mask.any(-1, keepdim=True)
    assert (out.masked_select(hidden) == 0).all()
    assert out.masked_select(~hidden).ne(0).all()


@reported(
    Report(
        "pytorch#195910",
        "float16 and bfloat16: 3 rows of each 4 see later keys.",
        "No row sees a later key, to the bit.",
        lambda: qkv((1, 4, 64, 64)),
    ),
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_later_keys(report, dtype, device):
    q, k, v = (tensor.to(dtype) for tensor in report.problem())
    out = check(q, k, v, device=device, is_causal=True)
    for seen in (33, 34, 35):  # the report's groups are of four rows, one of them 32 to 35
        later = (torch.cat([t[:, :, :seen], t[:, :, seen:] + 1], 2).to(device) for t in (k, v))
        changed = sdpa(q.to(device), *later, is_causal=True).cpu()
        assert torch.equal(changed[:, :, :seen], out[:, :, :seen])
        assert not torch.equal(changed[:, :, seen:], out[:, :, seen:])


@reported(
    Report(
        "pytorch#181856",
        "is_causal with attn_mask ends the process.",
        "RuntimeError; sdpa_replaced() leaves it to torch.",
        lambda: (qkv((1, 2, 4, 64), (1, 2, 16, 64)), torch.zeros(1, 2, 4, 16, dtype=torch.bool)),
    ),
)
@pytest.mark.filterwarnings("ignore:sdpa_replaced")
def test_causal_with_a_mask(report, device):
    tensors, mask = report.problem()
    refusal = "Explicit attn_mask should not be set when is_causal=True"
    with pytest.raises(RuntimeError, match=refusal):
        sdpa(*(t.to(device) for t in tensors), mask.to(device), is_causal=True)
    with simulate(), sdpa_replaced() as calls, contextlib.suppress(RuntimeError):
        torch.nn.functional.scaled_dot_product_attention(*tensors, mask, is_causal=True)
    assert (calls.replaced, calls.left_alone) == (0, {refusal: 1})
