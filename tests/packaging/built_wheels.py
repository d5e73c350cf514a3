"""Builds wheels and sdists of this tree without compiling it again."""

from pathlib import Path

from tests.helpers.forks import run_program

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
