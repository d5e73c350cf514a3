"""Includes follow the order of layers in docs/design."""

import re
import subprocess
from graphlib import TopologicalSorter

import budget
import pytest

from tests.packaging.built_wheels import IS_CHECKOUT, ROOT

pytestmark = pytest.mark.skipif(not IS_CHECKOUT, reason="not a source checkout built in place")


@pytest.fixture(scope="module")
def includes():
    result = {}
    for path in ROOT.glob("csrc/*/**/*.*"):
        quoted = re.findall(r'#\s*include "([^"]+)"', path.read_text(encoding="utf-8"))
        if "simulator" in path.parts:  # compiled alone, so its includes are relative
            assert all((path.parent / name).is_file() for name in quoted), path.name
            quoted = []
        assert all((ROOT / name).is_file() for name in quoted), f"{path.name}: relative include"
        result[path.relative_to(ROOT).as_posix()] = [n for n in quoted if n.startswith("csrc/")]
    assert sum(map(len, result.values())) > 100
    return result


def folder(file):
    return file.rpartition("/")[0]


def test_a_folder_includes_only_lower_folders(includes):
    page = (ROOT / "docs/design/launch.md").read_text(encoding="utf-8")
    folders = re.findall(r"^\| `(csrc/[\w/]+)/` \|", page, re.M)
    assert {folder(file) for file in includes} == set(folders)
    rank = {name: i for i, name in enumerate(folders)}
    for file, others in includes.items():
        for other in others:
            assert rank[folder(other)] <= rank[folder(file)], f"{file} includes {other}"


def test_headers_have_no_circular_includes(includes):
    headers = {file: others for file, others in includes.items() if file.endswith(".h")}
    assert len(list(TopologicalSorter(headers).static_order())) == len(headers)


def test_a_header_of_shaders_includes_only_lower_headers():
    text = (ROOT / "docs/design/tiles.md").read_text(encoding="utf-8")
    rows = [re.findall(r"`(\w+\.h)`", line) for line in text.split("\n") if line.startswith("| ")]
    rank = {name: i for i, names in enumerate(filter(None, rows)) for name in names}
    headers = {path.name: path.read_text() for path in (ROOT / "shaders").glob("*.h")}
    assert set(headers) == set(rank)
    for name, header in headers.items():
        for other in re.findall(r'#include "([^"/]+)"', header):
            assert rank[other] <= rank[name], f"{name} includes {other}"


def test_a_line_counts_for_the_innermost_folder_with_a_budget(tmp_path):
    for number, name in enumerate(("README.md", "csrc/a.h", "csrc/simulator/b.h", "csrc/new")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("line\n" * 10**number)
    git = ("git", "-C", tmp_path)
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "README.md", "csrc/a.h", "csrc/simulator"], check=True)
    assert budget.count(tmp_path) == {"": 1, "csrc/": 10, "csrc/simulator/": 100}
