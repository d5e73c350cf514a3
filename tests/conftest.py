"""Shared by every test: the device under test, poisoned memory and hypothesis' budget."""

import atexit
import gc
import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from bench.replay.cases import UNKNOWN_CORES
from torch_metal_attn import extension, mps, simulate
from torch_metal_attn.device import best_device
from torch_metal_attn.simulator import session
from torch_metal_attn.tuning import loading

# Left out by --first-cases, as is the fake of torch's shims: builds, processes, generated code.
SLOW = ("/packaging/", "simulator/test_cache.py", "test_export.py", "test_view_offsets.py", "ring_")

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ[loading.SETTING] = loading.OFF  # a table of this machine would change tiles
loading.install()
gc.disable()  # until the tests are collected: there is nothing to find, in 3 s

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


def pytest_addoption(parser):
    parser.addoption(
        "--first-cases",
        action="store_true",
        help="of each test function its first case, and nothing that takes many seconds",
    )


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--first-cases"):
        return
    seen = set()
    kept, others = [], []
    for item in items:
        function = item.nodeid.split("[")[0]
        slow = "libraries" in item.fixturenames or any(part in function for part in SLOW)
        (others if slow or function in seen else kept).append(item)
        seen.add(function)
    config.hook.pytest_deselected(items=others)
    items[:] = kept


def pytest_report_header():
    problem = mps.problem()
    return f"kernels run in: {f'the simulator ({problem})' if problem else 'mps'}"


def pytest_collection_finish():
    """What was imported stays: collections, which transformers and torch.compile ask for, pass it.

    They take half a second each otherwise, and with Python's own thresholds a tenth of the time.
    """
    gc.freeze()
    gc.callbacks.append(keep)
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def keep(phase, info):
    """What a full collection leaves stays too, so that the next one is as short."""
    if phase == "stop" and info["generation"] == 2:
        gc.freeze()


def pytest_unconfigure():
    if keep in gc.callbacks:  # xdist's controller collects no tests
        gc.callbacks.remove(keep)
    # At exit, or libraries report that they leak; not yet, as pytest collects once more.
    atexit.register(gc.unfreeze)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Uninitialised tensors hold NaN, those that ops allocate too: what stays unwritten shows."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def device():
    """mps where there is one; else the CPU with every op in the simulator, every access checked."""
    with best_device(check=True) as best:
        yield best


@pytest.fixture(params=["reference", "simulator"])
def backend(request):
    """CPU tensors without and with the simulator."""
    if request.param == "reference":
        yield request.param
        return
    with simulate(check=True):
        yield request.param


@pytest.fixture
def unlaunched(monkeypatch):
    """In the simulator ops check arguments and build their launches, and no kernel is compiled."""
    monkeypatch.setattr(session, "_launch", lambda *launch: None)


@pytest.fixture
def gpu():
    """Tells the extension which GPU there is; the one that there was is told at the end."""
    library = extension.load()
    yield lambda name: library.metal_attn_set_gpu_name(name.encode())
    library.metal_attn_set_gpu_name(b"")
    if torch.backends.mps.is_available():
        extension.tell_gpu(library)


@pytest.fixture
def cores():
    """Tells the extension how many cores the GPU has."""
    library = extension.load()
    yield library.metal_attn_set_gpu_cores
    library.metal_attn_set_gpu_cores(UNKNOWN_CORES)
    if torch.backends.mps.is_available():
        extension.tell_gpu(library)
