"""The workflow's check of the shaders by Apple's compilers, with a stand-in for each of them."""

import platform
import re
from pathlib import Path

import pytest
import torch

from tests.packaging.built_wheels import IS_CHECKOUT
from torch_metal_attn import shaders
from torch_metal_attn.simulator.lint.specialisations import SPECIALISATIONS

pytestmark = pytest.mark.skipif(not IS_CHECKOUT, reason="not a source checkout built in place")
compile_shaders = pytest.importorskip("compile_shaders", reason="no .ci folder")

NEWER = set(shaders.LANGUAGES)
TEXTS = sum(len(each) for name, each in SPECIALISATIONS.items() if name not in NEWER)

# Notes its arguments; refuses the text whose file is named in $REFUSED and warns of each other.
XCRUN = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$*" in
  *--version*) echo "Apple metal version 0" ;;
  *"/$REFUSED "*) echo "$REFUSED:7:3: error: unknown type name 'haf'"; exit 1 ;;
  *) echo "warning: unused variable" ;;
esac
"""


@pytest.fixture
def xcrun(tmp_path, monkeypatch):
    """Where the stand-in notes what it is called with."""
    path = tmp_path / "bin" / "xcrun"
    path.parent.mkdir()
    path.write_text(XCRUN)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(path.parent), prepend=":")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("REFUSED", "none")
    return tmp_path / "calls"


@pytest.fixture
def given_to_torch(monkeypatch):
    """What torch.mps.compile_shader is given, on a machine that has it."""
    texts = []
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "compile_shader", texts.append)
    return texts


def test_both_compilers_get_every_specialisation_of_every_family(xcrun, given_to_torch, tmp_path):
    folder = tmp_path / "metal"
    assert compile_shaders.main([str(folder)]) == 0
    version, *calls = xcrun.read_text().splitlines()
    assert version == "-sdk macosx metal --version"
    assert len(calls) == len(given_to_torch) == TEXTS
    assert all("-sdk macosx metal -std=metal3.1 " in call for call in calls)
    compiled = [re.search(r" -c (\S+/(\w+)_\d+\.metal) -o \S+\.air$", call) for call in calls]
    assert {match[2] for match in compiled} == set(shaders.families()) - NEWER
    assert [Path(match[1]).read_text() for match in compiled] == given_to_torch
    defines = "".join(f"#define {n} {v}\n" for n, v in SPECIALISATIONS["flash_fwd"][1].items())
    assert defines + shaders.source("flash_fwd") in given_to_torch
    log = (folder / "log.txt").read_text()
    assert "Apple metal version 0" in log
    assert log.count("warning: unused variable") == TEXTS
    assert f"0 of {2 * TEXTS} compilations failed" in log
    assert "flash_fwd_tensor is left out: it needs macOS 26" in log


def test_newer_languages_from_their_macos_on(xcrun, given_to_torch, tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "mac_ver", lambda: ("26.2", ("", "", ""), "arm64"))
    assert compile_shaders.main([str(tmp_path / "metal")]) == 0
    calls = re.findall(r"-std=metal4.0 .*/(\w+)_\d+\.metal", xcrun.read_text())
    assert set(calls) == NEWER
    assert len(given_to_torch) == sum(map(len, SPECIALISATIONS.values()))


def test_what_one_compiler_refuses_fails_and_the_rest_is_compiled_too(
    xcrun, given_to_torch, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("REFUSED", "rope_1.metal")

    def refuse(text):
        given_to_torch.append(text)
        if "void softmax(" in text:
            raise SyntaxError("program_source:9:1: error: no such thing")

    monkeypatch.setattr(torch.mps, "compile_shader", refuse)
    assert compile_shaders.main([str(tmp_path / "metal")]) == 1
    assert len(given_to_torch) == TEXTS
    log = (tmp_path / "metal" / "log.txt").read_text()
    assert "rope_1.metal:7:3: error: unknown type name 'haf'" in log
    assert log.count("program_source:9:1: error: no such thing") == 3
    failed = log.partition("compilations failed\n")[2].split("\n")
    names = [line.split()[0] for line in failed if line]
    assert names == ["rope_1", "softmax_0", "softmax_1", "softmax_2"]
    assert f"4 of {2 * TEXTS} compilations failed" in capsys.readouterr().out


def test_without_xcode_the_texts_are_written_and_an_error_says_what_is_missing(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compile_shaders.main([str(tmp_path / "metal")]) == 2
    assert len(list((tmp_path / "metal").glob("*.metal"))) == TEXTS
    out = capsys.readouterr().out
    assert "xcrun -sdk macosx metal -std=metal3.1" in out
    assert out.splitlines()[-1].startswith(
        "error: there is no xcrun here: this needs a Mac with Xc"
    )


def test_xcode_without_its_metal_compiler(xcrun, tmp_path, capsys):
    """Xcode 26 has it as a component of its own, and says how to get it."""
    words = "error: cannot execute tool 'metal' due to missing Metal Toolchain"
    (tmp_path / "bin" / "xcrun").write_text(f'#!/bin/sh\necho "{words}"\nexit 1\n')
    assert compile_shaders.main([str(tmp_path / "metal")]) == 2
    assert f"xcrun -sdk macosx metal --version failed:\n{words}" in capsys.readouterr().out


def test_a_torch_without_mps(xcrun, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert compile_shaders.main([str(tmp_path / "metal")]) == 2
    assert "torch.backends.mps is not available" in capsys.readouterr().out
