"""Default tiles of M1 fit its registers: a sample of bench/results/registers.md."""

import pytest
import torch

from bench.bench_flash_fwd import FEATURES
from bench.bench_registers import attention, decoding
from bench.targets import REGISTERS

SAMPLE = [
    *((torch.float16, 128, kernel) for kernel in ("flash_fwd", "flash_bwd_dq", "flash_decode")),
    *((torch.float16, head_dim, "flash_bwd_dkv") for head_dim in (64, 128)),
    (torch.float16, 64, "flash_fwd"),
    (torch.float32, 64, "flash_bwd_dq"),
]

# The back end spills one value of 8 bytes since the kernel's steps are functions of headers.
SPILLS = {(torch.float16, 128, "flash_bwd_dkv"): 1}


@pytest.mark.parametrize("dtype, head_dim, kernel", SAMPLE)
def test_defaults_do_not_spill(dtype, head_dim, kernel):
    """And the chooser reckons what they take within 10 %."""
    feature = "none" if kernel == "flash_decode" else "causal"
    given = (dtype, head_dim, feature, FEATURES[feature])
    chosen = [decoding(dtype, head_dim, 32, "none", FEATURES["none"])]
    chosen += attention(*given) if kernel != "flash_decode" else []
    one = next(s for s in chosen if s.kernel == kernel)
    found = one.compiled()
    assert found.spilled == SPILLS.get((dtype, head_dim, kernel), 0)
    assert found.used <= REGISTERS
    assert abs(one.reckoned - found.used) <= 0.1 * found.used
