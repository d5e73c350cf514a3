"""The pytest plugin of the installed wheel, in projects that do not import this one."""

import os
import subprocess
import sys
import zipfile

import pytest

from tests.helpers.forks import run_program
from tests.packaging.built_wheels import IS_CHECKOUT
from torch_metal_attn import mps

pytestmark = [
    pytest.mark.skipif(not IS_CHECKOUT, reason="not a source checkout built in place"),
    pytest.mark.skipif(mps.usable(), reason="the kernels of these projects run on the GPU"),
]
pytest.importorskip("setuptools")

RUN = """
import sys, pytest, torch
sys.path.insert(0, sys.argv[1])
code = pytest.main(["-p", "no:cacheprovider", *sys.argv[2:]])
assert not hasattr(torch.mps.compile_shader, "__wrapped__"), "it must be torch's again"
sys.exit(code)
"""
KERNEL = '"kernel void add(device float* x, uint i [[thread_position_in_grid]]) { x[i] += 1; }"'


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture
def run(installed, tmp_path):
    """Runs pytest in a project of these files and returns its output."""

    def run(*options, **files):
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)
        return run_program(RUN, installed, *options, folder=tmp_path).stdout

    return run


def test_projects_without_kernels_import_no_torch(installed, tmp_path):
    (tmp_path / "test_nothing.py").write_text(
        "import sys\n"
        "def test_nothing(pytestconfig):\n"
        "    assert pytestconfig.pluginmanager.has_plugin('torch_metal_attn_pytest')\n"
        "    assert not {'torch', 'torch_metal_attn'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    path = {"PYTHONPATH": str(installed)}
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | path, capture_output=True)
    assert done.returncode == 0, done.stdout.decode()


def test_the_fixtures_run_kernels_and_report_faults(run):
    printed = run(
        test_kernels=f"""
import pytest, torch

@pytest.fixture(scope="module")
def library(compile_shader):
    return compile_shader({KERNEL})

def test_right(library, shader_device):
    x = torch.zeros(8, device=shader_device)
    library.add(x)
    assert x.tolist() == [1] * 8
    with pytest.raises(TypeError, match="torch's kernels take no seed|unexpected|incompatible"):
        library.add(x, seed=1)

def test_wrong(library, shader_device):
    library.add(torch.zeros(8, device=shader_device), threads=9)

def test_wrong_arguments(library):
    library.add()

def test_torch_is_left_alone():
    with pytest.raises(RuntimeError, match="MPS is not available"):
        torch.mps.compile_shader({KERNEL})

def test_arguments_match_torch(compile_shader):
    with pytest.raises(TypeError):
        compile_shader({KERNEL}, check=False)

@pytest.mark.parametrize("declared, says", [
    ("// in doubles\\n#define T double", "program_source:3: double: `double` is not in Metal"),
    ("\\nint T(int n) {{ return n ? T(n - 1) : 0; }}", "program_source:2: recursion: function `T`"),
    ("// \u00e9", "program_source:1: ascii: torch passes shader text to Metal as ASCII"),
])
def test_what_torch_refuses(compile_shader, declared, says):
    kernel = declared + "\\nkernel void k(device float* x) {{ x[0] = T(x[0]); }}"
    kernel = kernel if "T" in declared else {KERNEL} + declared
    with pytest.raises(SyntaxError, match=says):
        compile_shader(kernel)
"""
    )
    assert "2 failed, 6 passed" in printed
    assert "FAILED test_kernels.py::test_wrong" in printed
    assert "SimulatorFault: out_of_bounds: read of 4 bytes at byte 32 of buffer(0)" in printed
    assert "program_source:1 in add" in printed
    assert "library.add(torch.zeros(8, device=shader_device), threads=9)" in printed
    assert "torch_metal_attn/simulator/" not in printed, "tracebacks show the caller's lines only"


def test_simulate_metal_replaces_compile_shader(run):
    printed = run(
        "-o",
        "simulate_metal=true",
        kernels=f"from torch.mps import compile_shader as shader\nlibrary = shader({KERNEL})\n",
        conftest="import kernels\n",
        test_kernels="""
import pytest, threading, torch
from kernels import library
from torch_metal_attn.simulator import SimulatorFault

def test_right():
    x = torch.zeros(8)
    thread = threading.Thread(target=library.add, args=[x])
    thread.start()
    thread.join()
    assert x.tolist() == [1] * 8

def test_wrong():
    with pytest.raises(SimulatorFault):
        library.add(torch.zeros(8), threads=9)
""",
    )
    assert "2 passed" in printed
