"""The wheel of this tree."""

import shutil
import sys
import sysconfig

import pytest

from tests.packaging.built_wheels import run_setup
from torch_metal_attn.runtime import extension


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The wheel, with the extension that is already built."""
    folder = tmp_path_factory.mktemp("wheel")
    base = folder / "build"
    lib = f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    built = base / lib / "torch_metal_attn"
    built.mkdir(parents=True)
    shutil.copy(extension.PATH, built)
    # On the command line the option would run `build`, which compiles.
    config = folder / "setup.cfg"
    config.write_text(f"[build]\nbuild_base = {base}\n")
    bdist = ["bdist_wheel", "--skip-build", "--bdist-dir", folder / "bdist", "--dist-dir", folder]
    done = run_setup(folder, "build_py", *bdist, DIST_EXTRA_CONFIG=str(config))
    assert "build_ext" not in done.stdout
    return next(folder.glob("*.whl"))
