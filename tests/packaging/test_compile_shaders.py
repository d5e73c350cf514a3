"""The workflow's check of the shaders by Apple's compilers, with a stand-in for each of them."""

import platform
import re
from pathlib import Path

import pytest
import torch

from tests.packaging.built_wheels import IS_CHECKOUT
from torch_metal_attn.runtime import shaders
from torch_metal_attn.tools.lint.specialisations import SPECIALISATIONS

pytestmark = pytest.mark.skipif(not IS_CHECKOUT, reason="not a source checkout built in place")
compile_shaders = pytest.importorskip("compile_shaders", reason="no .ci folder")

NEWER = set(shaders.LANGUAGES)
TEXTS = sum(len(each) for name, each in SPECIALISATIONS.items() if name not in NEWER)

# Notes its arguments; refuses the text whose file is named in $REFUSED and warns of each other.
# While $MISSING exists, the Metal toolchain is not installed.
XCRUN = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$*" in
  *--show-sdk-version) echo "$SDK"; exit 0 ;;
esac
if [ -e "$MISSING" ]; then
  echo "error: cannot execute tool 'metal' due to missing Metal Toolchain"
  exit 1
fi
case "$*" in
  *--version*) echo "Apple metal version 0" ;;
  *"/$REFUSED "*) echo "$REFUSED:7:3: error: unknown type name 'haf'"; exit 1 ;;
  *) echo "warning: unused variable" ;;
esac
"""
INSTALLS = 'rm "$MISSING"; echo "Done downloading: Metal Toolchain 17C7003j."'
# As on macOS 15.
DOES_NOT_INSTALL = 'echo "xcodebuild: error: Failed fetching catalog for assetType"; exit 70'


@pytest.fixture
def xcrun(tmp_path, monkeypatch):
    """Where the stand-in notes what it is called with."""
    program("xcrun", XCRUN, tmp_path)
    program("xcodebuild", "#!/bin/sh\nexit 64\n", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("REFUSED", "none")
    monkeypatch.setenv("SDK", "26.4")
    monkeypatch.setenv("MISSING", str(tmp_path / "missing"))
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    return tmp_path / "calls"


@pytest.fixture
def macos_26(monkeypatch):
    monkeypatch.setattr(platform, "mac_ver", lambda: ("26.2", ("", "", ""), "arm64"))


def program(name, text, tmp_path):
    path = tmp_path / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def without_toolchain(xcodebuild, tmp_path):
    (tmp_path / "missing").touch()
    program("xcodebuild", f'#!/bin/sh\necho "xcodebuild $@" >> "$CALLS"\n{xcodebuild}\n', tmp_path)


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
    version, sdk, *calls = xcrun.read_text().splitlines()
    assert version == "-sdk macosx metal --version"
    assert sdk == "-sdk macosx --show-sdk-version"
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


@pytest.mark.parametrize(
    ("sdk", "oldest"), [("26.4", "26.2"), ("26.2.1", "26.2"), ("26.1", "26.1"), ("27", "26.2")]
)
def test_newer_languages_for_the_newest_macos_that_the_sdk_knows(
    sdk, oldest, xcrun, given_to_torch, macos_26, tmp_path, monkeypatch
):
    monkeypatch.setenv("SDK", sdk)
    assert compile_shaders.main([str(tmp_path / "metal")]) == 0
    calls = re.findall(
        r"-std=metal4.0 -mmacosx-version-min=([\d.]+) .*/(\w+)_\d+\.metal", xcrun.read_text()
    )
    assert set(calls) == {(oldest, name) for name in NEWER}
    assert len(given_to_torch) == sum(map(len, SPECIALISATIONS.values()))


def test_an_sdk_without_the_newer_language(
    xcrun, given_to_torch, macos_26, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("SDK", "15.5")
    assert compile_shaders.main([str(tmp_path / "metal")]) == 0
    assert "-std=metal4.0" not in xcrun.read_text()
    assert len(given_to_torch) == sum(map(len, SPECIALISATIONS.values()))
    names = ", ".join(sorted(NEWER))
    out = capsys.readouterr().out
    assert f"warning: compiled by torch alone, not by Xcode's metal: {names}" in out
    assert f"0 of {TEXTS + len(given_to_torch)} compilations failed" in out


def test_the_toolchain_is_installed_where_it_is_missing(xcrun, given_to_torch, tmp_path):
    without_toolchain(INSTALLS, tmp_path)
    assert compile_shaders.main([str(tmp_path / "metal")]) == 0
    before, download, after, _, *calls = xcrun.read_text().splitlines()
    assert before == after == "-sdk macosx metal --version"
    assert download == "xcodebuild -downloadComponent MetalToolchain"
    assert len(calls) == len(given_to_torch) == TEXTS
    log = (tmp_path / "metal" / "log.txt").read_text()
    assert "Done downloading: Metal Toolchain" in log
    assert "torch alone" not in log


@pytest.mark.parametrize(
    ("xcodebuild", "reason"),
    [
        (DOES_NOT_INSTALL, "MetalToolchain failed:\nxcodebuild: error: Failed fetching catalog"),
        ("exit 0", "metal --version failed:\nerror: cannot execute tool 'metal'"),
        ("exec sleep 60", "xcodebuild -downloadComponent MetalToolchain took more than 0.1 s"),
    ],
    ids=["fails", "installs nothing", "hangs"],
)
def test_torch_alone_judges_where_the_toolchain_cannot_be_installed(
    xcodebuild, reason, xcrun, given_to_torch, tmp_path, monkeypatch, capsys
):
    without_toolchain(xcodebuild, tmp_path)
    monkeypatch.setattr(compile_shaders, "DOWNLOAD_SECONDS", 0.1 if "sleep" in xcodebuild else 60)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert compile_shaders.main([str(tmp_path / "metal")]) == 0
    assert len(given_to_torch) == TEXTS
    log = (tmp_path / "metal" / "log.txt").read_text()
    assert reason in log
    alone = "compiled by torch alone, not by Xcode's metal: append_kv, "
    assert f"\nwarning: {alone}" in log
    assert log.endswith(f"0 of {TEXTS} compilations failed\n")
    assert f"\n::warning::{alone}" in capsys.readouterr().out


def test_what_torch_alone_refuses_fails(xcrun, given_to_torch, tmp_path, monkeypatch):
    without_toolchain(DOES_NOT_INSTALL, tmp_path)

    def refuse(text):
        raise SyntaxError("program_source:9:1: error: no such thing")

    monkeypatch.setattr(torch.mps, "compile_shader", refuse)
    assert compile_shaders.main([str(tmp_path / "metal")]) == 1


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


def test_without_xcode_torch_alone_judges_and_the_log_says_what_is_missing(
    given_to_torch, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compile_shaders.main([str(tmp_path / "metal")]) == 0
    assert len(given_to_torch) == TEXTS
    out = capsys.readouterr().out
    assert "\nwarning: there is no xcrun here: this needs a Mac with Xcode" in out
    assert "\nwarning: compiled by torch alone, not by Xcode's metal: append_kv, " in out


def test_xcrun_that_prints_no_version_of_the_sdk(xcrun, given_to_torch, tmp_path, monkeypatch):
    monkeypatch.setenv("SDK", "xcrun: unknown")
    assert compile_shaders.main([str(tmp_path / "metal")]) == 0
    log = (tmp_path / "metal" / "log.txt").read_text()
    assert "xcrun -sdk macosx --show-sdk-version printed no version:\nxcrun: unknown" in log
    assert len(given_to_torch) == TEXTS


def test_a_torch_without_mps(xcrun, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert compile_shaders.main([str(tmp_path / "metal")]) == 2
    assert len(list((tmp_path / "metal").glob("*.metal"))) == TEXTS
    out = capsys.readouterr().out
    assert "xcrun -sdk macosx metal -std=metal3.1" in out
    assert "error: torch.backends.mps is not available" in out
