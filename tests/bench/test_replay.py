"""The replay bench, as far as it needs no GPU: recording, compiling, packing, and reading back."""

import ast
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.front_end import Source
from bench.replay import cases, manifest, peers, vector_loads
from bench.replay.assemble import limited
from bench.replay.collect import Collection, Names
from bench.replay.manifest import Problem
from bench.replay.ptx import compile_ptx
from tests.outside import peers as headers
from tests.outside.sanitizer import cases as problems
from tests.outside.sanitizer import faults, pack, sanitize
from torch_metal_attn import simulate
from torch_metal_attn.runtime import shaders
from torch_metal_attn.simulator.build import ShaderCompileError

ROOT = Path(__file__).parents[2]


def pointers_missing(collection, dispatch):
    """Slots of the compiled entry that the launch gives nothing for."""
    given = {*dispatch.buffers, *dispatch.constants}
    return set(collection.manifest.programs[dispatch.program].slots) - given


def test_a_decode_from_the_op_to_ptx(tmp_path):
    """Over 4096 keys; nothing of it is computed."""
    collection = Collection()
    q, k = (torch.empty(1, heads, n, 64, dtype=torch.half) for heads, n in ((8, 1), (2, 4096)))
    t = {"q": q, "k": k, "v": torch.empty_like(k)}

    def call():
        return torch.ops.metal_attn.flash_decode(**t, num_splits=1)

    candidate = cases.ours(collection, "", t, call)
    (dispatch,) = candidate.dispatches
    assert [name for name, _ in dispatch.buffers.values()] == ["q", "k", "v", "out", "lse"]
    assert candidate.scratch == {}
    collection.manifest.problems = [Problem("decode", "decode", {"keys": 4096}, [candidate])]
    collection.write(tmp_path, 1)
    text = (tmp_path / f"{dispatch.program}.ptx").read_text()
    program = collection.manifest.programs[dispatch.program]
    assert pointers_missing(collection, dispatch) == set()
    assert program.slots == sorted(program.slots)
    assert f".entry {program.entry}(" in text
    assert text.count(".param .u64") == len(program.slots)
    assert f".maxntid {dispatch.group_size[0]}, 1, 1" in text
    assert "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32" in text
    assert "shfl.sync.bfly" in text
    assert "bar.sync" in text
    assert re.search(r"ld\.global\.nc\.v4\.b32", text)
    assert "\n.maxnreg 128\n" in limited(text, 128)
    assert limited(text, manifest.NO_LIMIT) == text
    assert manifest.read(tmp_path) == collection.manifest


def test_faults_of_a_text_are_told_apart():
    with pytest.raises(ShaderCompileError, match="missing"):
        compile_ptx(Source("kernel void k() { missing(); }", "k", 32))
    with pytest.raises(ValueError, match="no kernel sums; it has k"):
        compile_ptx(Source("kernel void k() {}", "sums", 32))


def test_lines_of_the_metal_text_are_in_the_ptx(tmp_path):
    collection, data = Collection(), {}
    (case,) = problems.cases("^softmax: plain$")
    pack.add(collection, case, data)
    collection.write(tmp_path, 1)
    (name,) = collection.sources
    text = (tmp_path / f"{name}.ptx").read_text()
    assert re.search(r'\.file\s+\d+ "[^"]*softmax\.metal"', text)
    assert ".loc" in text
    assert data["softmax: plain/in/x"].nbytes == data["softmax: plain/out/result0"].nbytes > 0


@pytest.mark.peer
def test_peers_get_every_argument(tmp_path):
    try:
        headers.include_dir(headers.MLX)
    except headers.PeerUnavailable as error:
        pytest.skip(str(error))
    collection = Collection()
    q = torch.empty(1, 4, 1, 64, dtype=torch.float16)
    k = torch.empty(1, 2, 100, 64, dtype=torch.float16)
    tensors = {"q": q, "k": k, "v": torch.empty_like(k), "out": torch.empty_like(q)}
    candidate = peers.mlx_vector(collection, **tensors, blocks=64)
    collection.write(tmp_path, 1)
    first, second = candidate.dispatches
    assert pointers_missing(collection, first) == pointers_missing(collection, second) == set()
    assert second.buffers[3] == ("out", 0)
    assert first.buffers[3] == second.buffers[0] == ("scratch0", 0)
    assert candidate.scratch["scratch0"] == 4 * 64 * 64 * 2


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
            planted.setdefault(problem.sizes["kernel"], []).append(problem.sizes["tool"])
    memory = ["initcheck", "memcheck"]
    assert sorted(planted.pop("softmax")) == [*memory, "racecheck", "synccheck"]
    assert planted.pop("apply_causal_mask") == ["memcheck"]  # it works in place
    assert {tuple(sorted(tools)) for tools in planted.values()} == {tuple(memory)}
    racy = next(p for p in collection.manifest.problems if p.name == "fault racecheck softmax")
    text = collection.sources[racy.candidates[0].dispatches[-1].program].text
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
    name = collection.add(Source("text", "k", 32), (128,))
    assert collection.add(Source("text", "k", 32), (96, 128)) == name
    assert collection.manifest.programs[name].limits == [96, 128]
    assert collection.add(Source("text", "k", 64)) != name
    assert collection.add(Source("text", "k", 32, {"A": 1})) != name


def ir(*body):
    return "\n".join(("define void @f(ptr addrspace(1) %0) {", *body, "  ret void", "}"))


def loads(count, first=0, distance=2):
    """Neighbouring halfs from %0 on, and their addresses."""
    for i in range(first, first + count):
        at = f"%a{i}"
        yield f"  {at} = getelementptr inbounds nuw i8, ptr addrspace(1) %0, i64 {i * distance}"
        yield f"  %v{i} = load half, ptr addrspace(1) {at}, align 2, !tbaa !1"


def vectors(text):
    return re.findall(r"load <(\d+) x \w+>, .* align (\d+)", text)


def test_neighbouring_loads_are_joined():
    text = vector_loads.joined(ir(*loads(8)))
    assert vectors(text) == [("8", "16")]
    assert "load half" not in text
    for i in range(8):
        assert f"%v{i} = extractelement <8 x half> %joined.v0, i64 {i}" in text


TWO_PAIRS = [("2", "4")] * 2
STORE = "  store half 0xH0000, ptr addrspace({}) %t, align 2"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (list(loads(12)), [("8", "16"), ("4", "8")]),
        (list(loads(2, first=1)), []),  # not at a multiple of their size
        (list(loads(8, distance=4)), []),  # gaps
        ([*loads(2), STORE.format(1), *loads(2, 2)], TWO_PAIRS),
        ([*loads(2), STORE.format(3), *loads(2, 2)], [("4", "8")]),
        ([*loads(2), "next:", *loads(2, 2)], TWO_PAIRS),
        ([*loads(2), "  call void @barrier()", *loads(2, 2)], TWO_PAIRS),
    ],
)
def test_what_is_joined(body, expected):
    assert vectors(vector_loads.joined(ir(*body))) == expected


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


def test_the_gpus_side_needs_torch_and_numpy_only():
    """The machine with the GPU has no torch_metal_attn, and not the rest of `bench`."""
    folder = "bench.replay"
    sides = [f"{folder}.{name}" for name in ("assemble", "decode")]
    seen, todo = set(), [*sides, "tests.outside.sanitizer.sanitize"]
    while todo:
        module = todo.pop()
        seen.add(module)
        path = Path(f"{module.replace('.', '/')}.py")
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.ImportFrom) and (node.level or node.module == folder):
                names = [node.module] if node.level and node.module else []
                names = names or [alias.name for alias in node.names]
                todo += {f"{folder}.{name}" for name in names} - seen
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                name = getattr(node, "module", None) or node.names[0].name
                if name.startswith(f"{folder}."):
                    todo += {name} - seen
                    continue
                top = name.partition(".")[0]
                assert top in {"numpy", "torch", *sys.stdlib_module_names}, (module, name)
    assert {f"{folder}.{name}" for name in ("driver", "manifest")} <= seen
