"""The simulator without the rest of the package, as docs/simulator.md describes it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import torch_metal_attn
from tests.runtime.fake_mps.build import of_the_extension

PACKAGE = Path(torch_metal_attn.__file__).parent
ENGINE = PACKAGE.parent / "csrc" / "simulator"
PROGRAM = """
import ctypes
import importlib
import pkgutil
import sys

import torch
import metal_simulator
from metal_simulator import SimulatorFault, compile_shader, engine

for module in pkgutil.walk_packages(metal_simulator.__path__, "metal_simulator."):
    importlib.import_module(module.name)

engine.use(lambda: ctypes.CDLL(sys.argv[1]))
library = compile_shader('''
#include <metal_stdlib>
using namespace metal;
kernel void twice(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  x[i] *= 2.0f;
}
''', check=True)
x = torch.arange(5.0)
library.twice(x)
assert x.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
try:
    library.twice(x, threads=6, group_size=6)
except SimulatorFault as fault:
    print(fault.kind)
assert not any(name.startswith("torch_metal_attn") for name in sys.modules)
"""


def test_the_simulator_works_as_a_package_of_another_name(tmp_path):
    compiler = shutil.which("c++")
    if compiler is None or not ENGINE.is_dir():
        pytest.skip("needs a C++ compiler and the source of the engine")
    shutil.copytree(PACKAGE / "simulator", tmp_path / "metal_simulator")
    library, sources = tmp_path / "libengine.so", [*ENGINE.glob("*.cpp")]
    objects = of_the_extension(sources)  # compiling takes half a minute
    command = [compiler, "-std=c++20", "-O0", "-shared", "-fPIC", "-o", library]
    subprocess.run([*command, *(objects.get(source, source) for source in sources)], check=True)
    command = [sys.executable, "-c", PROGRAM, library]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "out_of_bounds\n"
