"""python -m torch_metal_attn.simulator check: its list of kernels, and errors of one line."""

import re

import pytest

from tests.helpers.cases import each_case
from torch_metal_attn.simulator import toolchain
from torch_metal_attn.simulator.__main__ import main
from torch_metal_attn.simulator.lint import PROJECT_RULES

SOURCE = """\
#include <metal_stdlib>
using namespace metal;
constant int FACTOR [[function_constant(3)]];
struct Shape { int rows; int columns; };

kernel void scale(device float* out, const device half2* x, constant float& by,
                  uint i [[thread_position_in_grid]]) {
  out[i] = (x[i].x + x[i].y) * by;
}
template <typename T>
kernel void reverse(device T* x, threadgroup T* scratch [[threadgroup(0)]],
                    uint i [[thread_index_in_threadgroup]]) {
  threadgroup T parts[100];
  scratch[i] = parts[i] = x[i];
}
template [[host_name("reverse_bfloat")]] kernel void reverse<bfloat>(
    device bfloat*, threadgroup bfloat*, uint);
kernel void factor(device int* out, constant Shape& shape,
                   device int* more [[function_constant(FACTOR)]]) {
  out[0] = FACTOR * VALUE;
}
kernel void none() {}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All tests share the folder, so that its file is compiled once."""
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "kernels.metal").write_text(SOURCE)
    return folder


@pytest.fixture
def command(folder, monkeypatch, capsys):
    """Runs a command in the folder; returns the exit status, standard output and error."""
    monkeypatch.chdir(folder)

    def run(*arguments):
        return main(["check", *arguments]), *capsys.readouterr()

    return run


WRONG = {
    "nothing.metal": "nothing.metal cannot be read: No such file or directory\n",
    "kernels.metal nothing.metal": "nothing.metal cannot be read: ",
    "binary.metal": "binary.metal cannot be read: it is not text in UTF-8\n",
    ".": ". is a folder: give its files, such as ./*.metal\n",
    "*.glsl": "no file matches *.glsl\n",
    "kernels.metal --constant A": "--constant A: it must be NAME=VALUE",
    "kernels.metal --constant A=b": "'b' must be true, false or a number",
    "kernels.metal --constant A=1": "no function constant 'A'; it has FACTOR (3)",
    "kernels.metal -I no/where": "no/where is not a directory",
    "kernels.metal -D A-B": "defines has 'A-B'",
}


@each_case("words, said", WRONG.items())
def test_errors_take_one_line(words, said, command, folder):
    (folder / "binary.metal").write_bytes(b"\xff\x00")
    status, out, err = command(*words.split())
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert said in err


def test_source_that_does_not_compile_is_reported(command, folder):
    (folder / "broken.metal").write_text("\n\nkernel void k() { missing(); }\n")
    status, out, err = command("broken.metal")
    assert (status, out) == (1, "")
    assert err.startswith("the Metal source does not compile:\nbroken.metal:3:")
    assert "error: use of undeclared identifier 'missing'" in err


LISTED = """\
function constant 3: int FACTOR
kernel scale
  buffer(0): device float* out
  buffer(1): const device half2* x
  buffer(2): constant float& by
  uint i [[thread_position_in_grid]]
  threadgroup memory: 0 bytes
kernel factor
  buffer(0): device int* out
  buffer(1): constant Shape& shape
  buffer(2): device int* more{}
  threadgroup memory: 0 bytes
kernel none
  threadgroup memory: 0 bytes
kernel reverse_bfloat
  buffer(0): device T* x of bfloat
  threadgroup(0): threadgroup T* scratch of bfloat
  uint i [[thread_index_in_threadgroup]]
  threadgroup memory: 200 bytes, and up to 32560 that a call passes for threadgroup(0)
"""


def test_check_lists_the_kernels(command):
    words = "kernels.metal", "-D", "VALUE=2"
    status, out, err = command(*words, "--constant", "FACTOR=0")
    assert (status, err) == (0, "")
    sections = {part.split("\n")[0]: part for part in re.split(r"\n(?=kernel)", out.strip())}
    listed = LISTED.format(", absent by FACTOR").strip()
    assert sections == {part.split("\n")[0]: part for part in re.split(r"\n(?=kernel)", listed)}
    missing = "  needs function constants: FACTOR\n"
    assert missing in command(*words)[1]


def test_check_reports_lint_and_limits(command, folder):
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
    status, out, _ = command("faulty.metal")
    assert status == 1
    assert "faulty.metal:4: double: `double` is not in Metal\n" in out
    assert f"{folder / 'faulty.h'}:1: double: " in out
    assert "threadgroup memory: 32772 bytes, over the limit of 32768\n" in out
    assert not [rule for rule in PROJECT_RULES if f" {rule}: " in out]
    strict = command("faulty.metal", "--strict")[1]
    rules = {rule for rule in PROJECT_RULES if f" {rule}: " in strict}
    assert rules == {"cpp17", "implicit-float", "kernel-parameter"}


@pytest.mark.parametrize("words", ["", "check", "play k.metal"])
def test_incomplete_commands_print_the_usage(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("usage: python -m torch_metal_attn.simulator")


def test_an_error_in_one_file_does_not_stop_the_others(command, folder):
    (folder / "a1.metal").write_text("kernel void a() { missing(); }\n")
    (folder / "a2.metal").write_text("kernel void b() {}\n")
    status, out, err = command("a?.metal")
    assert (status, out) == (1, "a1.metal:\na2.metal:\nkernel b\n  threadgroup memory: 0 bytes\n")
    assert "a1.metal:1:" in err


def test_a_missing_compiler_is_reported(command, monkeypatch):
    monkeypatch.setenv(toolchain.OVERRIDE, "/no/such/clang")
    toolchain.find.cache_clear()
    try:
        status, out, err = command("kernels.metal")
    finally:
        toolchain.find.cache_clear()
    assert (status, out) == (2, "")
    assert err == f"error: {toolchain.OVERRIDE}=/no/such/clang: no such program\n"
