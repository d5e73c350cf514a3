"""The shader lint: for each rule, a shader that breaks it and a twin that does not."""

import re
from pathlib import Path

import pytest

from tests.helpers.cases import each_case
from torch_metal_attn.simulator.lint import lint_source
from torch_metal_attn.tools.lint import __main__ as lint

from .planted import read, twin

KERNEL = """#include <metal_stdlib>
using namespace metal;
{above}
kernel void k(device float* out [[buffer(0)]], constant float* in [[buffer(1)]],
              device half* halves [[buffer(2)]], device bfloat* bfloats [[buffer(3)]],
              uint i [[thread_position_in_grid]]) {{
{body}
}}
"""
CASES = read(Path(__file__).with_name("lint_cases.txt").read_text())


def shader(case: tuple[str, ...]) -> str:
    """The whole text, with both sides of the case."""
    lines = case[-1].splitlines()
    above = [line.removeprefix("  above: ") for line in lines if line.startswith("  above: ")]
    body = [line for line in lines if not line.startswith("  above: ")]
    return KERNEL.format(above="\n".join(above), body="\n".join(body))


# Cases without lines above the kernel share a text.
WITH_LINES_ABOVE = [[case] for case in CASES if "  above: " in case[-1]]
GROUPS = [[case for case in CASES if [case] not in WITH_LINES_ABOVE], *WITH_LINES_ABOVE]


def texts(cases: list[tuple[str, ...]], side: int) -> list[str]:
    """The text of each case, with a number in its kernel's name."""
    kernels = (twin(shader(case), side) for case in cases)
    return [text.replace("void k(", f"void k{i}(") for i, text in enumerate(kernels)]


@each_case("cases", GROUPS)
def test_the_faulty_side_of_a_case_is_reported(cases: list[tuple[str, ...]]) -> None:
    broken = texts(cases, 1)
    actual = lint_source("".join(broken))
    assert {f.file for f in actual} == {"program_source"}
    start = 1
    for case, text in zip(cases, broken, strict=True):
        name, rule, _, pattern, _ = case
        end = start + text.count("\n")
        findings = [f for f in actual if f.rule == rule and start <= f.line < end]
        assert any(re.search(pattern, f.message) for f in findings), (name, actual)
        whole = shader(case)
        line = start + whole.count("\n", 0, whole.index("{~"))
        assert {f.line for f in findings} == {line}, (name, actual)
        start = end


@each_case("cases", GROUPS)
def test_the_clean_side_of_a_case_has_no_findings(cases: list[tuple[str, ...]]) -> None:
    assert lint_source("".join(texts(cases, 2))) == []


def test_characters_outside_of_ascii_are_reported() -> None:
    assert [(f.line, f.rule) for f in lint_source("// plain\n// caf\u00e9\n")] == [(2, "ascii")]
    assert lint_source("// plain\n// cafe\n") == []


@pytest.fixture(autouse=True)
def _few_specialisations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding all specialisations takes seconds."""
    monkeypatch.setattr(lint, "specialisations", lambda: {"probe": [{}]})


def test_command_names_file_and_line(tmp_path, capsys):
    (tmp_path / "probe.metal").write_text('#include "helper.h"\nconstant int zero = 0;\n')
    for result, returns in (("float", 0), ("double", 1), ("double", 1)):
        (tmp_path / "helper.h").write_text(f"#pragma once\n\ninline {result} f() {{ return 1; }}\n")
        assert lint.main([str(tmp_path)]) == returns
        finding = "shaders/helper.h:3: double: `double` is not in Metal\n"
        assert (finding in capsys.readouterr().out) == bool(returns)


def test_command_refuses_an_empty_folder_and_an_unknown_family(tmp_path, capsys):
    assert lint.main([str(tmp_path)]) == 2
    (tmp_path / "other.metal").write_text("constant int zero = 0;\n")
    assert lint.main([str(tmp_path)]) == 1
    assert "other.metal:1: specialisations:" in capsys.readouterr().out
