"""Shared by every test: the device under test, poisoned memory and hypothesis' budget."""

import ctypes
import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from torch_metal_attn.device import best_device
from torch_metal_attn.simulator import session

os.environ["HF_HUB_OFFLINE"] = "1"

# Kernels compile on first use, so no example has a fair deadline; the device serves every example.
settings.register_profile(
    "default",
    deadline=None,
    max_examples=15,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
settings.register_profile("thorough", settings.get_profile("default"), max_examples=300)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Uninitialised tensors hold NaN: what a kernel leaves unwritten shows.

    PyTorch fills those of Python, but not those that C++ allocates through the stable ABI, so the
    simulator's launches fill their outputs first: bytes of 0xff are NaN in every float dtype.
    """
    launch = session._launch

    def launch_into_nan(family, kernel, defines, buffers, *sizes):
        for buffer in buffers:
            if buffer.writable and buffer.bytes <= 2**26:
                ctypes.memset(buffer.storage, 0xFF, buffer.bytes)
        launch(family, kernel, defines, buffers, *sizes)

    monkeypatch.setattr(session, "_launch", launch_into_nan)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def device():
    """mps where there is one; else the CPU with every op in the simulator, every access checked."""
    with best_device(check=True) as best:
        yield best
