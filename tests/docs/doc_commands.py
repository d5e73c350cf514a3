"""Checks commands in pages: cheap commands are run, and arguments of other commands are parsed."""

import argparse
import contextlib
import fnmatch
import importlib
import io
import re
import shlex
import subprocess
from pathlib import Path
from unittest import mock

import repository
import yaml
from packaging.requirements import Requirement

from torch_metal_attn import __main__ as command_line
from torch_metal_attn.simulator import __main__ as simulator
from torch_metal_attn.tools.lint import __main__ as lint

ROOT = Path(__file__).parents[2]
COMMAND_LINES = {"torch_metal_attn": command_line, "torch_metal_attn.tools.lint": lint}
PIP_FLAGS = {"--no-build-isolation", "-e", "--index-url=https://download.pytorch.org/whl/cpu"}
# The platforms of the wheels that `make wheel wheel-macos` puts into one folder.
PLATFORMS = ["linux_x86_64", "macosx_14_0_arm64"]
# Actions that a workflow may use. They are not run.
ACTIONS = {"actions/checkout", "actions/setup-python"}


class Parsed(Exception):
    """The parser accepted the arguments."""


def check_commands(text, where):
    """Checks commands. Returns their output; raises AssertionError for a wrong or unknown line."""
    printed = ""
    for line in text.replace("\\\n", "").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words:
            assert words[0] in RULES, f"{where}: no rule says how to check {line!r}"
            printed += RULES[words[0]](words[1:], f"{where}: {line!r}") or ""
    return printed


def _make(arguments, where):
    assert arguments, f"{where}: make needs a target"
    done = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{where}: {done.stderr}"


def _python(arguments, where):
    if arguments[0].startswith("docs/examples/"):
        assert (ROOT / arguments[0]).is_file(), where
        return _parsed_by(importlib.import_module(Path(arguments[0]).stem), arguments[1:], where)
    assert arguments[:1] == ["-m"], f"{where}: only modules and examples can be checked"
    module, arguments = arguments[1], arguments[2:]
    if module == "pytest":
        for path in arguments:
            assert path.startswith("-") or (ROOT / path.split("::")[0]).exists(), where
        return
    if module == "torch_metal_attn.simulator":
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            status = simulator.main(arguments)
        assert status in (0, 1), f"{where}: {out.getvalue()}"  # 1: it reports faults
        return out.getvalue()
    assert module in COMMAND_LINES, f"{where}: no rule says how to check {module}"
    _parsed_by(COMMAND_LINES[module], arguments, where)


def _parsed_by(module, arguments, where):
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self, *options):
        parse(self, *options)
        raise Parsed

    with mock.patch.object(argparse.ArgumentParser, "parse_args", parse_and_stop):
        try:
            module.main(arguments)
        except Parsed:
            return
        except SystemExit as error:
            raise AssertionError(f"{where}: not understood") from error
    raise AssertionError(f"{where}: the arguments were not read")


def _pip(arguments, where):
    assert arguments[:1] == ["install"], f"{where}: only install can be checked"
    packages = [word for word in arguments[1:] if word not in PIP_FLAGS]
    assert packages, f"{where}: no package is named"
    for word in packages:
        assert not word.startswith("-"), f"{where}: {word}"
        if word.startswith("."):
            word = word.replace(".", "torch_metal_attn", 1)
        elif word.endswith(".whl"):
            wheels = [f"torch_metal_attn-0.1.0-cp310-abi3-{platform}.whl" for platform in PLATFORMS]
            matches = fnmatch.filter(wheels, Path(word).name)
            assert len(matches) == 1, f"{where}: {word} is {matches or 'no wheel of ours'}"
            continue
        requirement = Requirement(word)
        if requirement.name == "torch_metal_attn":
            assert requirement.extras <= extras(), f"{where}: {requirement.extras - extras()}"


def _git(arguments, where):
    url = repository.url() or repository.PLACEHOLDER
    assert arguments == ["clone", url], f"{where}: the repository is {url}"


def _cd(arguments, where):
    assert arguments == [repository.PLACEHOLDER.split("/")[-1]], where


def extras():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = re.search(r"^\[project\.optional-dependencies\]\n(.*?)^\[", text, re.M | re.S)[1]
    return set(re.findall(r"^(\w+) = \[", table, re.M))


def _echo(arguments, where):
    command = re.fullmatch(r"(\S+) > (\w+\.txt)", " ".join(arguments))
    assert command, f"{where}: echo writes one requirement to a file"
    Requirement(command[1])


def _compiler(arguments, where):
    """Checks that the sources exist; tests/simulator/test_alone.py compiles them."""
    assert all(list(ROOT.glob(name)) for name in arguments if name.endswith(".cpp")), where


RULES = {"make": _make, "python": _python, "pip": _pip, "echo": _echo, "c++": _compiler}
RULES |= {"git": _git, "cd": _cd}


def check_yaml(text, where):
    """A GitHub workflow, whose steps are known actions or commands as in `sh` blocks."""
    jobs = yaml.safe_load(text)["jobs"]
    for name, job in jobs.items():
        assert job["runs-on"], f"{where}: the job {name} has no runs-on"
        for step in job["steps"]:
            if "uses" in step:
                assert step["uses"].split("@")[0] in ACTIONS, f"{where}: {step['uses']}"
                continue
            for matrix in job.get("strategy", {}).get("matrix", {}).get("include", [{}]):
                command = step["run"]
                for variable, value in matrix.items():
                    command = command.replace(f"${{{{ matrix.{variable} }}}}", str(value))
                check_commands(command, f"{where}, {name}")
