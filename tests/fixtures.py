"""Fixtures that need torch: the device under test, poisoned memory and others."""

import os

import pytest
import torch

from tests.conftest import WHERE
from tests.helpers.home import UNKNOWN_CORES
from torch_metal_attn import mps, simulate
from torch_metal_attn.runtime import extension, session
from torch_metal_attn.runtime.device import best_device
from torch_metal_attn.tuned import loading

os.environ[loading.SETTING] = loading.OFF  # a table of this machine would change tiles
loading.install()


def place():
    problem = mps.problem()
    return f"the simulator ({problem})" if problem else "mps"


def pytest_report_header():
    return f"{WHERE}: {place()}"


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[WHERE] = place()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol():
    """Fill uninitialised tensors with NaN, so that unwritten results show, and seed torch."""
    torch.default_generator.manual_seed(0)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return (yield)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def device():
    """mps if it is usable, else the CPU with every op in the simulator and every access checked."""
    with best_device(check=True) as best:
        yield best


@pytest.fixture(params=["reference", "simulator"])
def backend(request):
    if request.param == "reference":
        yield request.param
        return
    with simulate(check=True):
        yield request.param


@pytest.fixture
def unlaunched(monkeypatch):
    """In simulate(), ops check their arguments and build launches, but no kernel is compiled."""
    monkeypatch.setattr(session, "_launch", lambda *launch: None)


@pytest.fixture
def gpu():
    library = extension.load()
    yield lambda name: library.metal_attn_set_gpu_name(name.encode())
    library.metal_attn_set_gpu_name(b"")
    if torch.backends.mps.is_available():
        extension.tell_gpu(library)


@pytest.fixture
def m5(gpu):
    """A GPU with matrix units."""
    gpu("Apple M5")


@pytest.fixture
def cores():
    library = extension.load()
    yield library.metal_attn_set_gpu_cores
    library.metal_attn_set_gpu_cores(UNKNOWN_CORES)
    if torch.backends.mps.is_available():
        extension.tell_gpu(library)
