"""Runs every test without a table of tiles in use, and has a fake GPU for `tune`."""

import pytest

from tests.tuning.fake_gpu import CPU, M2_MAX, FakeGpu
from torch_metal_attn.tools import tune
from torch_metal_attn.tuned import loading, tiles


@pytest.fixture(autouse=True)
def no_table():
    before, in_use = loading._loaded, tiles._in_use
    loading._loaded = loading.Loaded()
    tiles.use(None)
    yield
    loading._loaded = before
    tiles.use(in_use)


@pytest.fixture
def fake_gpu(monkeypatch, tmp_path):
    """A Mac with the reference's results and the fake GPU's times, whose cache is tmp_path."""
    fake = FakeGpu()
    monkeypatch.setenv("TORCH_METAL_ATTN_CACHE", str(tmp_path))
    monkeypatch.delenv(loading.SETTING, raising=False)
    monkeypatch.setattr(loading, "this_machine", lambda: M2_MAX)
    monkeypatch.setattr(tune.mps, "problem", lambda: "")
    monkeypatch.setattr(tune, "DEVICE", CPU)
    monkeypatch.setattr(tune, "timer_of", lambda device: fake.timer)
    monkeypatch.setattr(tiles, "make", fake.remember(tiles.make))
    monkeypatch.setattr(tune, "calls_of", fake.calls_of)
    monkeypatch.setattr(tune, "_call_of", lambda *arguments: fake.launch)
    return fake
