"""Wheels and sdists of this tree, without compiling again."""

import shutil
import sys
import sysconfig
from pathlib import Path

from tests.helpers.forks import run_program
from torch_metal_attn.runtime import extension

ROOT = Path(__file__).parents[2]
IS_CHECKOUT = (ROOT / "setup.py").exists() and (ROOT / "torch_metal_attn/_C.abi3.so").exists()


SETUP = """
import runpy, sys
sys.argv[0] = "setup.py"
runpy.run_path("setup.py", run_name="__main__")
"""


def run_setup(folder, *commands, **environment):
    arguments = ["egg_info", "--egg-base", folder, *commands]
    done = run_program(SETUP, *arguments, folder=ROOT, **environment)
    assert done.returncode == 0, done.stderr
    return done


def build_wheel(folder):
    """A wheel, in `folder`, of the tree and of the extension that is already built."""
    base = folder / "build"
    lib = f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    built = base / lib / "torch_metal_attn"
    built.mkdir(parents=True)
    shutil.copy(extension.PATH, built)
    # As an option of `build` on the command line it would run `build`, and so compile.
    config = folder / "setup.cfg"
    config.write_text(f"[build]\nbuild_base = {base}\n")
    bdist = ["bdist_wheel", "--skip-build", "--bdist-dir", folder / "bdist", "--dist-dir", folder]
    done = run_setup(folder, "build_py", *bdist, DIST_EXTRA_CONFIG=str(config))
    assert "build_ext" not in done.stdout
    return next(folder.glob("*.whl"))
