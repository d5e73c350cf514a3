"""M3 and later GPUs have room for larger tiles: those of M1 are in all other tests."""

import pytest
import torch

from tests.attention.flash_bwd_check import check_flash_bwd
from tests.attention.flash_fwd_check import check_flash_decode, check_flash_fwd, make_qkv
from torch_metal_attn.runtime import extension

F16, F32 = torch.float16, torch.float32
FORWARD = [(64, F32), (128, F32), (80, F16), (128, F16), (256, F16)]
DECODE = [(80, F32), (128, F32), (256, F16), (512, F16)]
BACKWARD = [(128, F16), (128, F32)]


@pytest.fixture
def later(gpu):
    """Makes the GPU an M4, for which `explained` must differ from what it is for an M1."""

    def make_later(explained):
        gpu("Apple M1")
        before = explained()
        gpu("Apple M4")
        assert explained() != before

    return make_later


def tiles(op, *arguments, **options):
    """The kernels' defines."""
    explain = getattr(torch.ops.metal_attn_explain, op)
    return [launch["defines"] for launch in extension.launches(explain(*arguments, **options))]


@pytest.mark.parametrize("head_dim, dtype", FORWARD)
def test_forward(head_dim, dtype, later, device):
    qkv = make_qkv(head_dim=head_dim, dtype=dtype)
    later(lambda: tiles("flash_fwd", *qkv, causal=True))
    check_flash_fwd(*qkv, causal=True, q_offset=20, device=device)


@pytest.mark.parametrize("head_dim, dtype", DECODE)
def test_decode(head_dim, dtype, later, device):
    qkv = make_qkv(q_length=1, head_dim=head_dim, dtype=dtype)
    later(lambda: tiles("flash_decode", *qkv))
    check_flash_decode(*qkv, device=device)


@pytest.mark.parametrize("head_dim, dtype", BACKWARD)
def test_backward(head_dim, dtype, later, device):
    q, k, v = make_qkv(head_dim=head_dim, dtype=dtype)
    statistics = (q, k, v, q, torch.zeros(q.shape[:3]))
    later(lambda: tiles("flash_bwd", q, None, *statistics, exact_delta=True, causal=True))
    check_flash_bwd(q, k, v, causal=True, q_offset=20, device=device)
