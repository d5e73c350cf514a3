"""The choice of the compiler, and the message if there is none."""

import stat
from types import SimpleNamespace

import pytest

from torch_metal_attn.simulator import cache, toolchain


@pytest.fixture(autouse=True)
def no_cached_choice(monkeypatch, tmp_path):
    monkeypatch.delenv(toolchain.OVERRIDE, raising=False)
    monkeypatch.setenv(cache.OVERRIDE, str(tmp_path / "cache"))
    monkeypatch.setattr(toolchain.platform, "machine", lambda: "x86_64")
    toolchain.find.cache_clear()
    yield
    toolchain.find.cache_clear()


@pytest.fixture
def programs(monkeypatch, tmp_path):
    """An empty PATH. `add(name, version line)` adds a program, or `zig` in a package."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(toolchain, "find_spec", lambda name: None)

    def add(name, version):
        path = folder / name
        if name == "zig":
            path = tmp_path / "zig"
            spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
            monkeypatch.setattr(toolchain, "find_spec", lambda name: spec)
        path.write_text(f"#!/bin/sh\necho '{version}'\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return path

    return add


OLD, NEW = "clang version 14.0.6", "clang version 19.1.0"
ZIG = {"zig": "clang version 22.1.8"}
NO_BFLOAT = "cannot compute in bfloat16"


@pytest.mark.parametrize(
    ("machine", "installed", "override", "actual"),
    [
        ("x86_64", {"clang++": "Debian clang version 16.0.6 (15)"}, None, NO_BFLOAT),
        ("x86_64", {"clang++": "Ubuntu clang version 17.0.6"}, None, "clang++"),
        ("arm64", {"clang++": "Ubuntu clang version 18.1.3 (1ubuntu1)"}, None, NO_BFLOAT),
        ("aarch64", {"clang++": "Debian clang version 19.1.7 (3)"}, None, "clang++"),
        ("x86_64", {"clang++": "Apple clang version 15.0.0 (clang-1500.3.9.4)"}, None, NO_BFLOAT),
        ("x86_64", {"clang++": "Apple clang version 16.0.0 (clang-1600.0.26)"}, None, "clang++"),
        ("arm64", {"clang++": "Apple clang version 16.0.0 (clang-1600.0.26)"}, None, NO_BFLOAT),
        ("arm64", {"clang++": "Apple clang version 17.0.0 (clang-1700.0.13)"}, None, "clang++"),
        # If clang++ is too old, the newest clang++-N is chosen.
        ("x86_64", {"clang++": OLD, "clang++-17": NEW, "clang++-19": NEW}, None, "clang++-19"),
        # If no clang of the system is new enough, the package is chosen.
        ("x86_64", {"clang++": OLD, **ZIG}, None, "zig"),
        ("x86_64", {"zig": "clang version 18.1.6"}, None, "zig"),
        ("aarch64", {"zig": "clang version 18.1.6"}, None, "-linux-gnu is clang 18"),
        ("x86_64", {"clang++": OLD}, None, "is clang 14.*install"),
        ("riscv64", {"clang++": NEW}, None, "not riscv64"),
        # The clang that the setting names comes before all others.
        ("x86_64", {"clang++": NEW, "mine": NEW}, "mine", "mine"),
        ("x86_64", {"clang++": NEW, **ZIG}, "ziglang", "zig"),
        ("x86_64", {"clang++": NEW}, "ziglang", "CLANG=ziglang: the package is not installed"),
        ("x86_64", {"mine": OLD}, "mine", "mine is clang 14, .* the simulator needs 17"),
        ("x86_64", {"mine": "g++ (GCC) 12.2.0"}, "mine", "mine is not a clang"),
        ("x86_64", {"other": NEW}, "mine", "TORCH_METAL_ATTN_CLANG=mine: no such program"),
    ],
)
def test_choice_or_its_error(programs, monkeypatch, machine, installed, override, actual):
    paths = {name: programs(name, version) for name, version in installed.items()}
    monkeypatch.setattr(toolchain.platform, "machine", lambda: machine)
    if override:
        monkeypatch.setenv(toolchain.OVERRIDE, override)
    if actual in paths:
        tool = toolchain.find()
        assert tool.compile_command[0] == str(paths[actual])
        assert tool.version.startswith(installed[actual])
        assert tool.version.endswith("(ziglang)") == (actual == "zig")
        assert ("-nostdlib" in tool.link_command) == (actual != "zig")
    else:
        with pytest.raises(toolchain.ToolchainError, match=actual):
            toolchain.find()
        assert toolchain.describe().startswith("none: ")


@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_ziglang_links_with_what_the_system_has(programs, monkeypatch, system):
    zig = str(programs("zig", "clang version 22.1.8"))
    monkeypatch.setattr(toolchain.sys, "platform", system)
    old = programs("clang++", "Apple clang version 15.0.0")
    actual = toolchain.find()
    assert actual.compile_command[0] == zig
    if system == "linux":
        assert actual.link_command == (zig, "ld.lld", "--threads=1", "-shared")
    else:
        assert actual.link_command == (str(old), "-shared", "-undefined", "dynamic_lookup")
        old.write_text("#!/bin/sh\necho 'xcode-select: note: No developer tools were found.'\n")
        for _ in range(2):
            toolchain.find.cache_clear()
            with pytest.raises(toolchain.ToolchainError, match=r"links .*`xcode-select --install`"):
                toolchain.find()
            old.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("system", "release", "advice"),
    [
        ("darwin", "14.8.7", r"'ziglang>=0\.14,<0\.17'`, which brings one for this macOS,"),
        ("darwin", "15.2", r"tools to 16\.3 or later, or run `pip install -U ziglang`"),
        ("linux", "", r": run `pip install -U ziglang`"),
    ],
)
def test_the_error_says_what_to_install(programs, monkeypatch, system, release, advice):
    """No Xcode of macOS 14 has a clang that is new enough, and the newest zig is for macOS 15."""
    programs("clang++", "Apple clang version 16.0.0 (clang-1600.0.26.6)")
    monkeypatch.setattr(toolchain.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(toolchain.platform, "mac_ver", lambda: (release, ("", "", ""), "arm64"))
    monkeypatch.setattr(toolchain.sys, "platform", system)
    with pytest.raises(toolchain.ToolchainError, match=f"is Apple's clang 16, .*{advice}"):
        toolchain.find()


@pytest.mark.parametrize(
    ("machine", "version", "flags"),
    [
        ("x86_64", "clang version 21.1.8", {"-mavx2", "-mf16c", "-mfma"}),
        ("arm64", "clang version 22.1.0", {"-gno-key-instructions"}),
        ("arm64", "Apple clang version 24.0", set()),
    ],
)
def test_flags_depend_on_machine_and_compiler(monkeypatch, machine, version, flags):
    monkeypatch.setattr(toolchain.platform, "machine", lambda: machine)
    tool = toolchain.Toolchain(("clang++",), ("clang++",), version, "")
    assert set(tool.compiler_flags()) == {"-fPIC"} | flags
