"""The judge of scaled_dot_product_attention: torch's own in the same dtype, against float64."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

from torch_metal_attn import scaled_dot_product_attention as sdpa
from torch_metal_attn.testing.judge import near, normal, worst_of  # noqa: F401


def check(q, k, v, attn_mask=None, device="cpu", attend=sdpa, **options):
    """Runs `attend` on `device` and holds it to twice torch's own error against float64."""
    mask = attn_mask
    out = attend(
        q.to(device),
        k.to(device),
        v.to(device),
        mask if mask is None else moved(mask, device),
        **options,
    ).cpu()
    exact_mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    with sdpa_kernel(SDPBackend.MATH):
        oracle = torch_sdpa(q.double(), k.double(), v.double(), exact_mask, **options)
        low = torch_sdpa(q, k, v, mask, **options)
    assert out.dtype == q.dtype
    assert out.shape == oracle.shape
    measure = near("out", out, oracle, worst_of([(low, oracle)]))
    assert measure.ok, measure
    return out


def close(actual, expected):
    torch.testing.assert_close(actual.cpu(), expected.cpu(), rtol=1e-5, atol=1e-5)


def moved(tensor, device):
    """`tensor` on `device` with its strides."""
    if tensor.device == torch.device(device):
        return tensor
    base = tensor.as_strided((tensor.untyped_storage().size() // tensor.element_size(),), (1,), 0)
    return base.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
