"""The parts of the compute-sanitizer tool that need no GPU."""

import ast
import ctypes
import lzma
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.front_end import Source
from tests.outside.sanitizer import cases as problems
from tests.outside.sanitizer import driver, faults, pack, packed, sanitize
from tests.outside.sanitizer.packed import Packed, Program
from torch_metal_attn import simulate
from torch_metal_attn.runtime import shaders
from torch_metal_attn.simulator.build import ShaderCompileError

WIDE = "heads 32, kv_heads 1, num_splits 1$"  # a decode whose SIMD groups meet at barriers


def packed_cases(only):
    sources = {}
    packed_problems = [pack.problem(case, sources) for case in problems.cases(only)]
    return Packed(problems=packed_problems), sources


def test_a_decode_is_packed_and_compiled_to_ptx(tmp_path):
    contents, sources = packed_cases(WIDE)
    (problem,), (dispatch, *_) = contents.problems, contents.problems[0].dispatches
    assert [name for name, _ in dispatch.buffers.values()][:3] == ["q", "k", "v"]
    program = pack.compile_ptx(sources[dispatch.program])
    assert {*dispatch.buffers, *dispatch.constants} >= set(program.slots)
    assert program.slots == sorted(program.slots)
    text = program.ptx
    assert f".entry {program.entry}(" in text
    assert text.count(".param .u64") == len(program.slots)
    assert f".maxntid {dispatch.group_size[0]}, 1, 1" in text
    assert "mma.sync.aligned.m16n8k8.row.col.f32." in text
    assert "shfl.sync.bfly" in text
    assert "bar.sync" in text
    assert re.search(r'\.file\s+\d+ "[^"]*flash_decode\.metal"', text)
    assert ".loc" in text
    q = next(x for x in problems.cases(WIDE)).tensors["q"]
    assert len(problem.inputs["q"].data()) == q.nbytes
    assert problem.expected["result0"][0] == problem.dtype
    contents.programs[dispatch.program] = program
    contents.write(tmp_path / "file")
    (tmp_path / "plain").write_bytes(lzma.decompress((tmp_path / "file").read_bytes()))
    assert packed.read(tmp_path / "plain") == contents


def test_errors_of_shader_texts_are_raised():
    with pytest.raises(ShaderCompileError, match="missing"):
        pack.compile_ptx(Source("kernel void k() { missing(); }", "k", 32))
    with pytest.raises(ValueError, match="no kernel sums; it has k"):
        pack.compile_ptx(Source("kernel void k() {}", "sums", 32))


def test_small_problems_cover_every_kernel():
    """flash_bwd_captures, probes and kernels in Metal 4 are not covered."""
    launched = set()
    for case in problems.cases():
        with simulate(record=True) as run:
            case.call(**case.tensors)
        launched |= {(launch.family, launch.kernel) for launch in run.recorded}
        assert run.recorded, case.name
    families = set(shaders.families()) - {"probe", "flash_bwd_captures", *shaders.LANGUAGES}
    assert {family for family, _ in launched} == families
    for family in families:
        text = shaders.source(family)
        kernels = set(re.findall(r"\[\[kernel[^\]]*\]\]\s*void\s+(\w+)\(", text))
        assert kernels == {kernel for other, kernel in launched if other == family}, family


def test_faults_are_planted_in_every_kernel():
    contents, sources = packed_cases("^(softmax|apply_causal|rope|merge|index)")
    for name, source in sources.items():
        has_barrier = source.kernel == "softmax" and "#define ROW_SIMDGROUPS 1\n" not in source.text
        contents.programs[name] = Program("bar.sync" if has_barrier else "", "", [])
    tools, texts = {}, {}
    for problem in faults.plant(contents, sources):
        tools.setdefault(problem.kernel, []).append(problem.fault.tool)
        texts[problem.name] = sources[problem.dispatches[-1].program].text
    memory = ["initcheck", "memcheck"]
    assert sorted(tools.pop("softmax")) == [*memory, "racecheck", "synccheck"]
    assert tools.pop("apply_causal_mask") == ["memcheck"]  # its only tensor is a result
    assert {tuple(sorted(some)) for some in tools.values()} == {tuple(memory)}
    assert faults.BARRIER not in texts["fault racecheck softmax"]
    assert faults.FOREIGN in texts["fault synccheck softmax"]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_random_inputs_are_replaced_by_seeded_noise(dtype):
    """Keys that contain the values are stored once."""
    keys, few = torch.randn(20, 64).to(getattr(torch, dtype)), torch.ones(3)
    stored = pack.inputs({"k": keys, "v": keys[:, :32], "few": few})
    assert stored == {"v": packed.Noise(0, dtype, 1280), "few": pack.contents(few)}
    assert (sanitize.numbers(stored["v"].data(), dtype) == keys.double().flatten().numpy()).all()


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


def test_errors_of_results_are_measured():
    nan = np.array([np.nan, 1.0, np.inf])
    assert sanitize.error(nan, nan) == 0
    assert sanitize.error(np.array([1.0]), np.array([np.nan])) > 1e9
    assert sanitize.error(np.array([2.0, 300.0]), np.array([2.5, 200.0])) == 0.5
    values = torch.tensor([1.5, -3.0, torch.inf], dtype=torch.bfloat16)
    data = values.view(torch.uint8).numpy().tobytes()
    assert sanitize.numbers(data, "bfloat16").tolist() == [1.5, -3.0, np.inf]


class FakeDriver:
    """libcuda with allocations at multiples of 1000, and launches that compute nothing."""

    def __init__(self, monkeypatch):
        self.memory, self.launched = {}, []
        monkeypatch.setattr(driver, "cuda", lambda: self)

    def cuMemAlloc_v2(self, pointer, size):
        pointer._obj.value = 1000 * (len(self.memory) + 1)
        self.memory[pointer._obj.value] = bytearray(size.value)
        return 0

    def cuMemcpyHtoD_v2(self, pointer, data, size):
        self.memory[pointer.value][:] = data
        return 0

    def cuMemcpyDtoH_v2(self, data, pointer, size):
        data[:] = bytes(self.memory[pointer.value])
        return 0

    def cuLaunchKernel(self, kernel, *arguments):
        self.launched.append(arguments[:6])
        values = [ctypes.c_uint64.from_address(pointer).value for pointer in arguments[8]]
        self.arguments = [(bytes(self.memory[x - x % 1000]), x % 1000) for x in values]
        return 0

    def __getattr__(self, name):
        return lambda *arguments: 0


def test_a_replay_uploads_launches_and_compares(monkeypatch, tmp_path, capsys):
    fake = FakeDriver(monkeypatch)
    (tmp_path / "p").write_bytes(b"cubin")
    dispatch = packed.Dispatch("p", (2, 1, 1), (32, 1, 1), {0: ("x", 0), 2: ("out", 4)}, {1: b"ab"})
    for expected, right in ((bytes(8), True), (np.ones(2, np.float32).tobytes(), False)):
        results = {"out": ("float32", expected)}
        problem = packed.Problem("zero", "float32", [dispatch], {"x": b"1234"}, results, {"out": 8})
        contents = Packed({"p": Program("", "k", [0, 1, 2, 5])}, [problem])
        assert sanitize.replay(driver.Programs(tmp_path, contents), problem) == right
    assert fake.launched == [(2, 1, 1, 32, 1, 1)] * 2
    assert fake.arguments[:3] == [(b"1234", 0), (b"ab", 0), (bytes(8), 4)]
    assert len(fake.arguments) == 4  # absent arguments have memory too
    assert "WRONG: out, float32, error 1.0e+00" in capsys.readouterr().out
    short = packed.Fault("memcheck", "half", "out")
    problem = packed.Problem("fault", "float32", [], {}, {}, {"out": 8}, "k", short)
    sanitize.replay(driver.Programs(tmp_path, contents), problem)
    assert len([*fake.memory.values()][-1]) == 4


def test_the_modules_on_the_gpu_machine_need_only_numpy():
    for module in ("__init__", "driver", "packed", "sanitize"):
        text = (Path(sanitize.__file__).parent / f"{module}.py").read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.level:
                names = [node.module] if node.module else [alias.name for alias in node.names]
                assert {*names} <= {"driver", "packed"}, module
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                name = getattr(node, "module", None) or node.names[0].name
                top = name.partition(".")[0]
                assert top in {"numpy", *sys.stdlib_module_names}, (module, name)
