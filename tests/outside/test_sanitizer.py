"""compute-sanitizer's runs, as far as they need no GPU: recording, compiling, packing, reading."""

import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.bench.test_agx import TEXT
from tests.outside.sanitizer import cases as problems
from tests.outside.sanitizer import faults, manifest, pack, sanitize
from tests.outside.sanitizer.collect import Collection, Names, Source
from tests.outside.sanitizer.manifest import Dispatch, Manifest, Problem, Program
from torch_metal_attn import simulate
from torch_metal_attn.runtime import shaders
from torch_metal_attn.simulator.build import ShaderCompileError


def test_ptx_has_the_buffers_and_threads():
    text, program = Source(TEXT, "products", 64, {"COUNT": 2, "ELEMENT": "half"}).compile()
    assert (program.entry, program.slots) == ("gpu_products", [0, 1, 3])
    for part in (".maxntid 64, 1, 1", "bar.sync", "shfl.sync.bfly", "f32.f16.f16"):
        assert part in text


def test_a_fault_of_the_text_is_its_compilers_message():
    with pytest.raises(ShaderCompileError, match="COUNT"):
        Source(TEXT, "products", 64).compile()


def test_a_kernel_that_is_not_there():
    with pytest.raises(ValueError, match="no kernel sums; it has products"):
        Source(TEXT, "sums", 64, {"COUNT": 2}).compile()


def test_lines_of_the_metal_text_are_in_the_ptx(tmp_path):
    collection, data = Collection(), {}
    (case,) = problems.cases("^softmax: plain$")
    pack.add(collection, case, data)
    collection.write(tmp_path, 1)
    (name,) = collection.sources
    assert manifest.read(tmp_path) == collection.manifest
    text = (tmp_path / f"{name}.ptx").read_text()
    assert re.search(r'\.file\s+\d+ "[^"]*softmax\.metal"', text)
    assert ".loc" in text
    assert data["softmax: plain/in/x"].nbytes == data["softmax: plain/out/result0"].nbytes > 0


def test_small_problems_have_every_kernel():
    """Each of every family but the probes', and those of Metal 4 that no NVIDIA GPU runs.

    flash_bwd_captures adds to what torch has set to zero, and a recording has launches alone.
    """
    found = set()
    for case in problems.cases():
        with simulate(record=True) as run:
            case.call(**case.tensors)
        found |= {(launch.family, launch.kernel) for launch in run.recorded}
        assert run.recorded, case.name
    families = set(shaders.families()) - {"probe", "flash_bwd_captures", *shaders.LANGUAGES}
    assert {family for family, _ in found} == families
    for family in families:
        text = shaders.source(family)
        kernels = set(re.findall(r"\[\[kernel[^\]]*\]\]\s*void\s+(\w+)\(", text))
        assert kernels == {kernel for other, kernel in found if other == family}, family


def test_faults_are_planted_in_every_kernel(tmp_path):
    """One of each tool; those of barriers only where the compiled kernel has one."""
    collection, data = Collection(), {}
    for case in problems.cases("^(softmax|apply_causal|rope|merge|index)"):
        pack.add(collection, case, data)
    for name, source in collection.sources.items():
        has_barrier = source.kernel == "softmax" and "#define ROW_SIMDGROUPS 1\n" not in source.text
        (tmp_path / f"{name}.ptx").write_text("bar.sync" if has_barrier else "")
    faults.plant(collection, tmp_path)
    planted = {}
    for problem in collection.manifest.problems:
        if problem.kind == "fault":
            planted.setdefault(problem.about["kernel"], []).append(problem.about["tool"])
    memory = ["initcheck", "memcheck"]
    assert sorted(planted.pop("softmax")) == [*memory, "racecheck", "synccheck"]
    assert planted.pop("apply_causal_mask") == ["memcheck"]  # it works in place
    assert {tuple(sorted(tools)) for tools in planted.values()} == {tuple(memory)}
    racy = next(p for p in collection.manifest.problems if p.name == "fault racecheck softmax")
    text = collection.sources[racy.dispatches[-1].program].text
    assert faults.BARRIER not in text


def test_names_follow_storages():
    x, other = torch.empty(10), torch.empty(6)
    names = Names({"x": x})
    assert names.of(x[3:]) == "x"
    assert names.of(other) == names.of(other.view(2, 3)) == "scratch0"
    assert names.of(torch.empty(2)) == "scratch1"
    assert names.scratch == {"scratch0": 24, "scratch1": 8}


def test_equal_sources_are_one_program():
    collection = Collection()
    name = collection.add(Source("text", "k", 32))
    assert collection.add(Source("text", "k", 32)) == name
    assert collection.add(Source("text", "k", 64)) != name
    assert collection.add(Source("text", "k", 32, {"A": 1})) != name


def test_a_manifest_is_read_as_it_was_written(tmp_path):
    dispatch = Dispatch("p", [1, 2, 3], [32, 1, 1], {4: ("q", 16)}, {5: "00ff"})
    problem = Problem("n", "kind", {"a": 1}, [dispatch], {"scratch0": 8})
    contents = Manifest({"p": Program("p", "entry", [4, 5])}, [problem])
    contents.write(tmp_path)
    assert manifest.read(tmp_path) == contents


def test_findings_are_counted_by_problem():
    output = """========= COMPUTE-SANITIZER
problem: first
  right: out, float16, error 0.0e+00
problem: second
========= Invalid __global__ write of size 4 bytes
=========     at k+0x10 in softmax.metal:3
=========     by thread (0,0,0) in block (0,0,0)
========= Error: Race reported between Write access at k+0x20
=========     and Read access at k+0x30 [8 hazards]
problem: third
========= ERROR SUMMARY: 2 errors"""
    assert sanitize.findings(output) == {"first": 0, "second": 2, "third": 0}


def test_errors_of_results():
    nan = np.array([np.nan, 1.0, np.inf])
    assert sanitize.error(nan, nan) == 0
    assert sanitize.error(np.array([1.0]), np.array([np.nan])) > 1e9
    assert sanitize.error(np.array([2.0, 300.0]), np.array([2.5, 200.0])) == 0.5
    values = torch.tensor([1.5, -3.0, torch.inf], dtype=torch.bfloat16)
    data = values.view(torch.uint8).numpy().tobytes()
    assert sanitize.numbers(data, "bfloat16").tolist() == [1.5, -3.0, np.inf]


@pytest.mark.parametrize("module", ["assemble", "sanitize"])
def test_the_gpus_side_needs_numpy_only(module):
    """The machine with the GPU has no torch_metal_attn."""
    text = f"""
import sys
import tests.outside.sanitizer.{module}
print({{"torch", "torch_metal_attn", "bench"}} & sys.modules.keys())
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
