"""Python's garbage collector is paused while a text is rewritten, and is as before afterwards."""

import gc

import pytest

from tests.helpers.forks import in_child
from torch_metal_attn.simulator import build

SOURCE = "kernel void k(device int* x) { x[0] = 7; }"


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv(build.cache.OVERRIDE, str(tmp_path))
    monkeypatch.setattr(build, "_programs", {})
    monkeypatch.setattr(build, "_images", {})


@pytest.fixture(params=[True, False])
def enabled(request):
    """Whether the caller has the collector on."""
    assert gc.isenabled()
    if not request.param:
        gc.disable()
    yield request.param
    gc.enable()


@pytest.fixture
def paused(monkeypatch):
    """By pass: whether the collector was off when it ran."""
    seen = {}

    def noted(name):
        original = getattr(build, name)

        def wrapper(*args):
            seen[name] = not gc.isenabled()
            return original(*args)

        monkeypatch.setattr(build, name, wrapper)

    noted("rewrite")
    noted("instrument")
    return seen


def test_paused_in_passes_only(enabled, paused):
    build.build(SOURCE, check=True).whole_image()
    assert paused == {"rewrite": True, "instrument": True}
    assert gc.isenabled() == enabled


def test_as_before_after_an_error(enabled, paused):
    with pytest.raises(build.ShaderCompileError):
        build.build("kernel void k(device int* x { }")
    assert paused == {"rewrite": True}
    assert gc.isenabled() == enabled


def test_on_in_a_child_of_a_process_that_paused_it():
    with build._collector_paused():
        assert in_child(gc.isenabled)
        assert not gc.isenabled()
    assert gc.isenabled()
