"""The version of macOS and its use by the import, with fake answers of macOS."""

import ctypes
import platform
import subprocess
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.forks import run_alone, run_program
from torch_metal_attn.runtime import device, macos


@pytest.fixture
def set_versions(monkeypatch):
    """Sets the versions that macOS reports by files, by the kernel, and to system programs."""

    def sysctlbyname(name, text, size, new, new_size):
        assert (name, new) == (b"kern.osproductversion", None)
        assert size._obj.value == len(text)
        text.value = fake["kernel"].encode()
        return -1 if fake["kernel"] == "" else 0

    def run(command, *, env, **options):
        assert command == ["/usr/sbin/sysctl", "-n", "kern.osproductversion"]
        assert env["SYSTEM_VERSION_COMPAT"] == "0"
        if fake["program"] == "":
            raise subprocess.CalledProcessError(1, command)
        return SimpleNamespace(stdout=fake["program"] + "\n")

    fake = {}
    monkeypatch.setattr(
        platform, "mac_ver", lambda: (fake["files"], ("", "", ""), "arm64" if fake["files"] else "")
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(sysctlbyname=sysctlbyname))
    monkeypatch.setattr(subprocess, "run", run)
    macos.version.cache_clear()
    yield lambda files, kernel, program: fake.update(files=files, kernel=kernel, program=program)
    macos.version.cache_clear()


@pytest.mark.parametrize(
    "files, kernel, program, version",
    [
        ("26.2", "26.2.1", "unused", "26.2.1"),
        ("10.16", "14.4", "unused", "14.4"),
        ("16.2", "16.2", "26.2", "26.2"),  # linked for macOS 15 or earlier
        ("10.16", "10.16", "26.1", "26.1"),  # linked for macOS 10.15 or earlier
        ("16.2", "16.2", "", "16.2"),
        ("15.1", "", "unused", "15.1"),
        ("", "unused", "unused", ""),
    ],
)
def test_the_version_that_macos_really_has_is_found(files, kernel, program, version, set_versions):
    set_versions(files, kernel, program)
    assert macos.version() == version


@pytest.mark.parametrize(
    "version, suffices", [("26.2", 1), ("27.0", 1), ("26.1.9", 0), ("26", 0), ("15.6", 0), ("", 0)]
)
def test_at_least_compares_versions(version, suffices, monkeypatch):
    monkeypatch.setattr(macos, "version", lambda: version)
    assert macos.at_least(26, 2) == bool(suffices)


FAST, TOO_OLD = "with PYTORCH_MPS_FAST_MATH Metal 3.1 ignores NaN", "compiles no kernels before"


@pytest.mark.parametrize(
    "torch_version, version, fast, chosen, metal, warning",
    [
        ("2.10.0", "14.6", "1", "", "3.1", FAST),
        ("2.10.0", "14.6", "", "", "3.1", FAST),  # torch treats every value but 0 as on
        ("2.10.0", "14.6", "0", "", "3.1", ""),
        ("2.10.0", "14.6", None, "", "3.1", ""),
        ("2.10.0", "26.2", "1", "4.0", "3.1", FAST),  # torch 2.10 compiles only Metal 3.1
        ("2.11.0", "14.6", "1", "", "3.1", FAST),
        ("2.11.0", "15.0", "1", "", "3.2", ""),
        ("2.14.1", "26.0", "1", "3.1", "4.0", ""),  # torch 2.14 ignores PYTORCH_MPS_METAL_VERSION
        ("2.15.0", "26.0", "1", "3.1", "3.1", FAST),
        ("2.15.0", "26.0", "1", "3.2", "3.2", ""),
        ("2.15.0+cpu", "15.1", None, "5", "3.2", ""),
        ("2.15.0", "14.6", None, "", "3.1", TOO_OLD),
    ],
)
def test_metal_version_and_fast_math_follow_the_settings(
    torch_version, version, fast, chosen, metal, warning, monkeypatch, capsys
):
    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setattr(macos, "version", lambda: version)
    monkeypatch.setenv("PYTORCH_MPS_METAL_VERSION", chosen)
    monkeypatch.delenv("PYTORCH_MPS_FAST_MATH", raising=False)
    if fast is not None:
        monkeypatch.setenv("PYTORCH_MPS_FAST_MATH", fast)
    device._say.cache_clear()
    device.warn_of_torch()
    printed = capsys.readouterr().err
    assert device.metal_version() == metal
    assert warning in printed
    assert bool(printed) == bool(warning)


IMPORT = """
import platform, subprocess, sys, types, warnings
import torch

def is_macos_or_newer(major, minor):  # behaves as in torch 2.13
    warnings.warn(f"Can't check whether running on {major}.{minor}+ returning one for 26.0+")
    return True

torch.backends.mps.is_available = lambda: True
torch.backends.mps.get_name = lambda: "Apple M5"
torch.backends.mps.get_core_count = lambda: 10
torch.backends.mps.is_macos_or_newer = is_macos_or_newer
platform.mac_ver = lambda: (sys.argv[1], ("", "", ""), "arm64")
subprocess.run = lambda *_, **__: types.SimpleNamespace(stdout="26.2\\n")
warnings.simplefilter("error")

import torch_metal_attn
from torch_metal_attn.runtime import macos, tensor_tiles
print(macos.at_least(*tensor_tiles.OLDEST_MACOS))
"""


def test_the_import_asks_the_system_and_not_torch():
    """torch 2.13 warns about unknown versions, which is an error with `python -W error`."""
    assert run_alone(IMPORT, "16.2").split() == ["True"]


def test_the_import_warns_of_fast_math_once():
    done = run_program(IMPORT, "14.6", PYTORCH_MPS_FAST_MATH="1")
    assert (done.stdout.split(), done.stderr.count("PYTORCH_MPS_FAST_MATH")) == (["False"], 1)
