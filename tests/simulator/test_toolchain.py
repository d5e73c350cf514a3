"""Which compiler is chosen, and the message if there is none."""

import stat
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from torch_metal_attn.simulator import cache, toolchain


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    monkeypatch.delenv(toolchain.OVERRIDE, raising=False)
    monkeypatch.setenv(cache.OVERRIDE, str(tmp_path / "cache"))
    monkeypatch.setattr(toolchain.platform, "machine", lambda: "x86_64")
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


@pytest.mark.parametrize(
    ("machine", "version", "accepted"),
    [
        ("x86_64", "Debian clang version 16.0.6 (15)", False),
        ("x86_64", "Ubuntu clang version 17.0.6", True),
        ("arm64", "Ubuntu clang version 18.1.3 (1ubuntu1)", False),
        ("aarch64", "Debian clang version 19.1.7 (3)", True),
        ("x86_64", "Apple clang version 15.0.0 (clang-1500.3.9.4)", False),
        ("x86_64", "Apple clang version 16.0.0 (clang-1600.0.26.6)", True),
        ("arm64", "Apple clang version 16.0.0 (clang-1600.0.26.6)", False),
        ("arm64", "Apple clang version 17.0.0 (clang-1700.0.13.3)", True),
    ],
)
def test_first_clang_that_computes_in_bfloat16(programs, monkeypatch, machine, version, accepted):
    path = programs("clang++", version)
    monkeypatch.setattr(toolchain, "_zig", lambda: None)
    monkeypatch.setattr(toolchain.platform, "machine", lambda: machine)
    if accepted:
        assert toolchain.find().compile_command == (str(path),)
        assert toolchain.find().version == version
    else:
        with pytest.raises(toolchain.ToolchainError, match="cannot compute in bfloat16"):
            toolchain.find()


def test_newest_numbered_one_if_the_plain_one_is_old(programs):
    programs("clang++", "clang version 14.0.6")
    programs("clang++-17", "clang version 17.0.1")
    newest = programs("clang++-19", "clang version 19.1.0")
    assert toolchain.find().compile_command == (str(newest),)


def test_ziglang_if_the_system_has_none(programs):
    programs("clang++", "clang version 14.0.6")
    if find_spec("ziglang") is None:
        pytest.skip("ziglang is not installed")
    assert toolchain.find().compile_command[1] == "clang"
    assert toolchain.describe().endswith("zig)")


@pytest.fixture
def package(monkeypatch, tmp_path):
    """`package(version line)` stands in for an installed ziglang."""

    def install(version):
        zig = tmp_path / "zig"
        zig.write_text(f"#!/bin/sh\necho '{version}'\n")
        zig.chmod(zig.stat().st_mode | stat.S_IXUSR)
        spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
        monkeypatch.setattr(toolchain, "find_spec", lambda name: spec)
        return str(zig)

    return install


def test_old_ziglang_is_refused(programs, package, monkeypatch):
    zig = package("clang version 18.1.6")
    assert toolchain.find().compile_command[0] == zig
    toolchain.find.cache_clear()
    monkeypatch.setattr(toolchain.platform, "machine", lambda: "aarch64")
    with pytest.raises(toolchain.ToolchainError, match="-linux-gnu is clang 18"):
        toolchain.find()


@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_ziglang_links_with_what_the_system_has(programs, package, monkeypatch, system):
    zig = package("clang version 22.1.8")
    monkeypatch.setattr(toolchain.sys, "platform", system)
    old = programs("clang++", "Apple clang version 15.0.0")
    found = toolchain.find()
    assert found.compile_command[0] == zig
    if system == "linux":
        assert found.link_command == (zig, "ld.lld", "--threads=1", "-shared")
    else:
        assert found.link_command == (str(old), "-shared", "-undefined", "dynamic_lookup")
        old.unlink()
        toolchain.find.cache_clear()
        with pytest.raises(toolchain.ToolchainError):
            toolchain.find()


def test_images_are_linked_without_libraries(programs):
    programs("clang++", "clang version 17.0.0")
    assert "-nostdlib" in toolchain.find().link_command


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
        ("mine", "clang version 15.0.0", "mine is clang 15, .* the simulator needs 17"),
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


def test_ziglang_named_comes_before_the_systems(programs, package, monkeypatch):
    programs("clang++", "clang version 22.0.0")
    zig = package("clang version 22.1.8")
    monkeypatch.setenv(toolchain.OVERRIDE, "ziglang")
    assert toolchain.find().compile_command[0] == zig
    toolchain.find.cache_clear()
    monkeypatch.setattr(toolchain, "_zig", lambda: None)
    with pytest.raises(toolchain.ToolchainError, match="CLANG=ziglang: the package is not install"):
        toolchain.find()


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


@pytest.mark.parametrize(
    ("version", "known"),
    [("clang version 21.1.8", False), ("clang version 22.1.0", True), ("Apple clang 24.0", False)],
)
def test_flags_of_newer_clangs_only(version, known):
    flags = toolchain.Toolchain(("clang++",), ("clang++",), version, "").compiler_flags()
    assert ("-gno-key-instructions" in flags) == known
