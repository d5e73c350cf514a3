"""The check of the shaders by Apple's compilers, with a fake of each compiler."""

import platform
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.packaging.built_wheels import IS_CHECKOUT
from torch_metal_attn.runtime import shaders

pytestmark = pytest.mark.skipif(not IS_CHECKOUT, reason="not a source checkout built in place")
compile_shaders = pytest.importorskip("compile_shaders", reason="no .ci folder")

NEWER = set(shaders.LANGUAGES)
# These replace the lint's variants, which take seconds to find.
VARIANTS = [{}, {"ELEMENT": "half"}, {"ELEMENT": "float"}]
SPECIALISATIONS = dict.fromkeys(shaders.families(), VARIANTS)
TEXTS = len(VARIANTS) * (len(SPECIALISATIONS) - len(NEWER))

# A fake: it logs its arguments, refuses the text of the file $REFUSED, and warns about others.
# If $MISSING exists, the Metal toolchain is not installed.
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


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """refused: the file that xcrun refuses. torch_takes: replaces torch's compiler; None: no mps"""
    calls, folder = tmp_path / "calls", tmp_path / "metal"

    def run(sdk="26.4", macos="15.6", toolchain=True, refused="none", torch_takes=list, xcode=True):
        texts = []
        if xcode:
            path = tmp_path / "bin" / "xcrun"
            path.parent.mkdir(exist_ok=True)
            path.write_text(XCRUN)
            path.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":" if xcode else None)
        missing = "" if toolchain else tmp_path
        settings = {"CALLS": calls, "MISSING": missing, "REFUSED": refused, "SDK": sdk}
        for name, value in settings.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("GITHUB_ACTIONS", "true")
        monkeypatch.setattr(compile_shaders, "specialisations", lambda: SPECIALISATIONS)
        monkeypatch.setattr(platform, "mac_ver", lambda: (macos, ("", "", ""), "arm64"))
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: torch_takes is not None)
        compile_text = lambda text: (texts.append(text), torch_takes(text))  # noqa: E731
        monkeypatch.setattr(torch.mps, "compile_shader", compile_text)
        status = compile_shaders.main([str(folder)])
        called = calls.read_text().splitlines() if calls.exists() else []
        log, out = (folder / "log.txt").read_text(), capsys.readouterr().out
        done = {"status": status, "calls": called, "torch_texts": texts, "log": log, "out": out}
        return SimpleNamespace(**done, folder=folder)

    return run


def test_both_compilers_get_every_specialisation_of_every_family(run):
    done = run()
    assert done.status == 0
    version, sdk, *calls = done.calls
    assert version == "-sdk macosx metal --version"
    assert sdk == "-sdk macosx --show-sdk-version"
    assert len(calls) == len(done.torch_texts) == TEXTS
    assert all("-sdk macosx metal -std=metal3.1 " in call for call in calls)
    compiled = [re.search(r" -c (\S+/(\w+)_\d+\.metal) -o \S+\.air$", call) for call in calls]
    assert {match[2] for match in compiled} == set(shaders.families()) - NEWER
    assert [Path(match[1]).read_text() for match in compiled] == done.torch_texts
    text = shaders.with_defines(shaders.source("flash_fwd"), VARIANTS[1])
    assert text in done.torch_texts
    assert "Apple metal version 0" in done.log
    assert done.log.count("warning: unused variable") == TEXTS
    assert f"0 of {2 * TEXTS} compilations failed" in done.log
    assert "flash_fwd_tensor is left out: it needs macOS 26" in done.log


@pytest.mark.parametrize(
    ("sdk", "oldest"),
    [("26.4", "26.2"), ("26.2.1", "26.2"), ("26.1", "26.1"), ("27", "26.2"), ("15.5", None)],
)
def test_newer_languages_are_compiled_for_the_newest_macos_of_the_sdk(run, sdk, oldest):
    done = run(sdk=sdk, macos="26.2")
    assert done.status == 0
    pattern = r"-std=metal4.0 -mmacosx-version-min=([\d.]+) .*/(\w+)_\d+\.metal"
    calls = re.findall(pattern, "\n".join(done.calls))
    assert set(calls) == {(oldest, name) for name in NEWER if oldest}
    assert len(done.torch_texts) == len(VARIANTS) * len(SPECIALISATIONS)
    alone = f"compiled by torch alone, not by Xcode's metal: {', '.join(sorted(NEWER))}"
    assert (f"warning: {alone}" in done.log) == (oldest is None)


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        ({"toolchain": False}, "metal --version failed:\nerror: cannot execute tool 'metal'"),
        ({"xcode": False}, "warning: xcrun is not installed; install Xcode on a Mac"),
        ({"sdk": "xcrun: ?"}, "xcrun -sdk macosx --show-sdk-version printed no version:\nxcrun: ?"),
    ],
    ids=["no toolchain", "no Xcode", "no version"],
)
def test_torch_compiles_alone_without_xcode(run, machine, reason):
    done = run(**machine)
    assert done.status == 0
    assert len(done.torch_texts) == TEXTS
    assert reason in done.log
    alone = "compiled by torch alone, not by Xcode's metal: append_kv, "
    assert f"\nwarning: {alone}" in done.log
    assert done.log.endswith(f"0 of {TEXTS} compilations failed\n")
    assert f"\n::warning::{alone}" in done.out


def test_a_refused_text_fails_and_the_others_are_compiled(run):
    def torch_takes(text):
        if "void softmax(" in text:
            raise SyntaxError("program_source:9:1: error: no such thing")

    done = run(refused="rope_1.metal", torch_takes=torch_takes)
    assert done.status == 1
    assert len(done.torch_texts) == TEXTS
    assert "rope_1.metal:7:3: error: unknown type name 'haf'" in done.log
    assert done.log.count("program_source:9:1: error: no such thing") == 3
    failed = done.log.partition("compilations failed\n")[2].split("\n")
    names = [line.split()[0] for line in failed if line]
    assert names == ["rope_1", "softmax_0", "softmax_1", "softmax_2"]
    assert f"4 of {2 * TEXTS} compilations failed" in done.out


def test_without_mps_nothing_is_compiled(run):
    done = run(torch_takes=None)
    assert done.status == 2
    assert len(list(done.folder.glob("*.metal"))) == TEXTS
    assert "xcrun -sdk macosx metal -std=metal3.1" in done.out
    assert "error: torch.backends.mps is not available" in done.out
