"""The forms for issues and pull requests: what GitHub takes, and commands that are there."""

import re

import pytest
import yaml

from tests.docs.doc_commands import ROOT, check_commands

GITHUB = ROOT / ".github"
PULL_REQUEST = GITHUB / "PULL_REQUEST_TEMPLATE.md"
FORMS = sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml"))
FORMS = [path for path in FORMS if path.name != "config.yml"]
# By type of field: the attributes that GitHub needs of it.
NEEDED = {"markdown": {"value"}, "textarea": {"label"}, "checkboxes": {"label", "options"}}
REPORT = "python -m torch_metal_attn verify --full"


def fields(form):
    return [field for field in form["body"] if field["type"] != "markdown"]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_form(path):
    """GitHub shows no form that lacks one of these."""
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert form["name"]
    assert form["description"]
    ids = [field["id"] for field in fields(form)]
    assert len(set(ids)) == len(ids) > 0
    for field in form["body"]:
        assert NEEDED[field["type"]] <= field["attributes"].keys()


def test_blank_issues_are_off():
    config = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / "config.yml").read_text(encoding="utf-8"))
    assert config["blank_issues_enabled"] is False


def test_the_citation_is_of_this_version():
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


@pytest.mark.parametrize("name", ["wrong-result", "crash"])
def test_faults_come_with_a_report(name):
    """The machine, its installation, and a program: without these we cannot reproduce it."""
    text = (GITHUB / "ISSUE_TEMPLATE" / f"{name}.yml").read_text(encoding="utf-8")
    by_id = {field["id"]: field for field in fields(yaml.safe_load(text))}
    assert all(by_id[x]["validations"]["required"] for x in ("reproducer", "report", "info"))
    assert f"`{REPORT}`" in by_id["report"]["attributes"]["description"]


def test_pull_requests_ask_for_counts_faults_and_a_report():
    text = PULL_REQUEST.read_text(encoding="utf-8")
    for wanted in (f"`{REPORT}`", "`make bench`", "Fault that was planted"):
        assert wanted in text


@pytest.mark.parametrize("path", [*FORMS, PULL_REQUEST], ids=lambda path: path.name)
def test_commands_are_there(path, tmp_path):
    commands = re.findall(r"`((?:make|python) [^`]+)`", path.read_text(encoding="utf-8"))
    assert commands
    check_commands("\n".join(commands), path.name, tmp_path)
