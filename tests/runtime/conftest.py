"""The fake of torch's shims for mps."""

import sys

import pytest

from tests.helpers.shared import folder_of_all_workers
from tests.runtime.fake_mps.build import VARIANTS, FakeMps, build, compiler


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    if sys.platform != "linux" or compiler() is None:
        pytest.skip("the fake shim needs Linux and a C++ compiler")
    folder = folder_of_all_workers(tmp_path_factory)
    with pytest.MonkeyPatch.context() as patch:
        texts = folder / "texts"
        texts.mkdir(exist_ok=True)
        patch.setenv("TMPDIR", str(texts))  # receives texts that do not compile
        yield build(folder / "fake_mps")


@pytest.fixture(scope="session")
def fakes(libraries):
    return {variant: FakeMps(variant, library) for variant, library in libraries.items()}


@pytest.fixture(params=list(VARIANTS))
def fake(request, fakes):
    fakes[request.param].clear()
    return fakes[request.param]


@pytest.fixture
def any_fake(fakes):
    fakes["bytes"].clear()
    return fakes["bytes"]
