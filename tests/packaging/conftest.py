"""The wheel of this tree, which takes seconds to build, for all who look into one."""

import pytest

from tests.packaging.built_wheels import build_wheel


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("wheel"))
