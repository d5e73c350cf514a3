"""The shader lint: for each rule a shader that breaks it, and a twin that keeps it."""

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.helpers.cases import each_case
from torch_metal_attn.simulator.lint import lint_source
from torch_metal_attn.tools.lint.__main__ import main

SHADERS = Path(__file__).parents[2] / "shaders"
KERNEL = """#include <metal_stdlib>
using namespace metal;
{above}
kernel void k(device float* out [[buffer(0)]], constant float* in [[buffer(1)]],
              device half* halves [[buffer(2)]], device bfloat* bfloats [[buffer(3)]],
              uint i [[thread_position_in_grid]]) {{
  {body}
}}
"""
BODY_LINE = KERNEL.split("\n").index("  {body}") + 1
ABOVE_LINE = KERNEL.split("\n").index("{above}") + 1


@dataclass
class Case:
    """One entry of lint_cases.txt."""

    name: str
    rule: str
    fields: dict[str, str] = field(default_factory=dict)

    def shader(self, kind: str) -> str:
        """The whole text, `kind` being bad or good."""
        above = self.fields.get(f"{kind} above", self.fields.get("above", ""))
        return KERNEL.format(above=above, body=self.fields.get(kind, self.fields.get("both", "")))

    def fault_line(self) -> int:
        return BODY_LINE if "bad" in self.fields else ABOVE_LINE


def read_cases() -> list[Case]:
    cases: list[Case] = []
    for line in Path(__file__).with_name("lint_cases.txt").read_text().splitlines():
        head = re.match(r"\[(.*)\] (.*)", line)
        if head:
            cases.append(Case(head[1], head[2]))
        elif line and not line.startswith("#"):
            key, _, text = line.partition(": ")
            cases[-1].fields[key] = text
    return cases


CASES = read_cases()


@each_case("case", CASES)
def test_rejects(case: Case) -> None:
    findings = [f for f in lint_source(case.shader("bad")) if f.rule == case.rule]
    says = case.fields.get("says", "")
    assert any(re.search(says, f.message) for f in findings), findings
    assert {(f.file, f.line) for f in findings} == {("program_source", case.fault_line())}


@each_case("case", CASES)
def test_accepts_the_twin(case: Case) -> None:
    assert lint_source(case.shader("good")) == []


def test_ascii() -> None:
    assert [(f.line, f.rule) for f in lint_source("// plain\n// caf\u00e9\n")] == [(2, "ascii")]
    assert lint_source("// plain\n// cafe\n") == []


def test_command_names_file_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "helper.h").write_text("#pragma once\n\ninline double f() { return 1; }\n")
    (tmp_path / "flash_fwd.metal").write_text('#include "helper.h"\nconstant int zero = 0;\n')
    assert main([str(tmp_path)]) == 1
    assert "shaders/helper.h:3: double: `double` is not in Metal\n" in capsys.readouterr().out


def test_command_refuses_an_unknown_family(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other.metal").write_text("constant int zero = 0;\n")
    assert main([str(tmp_path)]) == 1
    assert "other.metal:1: specialisations:" in capsys.readouterr().out


def test_command_refuses_an_empty_folder(tmp_path: Path) -> None:
    assert main([str(tmp_path)]) == 2
