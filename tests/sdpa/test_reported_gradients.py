"""The backward pass."""

import torch

from tests.sdpa.reports import Report, normal, qkv, reported
from torch_metal_attn import scaled_dot_product_attention as sdpa
from torch_metal_attn import simulate


@reported(
    Report(
        "pytorch#179294",
        "No backward pass; training takes the math path.",
        "Both passes are kernels that store no scores.",
        lambda length: qkv((2, 4, length, 8)),
    ),
)
class TestBackward:
    def test_gradients(self, report, device):
        def gradients(attend, dtype, device="cpu"):
            leaves = [t.to(device, dtype).requires_grad_() for t in report.problem(33)]
            dout = normal(2, 4, 33, 8, seed=3).to(device, dtype)
            return [g.cpu() for g in torch.autograd.grad(attend(*leaves), leaves, dout)]

        torch_sdpa = torch.nn.functional.scaled_dot_product_attention
        exact = gradients(torch_sdpa, torch.float64)
        low = gradients(torch_sdpa, torch.float32)
        ours = gradients(sdpa, torch.float32, device)
        for gradient, torchs, oracle in zip(ours, low, exact, strict=True):
            assert (gradient - oracle).abs().max() <= 2 * (torchs - oracle).abs().max()

    def test_nothing_holds_the_scores(self, report):
        leaves = [t.requires_grad_() for t in report.problem(256)]
        with simulate(record=True) as run:
            out = sdpa(*leaves)
            out.backward(torch.ones_like(out))
        kernels = [launch.kernel for launch in run.recorded]
        assert kernels == ["flash_fwd", "flash_bwd_delta", "flash_bwd_dq", "flash_bwd_dkv"]
        sizes = {b.storage.numel() for launch in run.recorded for b in launch.buffers}
        assert max(sizes) == out.nbytes
