"""Every test begins and ends without a table of tiles."""

import pytest

from tests.tuning.fake_gpu import FakeGpu
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
    """A fake Mac whose cache is tmp_path."""
    fake = FakeGpu()
    fake.install(monkeypatch, tmp_path)
    return fake
