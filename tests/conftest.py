"""The choice of tests, hypothesis' budget, and the module of fixtures."""

import atexit
import gc
import os

import pytest
from hypothesis import HealthCheck, settings

# --first-cases leaves out tests of builds, processes and generated code, and of the fake shims.
SLOW = (
    "/packaging/",
    "commands/test_fuzz_runs.py::test_workers_that_die",
    "docs/test_recipe.py",
    "ring_",
    "runtime/test_extension.py",
    "simulator/test_alone.py",
    "simulator/test_cache.py",
    "test_export.py",
    "test_view_offsets.py",
    "tuning/test_tune.py::test_end_to_end",
)

WHERE = "kernels run in"
PLACES = pytest.StashKey[set[str]]()

os.environ["HF_HUB_OFFLINE"] = "1"
# Inductor's code is not under test, so it is compiled without a pool of processes, and without
# vector instructions, whose headers take longer to compile.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"
gc.disable()  # until the tests are collected, which saves 3 s

# Kernels compile on first use, and machines may be slow or paused, so there are no deadlines. Every
# example may use the same device.
settings.register_profile(
    "default",
    deadline=None,
    max_examples=15,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.register_profile("thorough", settings.get_profile("default"), max_examples=300)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_addoption(parser):
    parser.addoption(
        "--first-cases",
        action="store_true",
        help="run the first case of each test function, and nothing that takes many seconds",
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


def pytest_configure(config):
    # xdist's controller runs no tests, and without torch it starts the workers seconds earlier.
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("tests.fixtures")
    config.stash[PLACES] = set()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Records where a worker's kernels ran, from tests/fixtures.py."""
    output = getattr(node, "workeroutput", {})  # a worker that died has no output
    node.config.stash[PLACES].update([output[WHERE]] if WHERE in output else [])


def pytest_terminal_summary(terminalreporter, config):
    for place in sorted(config.stash[PLACES]):
        terminalreporter.write_line(f"{WHERE}: {place}")


def pytest_collection_finish():
    """Keep imported objects out of collections, each of which would take half a second."""
    gc.freeze()
    gc.callbacks.append(keep)
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def keep(phase, info):
    """Freeze the objects that survive a full collection, so that the next one is as short."""
    if phase == "stop" and info["generation"] == 2:
        gc.freeze()


def pytest_unconfigure():
    if keep in gc.callbacks:  # xdist's controller collects no tests
        gc.callbacks.remove(keep)
    # Unfreeze at exit, or libraries report leaks; not earlier, because pytest collects once more.
    atexit.register(gc.unfreeze)
