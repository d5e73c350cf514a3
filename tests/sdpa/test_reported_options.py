"""Dropout, scale and torch's layer."""

import pytest
import torch
from torch.nn.functional import linear

from tests.sdpa.reports import Report, normal, reported
from tests.sdpa.sdpa_check import check
from torch_metal_attn import scaled_dot_product_attention as sdpa
from torch_metal_attn import sdpa_replaced, simulate


@reported(
    Report(
        "pytorch#184126",
        "dropout_p is ignored.",
        "Drops weights, and scales those that it keeps.",
        lambda: normal(1, 2, 4, 8),
    ),
)
@pytest.mark.parametrize("dropout_p", [0.5, 0.9])
def test_dropout(report, dropout_p, device):
    q = report.problem().to(device)
    each_key = torch.eye(4, 8, device=device).expand(1, 2, 4, 8)
    weights = sdpa(q, q, each_key)[..., :4]
    torch.manual_seed(0)
    kept = sdpa(q, q, each_key, dropout_p=dropout_p)[..., :4]
    dropped = kept == 0
    assert 0 < dropped.sum() < dropped.numel()
    torch.testing.assert_close(kept, (weights / (1 - dropout_p)).masked_fill(dropped, 0.0))
    torch.manual_seed(0)
    torch.testing.assert_close(sdpa(q, q, q, dropout_p=dropout_p), kept @ q)


@reported(
    Report(
        "pytorch#184122",
        "A second call with another scale uses the first one's.",
        "Each call uses its own scale.",
        lambda: normal(1, 2, 4, 8),
    ),
)
def test_scale(report, device):
    q = report.problem()
    default = check(q, q, q, device=device)
    assert not torch.allclose(check(q, q, q, device=device, scale=2.0), default)


@reported(
    Report(
        "pytorch#181725",
        "MultiheadAttention takes 9 times as long as SDPA.",
        "Its attention is that one launch (not timed).",
        lambda: (normal(1, 32, 512), normal(1, 256, 512, seed=1)),
    ),
)
@torch.no_grad()
def test_layer(report, device):
    torch.manual_seed(0)
    x, memory = report.problem()
    layer = torch.nn.MultiheadAttention(512, 8, batch_first=True).eval()
    low = layer(x, memory, memory, need_weights=False)[0]
    projections = zip((x, memory, memory), layer.in_proj_weight.chunk(3), strict=True)
    heads = [linear(t, weight).unflatten(-1, (8, 64)).transpose(1, 2) for t, weight in projections]
    layer.to(device)
    with simulate(check=True) as run, sdpa_replaced() as calls:
        arguments = [t.to(device) for t in (x, memory, memory)]
        out = layer(*arguments, need_weights=False)[0].cpu()
        sdpa(*(head.to(device) for head in heads))
    assert (calls.replaced, calls.left_alone) == (1, {})
    if device.type == "cpu":
        of_layer, alone = [(launch.kernel, launch.defines, launch.grid) for launch in run.launches]
        assert of_layer == alone
    layer.cpu().double()
    exact = layer(*(t.double() for t in (x, memory, memory)), need_weights=False)[0]
    error, torchs = ((result - exact).abs().max() for result in (out, low))
    assert error <= 2 * torchs
