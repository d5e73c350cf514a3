"""Which compiler is taken, and what is said where there is none."""

import stat

import pytest

from torch_metal_attn.simulator import cache, toolchain


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    monkeypatch.delenv(toolchain.OVERRIDE, raising=False)
    monkeypatch.setenv(cache.OVERRIDE, str(tmp_path / "cache"))
    toolchain.find.cache_clear()
    yield
    toolchain.find.cache_clear()


@pytest.fixture
def programs(monkeypatch, tmp_path):
    """A PATH of its own; `add(name, version line)` puts a program there."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def add(name, version):
        path = folder / name
        path.write_text(f"#!/bin/sh\necho run >> {folder}/runs\necho '{version}'\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    return add


def test_new_enough_clang_of_the_system(programs):
    path = programs("clang++", "Debian clang version 16.0.6 (15)")
    found = toolchain.find()
    assert found.compile_command == (str(path),)
    assert found.version.startswith("Debian clang version 16")


def test_newest_numbered_one_if_the_plain_one_is_old(programs):
    programs("clang++", "clang version 14.0.6")
    programs("clang++-17", "clang version 17.0.1")
    newest = programs("clang++-19", "clang version 19.1.0")
    assert toolchain.find().compile_command == (str(newest),)


def test_numbering_of_apple(programs):
    programs("clang++", "Apple clang version 15.0.0 (clang-1500.3.9.4)")
    assert toolchain.find().version.startswith("Apple")


def test_ziglang_if_the_system_has_none(programs):
    programs("clang++", "clang version 14.0.6")
    if toolchain._zig() is None:
        pytest.skip("ziglang is not installed")
    assert toolchain.find().compile_command[1] == "clang"


def test_nothing_to_compile_with(programs, monkeypatch):
    programs("clang++", "clang version 14.0.6")
    monkeypatch.setattr(toolchain, "_zig", lambda: None)
    with pytest.raises(toolchain.ToolchainError, match="is clang 14") as raised:
        toolchain.find()
    assert "install" in str(raised.value)
    assert toolchain.describe().startswith("none: ")


@pytest.mark.parametrize(
    ("name", "version", "words"),
    [
        ("mine", "clang version 15.0.0", "mine is clang 15; the simulator needs 16"),
        ("mine", "g++ (GCC) 12.2.0", "mine is not a clang"),
        ("other", "clang version 17.0.0", "TORCH_METAL_ATTN_CLANG=mine: no such program"),
    ],
)
def test_wrong_compiler_named(programs, monkeypatch, name, version, words):
    programs(name, version)
    monkeypatch.setenv(toolchain.OVERRIDE, "mine")
    with pytest.raises(toolchain.ToolchainError, match=words):
        toolchain.find()


def test_named_compiler_comes_first(programs, monkeypatch):
    programs("clang++", "clang version 18.0.0")
    mine = programs("mine", "clang version 17.0.0")
    monkeypatch.setenv(toolchain.OVERRIDE, str(mine))
    assert toolchain.find().compile_command == (str(mine),)


def test_version_is_asked_once(programs):
    path = programs("clang++", "clang version 17.0.0")
    for _ in range(3):
        toolchain.find.cache_clear()
        toolchain.find()
    assert (path.parent / "runs").read_text().count("run") == 1


def test_unknown_machine(monkeypatch):
    monkeypatch.setattr(toolchain.platform, "machine", lambda: "riscv64")
    with pytest.raises(toolchain.ToolchainError, match="not riscv64"):
        toolchain.find()


@pytest.mark.parametrize(("machine", "flags"), [("x86_64", {"-mavx2", "-mf16c"}), ("arm64", set())])
def test_machine_flags(monkeypatch, machine, flags):
    found = toolchain.Toolchain(("clang++",), ("clang++",), "", "")
    monkeypatch.setattr(toolchain.platform, "machine", lambda: machine)
    chosen = set(found.compiler_flags())
    assert flags <= chosen
    assert flags or not any(flag.startswith("-mav") for flag in chosen)


@pytest.mark.parametrize(("version", "has"), [("16.0.6", False), ("17.0.0", True)])
def test_flag_that_clang_16_does_not_know(programs, version, has):
    programs("clang++", f"clang version {version}")
    assert ("-fbfloat16-excess-precision=none" in toolchain.find().compiler_flags()) == has
