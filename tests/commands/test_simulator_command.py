"""python -m torch_metal_attn.simulator: results, and one clear line for what is wrong."""

import re

import numpy as np
import pytest
import torch

from tests.helpers.cases import each_case
from torch_metal_attn.simulator import toolchain
from torch_metal_attn.simulator.__main__ import main
from torch_metal_attn.simulator.lint import PROJECT_RULES

SOURCE = """\
#include <metal_stdlib>
using namespace metal;
#ifndef VALUE
#define VALUE 1
#endif
constant int FACTOR [[function_constant(3)]];

struct Shape { int rows; int columns; float scale; bool flag; };

kernel void scale(device float* out, const device half2* x, constant float& by,
                  uint i [[thread_position_in_grid]]) {
  out[i] = (x[i].x + x[i].y + 0.5f) * by;
}
kernel void fields(device float* out, constant Shape& shape, constant uint3& sizes) {
  out[0] = shape.rows * shape.columns * shape.scale + shape.flag;
  out[1] = sizes.x + sizes.y + sizes.z;
}
template <typename T>
kernel void reverse(device T* x, threadgroup T* scratch [[threadgroup(0)]],
                    uint i [[thread_index_in_threadgroup]], uint n [[threads_per_threadgroup]]) {
  threadgroup T parts[100];
  scratch[i] = x[i];
  parts[i] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  x[i] = scratch[n - 1 - i];
}
template [[host_name("reverse_bfloat")]] kernel void reverse<bfloat>(
    device bfloat*, threadgroup bfloat*, uint, uint);
kernel void factor(device int* out, device int* more [[function_constant(FACTOR)]]) {
  out[0] = FACTOR * VALUE;
}
kernel void none() {}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One, so that its file is compiled once."""
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "kernels.metal").write_text(SOURCE)
    return folder


@pytest.fixture
def command(folder, monkeypatch, capsys):
    """Runs a command in the folder; returns the exit status, standard output and error."""
    monkeypatch.chdir(folder)

    def run(*arguments):
        try:
            status = main(list(map(str, arguments)))
        except SystemExit as ended:
            status = ended.code
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def run(command):
    """Runs a kernel of the file."""
    return lambda kernel, *arguments: command("run", "kernels.metal", kernel, *arguments)


def args(*values):
    return [word for value in values for word in ("--arg", value)]


SCALE = args("nan:3", "arange:6", "2")


def test_prints_what_a_kernel_may_write(run):
    assert run("scale", *SCALE) == (0, "out =\ntensor([ 3., 11., 19.])\n", "")


def test_arguments_by_name_and_index(run):
    status, out, _ = run("scale", *args("by=2", "nan:3", "1=1:2x3"), "--threads", 2)
    assert (status, out) == (0, "out =\ntensor([5., 5., nan])\n")


def test_fields_of_structs_and_vectors(run):
    struct = "shape=2,3:int,0.5:float,true,0,0,0:bool"
    status, out, err = run("fields", *args("0:2", struct, "1,2,3"), "--threads", 1)
    assert (status, out, err) == (0, "out =\ntensor([4., 6.])\n", "")


def test_files(run, tmp_path):
    np.save(tmp_path / "x.npy", np.arange(6, dtype=np.float16).reshape(2, 3))
    torch.save(torch.tensor([1.0]), tmp_path / "by.pt")
    out = tmp_path / "out.npy"
    given = args("nan:3", tmp_path / "x.npy", f"by={tmp_path / 'by.pt'}")
    assert run("scale", *given, "--save", f"out={out}") == (0, "", "")
    assert np.load(out).tolist() == [1.5, 5.5, 9.5]


def test_threadgroup_memory_and_bfloat(run, tmp_path):
    given = ["--arg", "arange:4", "--threadgroup-bytes", "scratch=8"]
    status, out, _ = run("reverse_bfloat", *given)
    assert (status, out) == (0, "x =\ntensor([3., 2., 1., 0.], dtype=torch.bfloat16)\n")
    assert run("reverse_bfloat", *given, "--save", f"x={tmp_path / 'x.pt'}")[0] == 0
    assert torch.load(tmp_path / "x.pt").tolist() == [3, 2, 1, 0]


def test_defines_and_constants(run):
    given = ["-D", "VALUE=2", "--arg", "0:1", "--constant"]
    out = "out =\ntensor([{}], dtype=torch.int32)\n"
    assert run("factor", *given, "FACTOR=0") == (0, out.format(0), "")
    more = "more =\ntensor([0], dtype=torch.int32)\n"
    assert run("factor", *given, "3=-7", "--arg", "more=0:1") == (0, out.format(-14) + more, "")


def test_random_arguments_have_a_seed(run):
    def printed(*options):
        return run("scale", *args("rand:3", "randn:6", "1"), *options)[1]

    assert printed() == printed("--seed", 0)
    assert printed("--seed", 1) == printed("--seed", 1) != printed()


def test_lane_maps(command, folder):
    (folder / "lanes.metal").write_text("""
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>
using namespace metal;
kernel void columns(device int* out, uint lane [[thread_index_in_simdgroup]]) {
  constexpr auto descriptor = mpp::tensor_ops::matmul2d_descriptor(16, 32, 16);
  mpp::tensor_ops::matmul2d<descriptor, execution_simdgroup> op;
  auto left = op.get_left_input_cooperative_tensor<half, half, float>();
  if (lane == 1) out[0] = left.get_multidimensional_index(0)[0];
}
""")
    given = [*args("0:1"), "--threads", 32, "--language", "4.0"]

    def column(*options):
        status, out, _ = command("run", "lanes.metal", "columns", *given, *options)
        assert status == 0
        return int(re.findall(r"\[(\d+)\]", out)[0])

    assert (column(), column("--lane-map", "apple9")) == (4, 2)
    assert len({column("--lane-map", seed) for seed in range(4)}) > 1


def test_counts(run):
    status, out, _ = run("scale", *SCALE, "--count")
    assert status == 0
    counts = dict(line.rsplit(maxsplit=1) for line in out.splitlines()[2:])
    assert (counts["loads device"], counts["stores device"]) == ("3", "3")
    assert int(counts["float_operations"]) >= 3 * 3


def test_a_fault_is_printed_as_it_is_raised(run):
    line = SOURCE.split("\n").index("  out[i] = (x[i].x + x[i].y + 0.5f) * by;") + 1
    status, out, err = run("scale", *SCALE, "--threads", 4)
    assert (status, out) == (1, "")
    assert err.startswith("out_of_bounds: read of 4 bytes at byte 12 of buffer(1), which has 12\n")
    assert f"  kernels.metal:{line} in scale\n" in err
    assert run("scale", *SCALE, "--threads", 3, "--no-check")[0] == 0


# What is wrong: with a command, with the arguments of `scale`, with its argument `by`, and with the
# other options.
COMMANDS = {
    "run kernels.metal scales": "kernels.metal has no kernel scales; it has factor, fields, ",
    "run nothing.metal k": "nothing.metal cannot be read: ",
    "check binary.metal": "binary.metal cannot be read: ",
    "run kernels.metal factor": "factor needs values of function constants: --constant FACTOR=...",
    "check kernels.metal --constant A": "--constant A: it must be NAME=VALUE",
    "check kernels.metal --constant A=b": "'b' must be true, false or a number",
    "check kernels.metal --constant A=1": "no function constant 'A'; it has FACTOR (3)",
    "check kernels.metal -I no/where": "no/where is not a directory",
    "check kernels.metal -D A-B": "defines has 'A-B'",
}
ARGUMENTS = {
    "": "scale has 3 arguments, out (0), x (1), by (2); 0 are given",
    "--arg nan:3 --arg nan:3 --arg 1 --arg 1": "4 are given",
    "--arg y=nan:3": "--arg y=nan:3: 'y' must be one of out (0), x (1), by (2)",
    "--arg by=1 --arg 2=1": "--arg 2=1: the argument is given twice",
}
VALUES = {
    "0:99999999999999": "--arg by=0:99999999999999: ",
    "1:3:double": "--arg by=1:3:double: 'double' is no dtype; known are bool, ",
    "one": "'one' must be a number (float32)",
    "1,2": "by=1,2: has 8 bytes; the kernel declares 4",
    "1e39": "1e39 must be at most 3.40282e+38 (float32)",
    "1:int": "argument 2 is a tensor of int32; buffer(2) `constant float & by` needs float",
    "300:char": "300 must be from -128 to 127 (int8)",
    "0.5:int": "'0.5' must be an integer (int32)",
    "2:bool": "'2' must be true, false, 1 or 0",
    "randn": "give the shape: randn:4x8",
    "rand:1:int": "rand needs a floating-point dtype, and this is int32",
    "no.npy": "--arg by=no.npy: cannot be read: [Errno 2] No such file",
    "binary.npy": "--arg by=binary.npy: cannot be read: ",
    "binary.pt": "--arg by=binary.pt: cannot be read: ",
    "list.pt": "--arg by=list.pt: the file holds a list; it must hold a tensor",
}
OPTIONS = {
    "--threads 0": "--threads is 0; it must be sizes above 0, such as 640 or 5x128",
    "--group-size 4x0": "--group-size is 4x0; it must be sizes above 0",
    "--threads 5x": "--threads is 5x; it must be sizes above 0, such as 640 or 5x128",
    "--group-size=-4": "--group-size is -4; it must be sizes above 0",
    "--threads 1x1x1x1": "scale: threads is (1, 1, 1, 1); it must be an int or 1 to 3 ints",
    "--threads 2x2 --group-size 4": "scale: group_size has 1 dimensions and threads 2",
    "--group-size 2000": "scale: group_size (2000,) is 2000 threads; 1 to 1024 fit",
    "--threadgroup-bytes x=4": "--threadgroup-bytes x=4: 'x' must be one of none",
    "--save x=x.txt": "--save x=x.txt: the file's name must end with .npy or .pt",
    "--save x=no/where.pt": "--save x=no/where.pt: no is not a folder",
    "--save z=z.pt": "--save z=z.pt: 'z' must be one of out (0), x (1), by (2)",
    "--count --no-check": "--count needs the checks: leave out --no-check",
    "--seed -1": "seed is -1; it must be",
    "--seed 99999999999999999999": "seed is 99999999999999999999; it must be",
    "--lane-map apple8": "lane_map is 'apple8'; it must be",
    "--relaxed-precision cut": "relaxed_precision is 'cut'; it must be",
}


@pytest.fixture
def one_line(command, folder):
    """Runs a command that must end with exit status 2 and one line; returns the line."""
    torch.save([1], folder / "list.pt")
    for name in ("binary.metal", "binary.npy", "binary.pt"):
        (folder / name).write_bytes(b"\xff\x00")

    def run(*words):
        status, out, err = command(*words)
        assert (status, out) == (2, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        return err

    return run


RUN = "run kernels.metal scale"
WRONG = {
    **COMMANDS,
    **{f"{RUN} {words}": said for words, said in ARGUMENTS.items()},
    **{f"{RUN} --arg nan:3 --arg arange:6 --arg by={x}": said for x, said in VALUES.items()},
    **{f"{RUN} {' '.join(SCALE)} {words}": said for words, said in OPTIONS.items()},
}


@each_case("words, said", WRONG.items())
def test_what_is_wrong_is_said_in_one_line(words, said, one_line):
    assert said in one_line(*words.split())


def test_source_that_does_not_compile(command, folder):
    (folder / "broken.metal").write_text("\n\nkernel void k() { missing(); }\n")
    for given in (["run", "broken.metal", "k"], ["check", "broken.metal"]):
        status, out, err = command(*given)
        assert (status, out) == (1, "")
        assert err.startswith("the Metal source does not compile:\nbroken.metal:3:")
        assert "error: use of undeclared identifier 'missing'" in err


def test_what_apple_refuses_is_not_run(command, folder):
    """Although clang compiles it."""
    text = "int f(int n) {\n  return n ? f(n - 1) : 0;\n}\n"
    text += "kernel void k(device float* x) {\n  double y = f(2);\n  x[0] = y;\n}\n"
    (folder / "rejected.metal").write_text(text)
    status, out, err = command("run", "rejected.metal", "k", "--arg", "nan:1")
    assert (status, out) == (1, "")
    assert err == (
        "rejected.metal:1: recursion: function `f` calls itself\n"
        "rejected.metal:5: double: `double` is not in Metal\n"
    )


LISTED = """\
function constant 3: int FACTOR
kernel scale
  buffer(0): device float* out
  buffer(1): const device half2* x
  buffer(2): constant float& by
  uint i [[thread_position_in_grid]]
  threadgroup memory: 0 bytes
kernel fields
  buffer(0): device float* out
  buffer(1): constant Shape& shape
  buffer(2): constant uint3& sizes
  threadgroup memory: 0 bytes
kernel factor
  buffer(0): device int* out
  buffer(1): device int* more{}
  threadgroup memory: 0 bytes
kernel none
  threadgroup memory: 0 bytes
kernel reverse_bfloat
  buffer(0): device T* x of bfloat
  threadgroup(0): threadgroup T* scratch of bfloat
  uint i [[thread_index_in_threadgroup]]
  uint n [[threads_per_threadgroup]]
  threadgroup memory: 200 bytes
"""


def test_check_lists_the_kernels(command):
    status, out, err = command("check", "kernels.metal", "--constant", "FACTOR=0")
    assert (status, err) == (0, "")
    sections = {part.split("\n")[0]: part for part in re.split(r"\n(?=kernel)", out.strip())}
    listed = LISTED.format(", absent by FACTOR").strip()
    assert sections == {part.split("\n")[0]: part for part in re.split(r"\n(?=kernel)", listed)}
    missing = "  needs function constants: FACTOR\n"
    assert missing in command("check", "kernels.metal")[1]


def test_check_reports_what_apple_refuses(command, folder):
    (folder / "faulty.metal").write_text(
        '#include "faulty.h"\n'
        "kernel void k(device float* x) {\n"
        "  if constexpr (true) x[0] = half(1);\n"
        "  double y = twice(2);\n"
        "  threadgroup float big[8193];\n"
        "  big[0] = y;\n"
        "}\n"
    )
    (folder / "faulty.h").write_text("inline double twice(double x) { return x; }\n")
    status, out, _ = command("check", "faulty.metal")
    assert status == 1
    assert "faulty.metal:4: double: `double` is not in Metal\n" in out
    assert f"{folder / 'faulty.h'}:1: double: " in out
    assert "threadgroup memory: 32772 bytes, over the limit of 32768\n" in out
    assert not [rule for rule in PROJECT_RULES if f" {rule}: " in out]
    strict = command("check", "faulty.metal", "--strict")[1]
    assert {rule for rule in PROJECT_RULES if f" {rule}: " in strict} == {
        "cpp17",
        "implicit-float",
        "kernel-parameter",
    }


@pytest.mark.parametrize("words", ["", "run", "run kernels.metal", "check", "play", "check a b"])
def test_incomplete_commands(words, command):
    status, _, err = command(*words.split())
    assert status == 2
    assert err.startswith("usage: python -m torch_metal_attn.simulator")


@pytest.mark.parametrize("name", ["run", "check"])
def test_help(name, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = command(name, "--help")
    assert status == 0
    assert "exit status is 1" in " ".join(out.split())
    assert max(map(len, out.splitlines())) <= 80  # the descriptions are not wrapped by argparse
    assert ("FILL:SHAPE[:DTYPE]" in out) == (name == "run")


def test_no_compiler(command, monkeypatch):
    monkeypatch.setenv(toolchain.OVERRIDE, "/no/such/clang")
    toolchain.find.cache_clear()
    try:
        status, out, err = command("check", "kernels.metal")
    finally:
        toolchain.find.cache_clear()
    assert (status, out) == (2, "")
    assert err == f"error: {toolchain.OVERRIDE}=/no/such/clang: no such program\n"
