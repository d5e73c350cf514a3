"""The folder of `make hf-kernel`, loaded by Hugging Face's kernels library."""

import json
import platform

import pytest

from tests.helpers.forks import run_program
from tests.packaging.built_wheels import IS_CHECKOUT
from torch_metal_attn import mps

pytestmark = pytest.mark.skipif(not IS_CHECKOUT, reason="not a source checkout built in place")
pytest.importorskip("setuptools")
hf_kernel = pytest.importorskip("hf_kernel", reason="no .ci folder or no packaging")
pytest.importorskip("kernels")

ON_MPS = mps.usable()
# `kernels` picks the stable-ABI variant of this machine, or `torch-metal` on an older macOS.
VARIANT = f"torch-stable-abi210-cpu-{platform.machine()}-{platform.system().lower()}"
VARIANT = "torch-metal" if mps.available() else VARIANT.replace("arm64-darwin", "aarch64-darwin")

USE = """
import os, sys
import torch
from kernels import get_kernel

kernel = get_kernel("someone/torch-metal-attn", version=1)
folder = os.environ["LOCAL_KERNELS"].partition("=")[2]
assert kernel.__file__.startswith(folder), kernel.__file__
assert sys.modules["torch_metal_attn"].__file__.startswith(folder)
assert kernel is get_kernel("someone/torch-metal-attn", version=1)

q, k, v = (torch.randn(2, 5, 4, 16, device=sys.argv[1]) for _ in range(3))
out = kernel.flash_attn_func(q, k, v, causal=True)
q, k, v = (t.transpose(1, 2) for t in (q, k, v))
expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-5, atol=1e-5)
if sys.argv[1] == "cpu":
    with kernel.simulate(check=True) as run:
        kernel.flash_attn_func(*(torch.randn(1, 3, 1, 16) for _ in range(3)))
    print("kernels:", *run.counters)
print("version:", kernel.__version__)
"""


@pytest.fixture(scope="module")
def layout(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hf")
    for variant in {VARIANT, *hf_kernel.MACOS_VARIANTS}:
        hf_kernel.write_variant(wheel, folder, variant)
    return folder


def run(layout, script, *arguments):
    kernels = f"someone/torch-metal-attn={layout}"
    environment = {"LOCAL_KERNELS": kernels, "HF_HUB_OFFLINE": "1"}
    return run_program(script, *arguments, folder=layout, **environment)


def test_the_kernel_loads_through_local_kernels(layout):
    done = run(layout, USE, "mps" if ON_MPS else "cpu")
    assert done.returncode == 0, done.stderr
    assert f"version: {hf_kernel.project_version()}" in done.stdout
    assert ON_MPS or "kernels: flash_decode" in done.stdout


def test_a_process_loads_one_version(layout):
    other = "import sys, types; m = types.ModuleType('torch_metal_attn'); m.__version__ = '9'\n"
    other += "m.__file__ = '/elsewhere'; sys.modules['torch_metal_attn'] = m\n"
    done = run(layout, other + USE, "cpu")
    assert done.returncode != 0
    message = "torch_metal_attn 9 is loaded from /elsewhere; a process can load only one"
    assert f"ImportError: {message}" in done.stderr


def test_variants_have_the_files_of_the_wheel_and_unique_names(layout):
    names = set()
    for variant in hf_kernel.MACOS_VARIANTS:
        folder = layout / "build" / variant
        assert (folder / "torch_metal_attn" / "_shaders" / "flash_fwd.metal").exists()
        assert (folder / "torch_metal_attn" / "_C.abi3.so").exists()
        metadata = json.loads((folder / "metadata.json").read_text())
        assert metadata["backend"] == {"type": "metal"}
        assert metadata["id"].isidentifier()
        names.add(metadata["id"])
    assert len(names) == len(hf_kernel.MACOS_VARIANTS)
