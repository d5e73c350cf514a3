"""The forms for issues and pull requests, the citation, and CI's matrix in the README."""

import re

import pytest
import yaml

from tests.docs.doc_commands import ROOT, check_commands

GITHUB = ROOT / ".github"
PULL_REQUEST = GITHUB / "PULL_REQUEST_TEMPLATE.md"
FORMS = sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml"))
FORMS = [path for path in FORMS if path.name != "config.yml"]
# The attributes that GitHub requires of each type of field.
NEEDED = {"markdown": {"value"}, "textarea": {"label"}, "checkboxes": {"label", "options"}}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_a_form_has_the_required_fields(path):
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert form["name"]
    assert form["description"]
    inputs = [field for field in form["body"] if field["type"] != "markdown"]
    fields = {field["id"]: field for field in inputs}
    assert len(fields) == len(inputs) > 0
    for field in form["body"]:
        assert NEEDED[field["type"]] <= field["attributes"].keys()
    if path.stem == "bug":
        assert all(fields[x]["validations"]["required"] for x in ("reproducer", "report", "info"))
        description = fields["report"]["attributes"]["description"]
        assert "`python -m torch_metal_attn verify --full`" in description


def test_the_citation_names_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for field in ("version", "license"):
        assert f'\n{field} = "{cited[field]}"\n' in project
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()


def test_the_readme_has_the_matrix():
    workflow = yaml.safe_load((GITHUB / "workflows" / "test.yml").read_text(encoding="utf-8"))
    rows = workflow["jobs"]["test"]["strategy"]["matrix"]["include"]
    words = {"macos-15": "macOS 15", "ubuntu-24.04": "x86-64", "ubuntu-24.04-arm": "arm64"}
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.search(r"^CI \(.*\n.*$", text, re.MULTILINE)[0]
    assert set(re.findall(r"3\.\d+", shown)) == {row["python"] for row in rows}
    assert all(words[row["os"]] in shown for row in rows)
    assert all(row.get("torch", "torch==2.10.0") == "torch==2.10.0" for row in rows)


@pytest.mark.parametrize("path", [*FORMS, PULL_REQUEST], ids=lambda path: path.name)
def test_commands_exist(path):
    commands = re.findall(r"`((?:make|python) [^`]+)`", path.read_text(encoding="utf-8"))
    assert commands
    check_commands("\n".join(commands), path.name)
