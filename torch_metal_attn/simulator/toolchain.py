"""The compiler that compiles rewritten Metal for this machine."""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path

OVERRIDE = "TORCH_METAL_ATTN_CLANG"
ZIGLANG = "ziglang"  # the value of OVERRIDE that selects the clang of this package
NEWEST = 30  # of the programs clang++-N that are looked for
# The first version of clang that computes in bfloat16 on each machine, and of Apple's clang, whose
# versions are those of Xcode.
OLDEST = {"x86_64": 17, "aarch64": 19}
OLDEST_APPLE = {"x86_64": 16, "aarch64": 17}
# zig 0.17 is built for macOS 15, and zig 0.14 to 0.16 for macOS 13.
OLDEST_MACOS_OF_ZIG = 15
ZIG_OF_OLDER_MACOS = ">=0.14,<0.17"
# From this version on, clang adds more than lines to the debug information. Only lines are read.
KEY_INSTRUCTIONS = 22

MACHINES = {"x86_64": "x86_64", "amd64": "x86_64", "arm64": "aarch64", "aarch64": "aarch64"}


class ToolchainError(RuntimeError):
    """There is no compiler that can build Metal for this machine."""


@dataclass(frozen=True)
class Toolchain:
    compile_command: tuple[str, ...]
    link_command: tuple[str, ...]
    version: str  # as shown by `info`
    identity: str  # changes whenever the compiler does: part of every cache key

    def compiler_flags(self) -> list[str]:
        """Flags for machine and compiler: x86-64 has FMA and half conversion only on request."""
        flags = ["-fPIC"]
        if _machine() == "x86_64":
            flags += ["-mavx2", "-mf16c", "-mfma"]
        version = re.match(r"clang version (\d+)", self.version)  # not Apple's, with other numbers
        if version and int(version.group(1)) >= KEY_INSTRUCTIONS:
            flags.append("-gno-key-instructions")
        return flags


def _machine() -> str:
    return MACHINES[platform.machine().lower()]


def _version(command: Sequence[str]) -> tuple[str, int, bool]:
    """(version line, major, is Apple's) of a clang; raises ToolchainError if it is not a clang."""
    name = " ".join(command)
    try:
        done = subprocess.run(
            [*command, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ToolchainError(f"cannot run {name}: {error}") from error
    first = done.stdout.strip().split("\n")[0]
    match = re.search(r"clang version (\d+)\.[\d.]+", first)
    if done.returncode or not match:
        raise ToolchainError(f"{name} is not a clang (it says {first or done.stderr[:200]!r})")
    return first, int(match.group(1)), first.startswith("Apple")


def _identity(path: str) -> str:
    real = os.path.realpath(path)
    about = os.stat(real)
    return f"{real}:{about.st_size}:{about.st_mtime_ns}"


def _supported_version(command: Sequence[str]) -> str:
    """The version line of a clang; raises ToolchainError if it does not support bfloat16."""
    version, major, apple = _version(command)
    oldest = (OLDEST_APPLE if apple else OLDEST)[_machine()]
    if major < oldest:
        whose = "Apple's clang" if apple else "clang"
        raise ToolchainError(
            f"{' '.join(command)} is {whose} {major}, which cannot compute in bfloat16; "
            f"the simulator needs {oldest} or later"
        )
    return version


def _linker(driver: str) -> tuple[str, ...]:
    """The linking command. The process that loads the image defines the missing symbols."""
    if sys.platform == "darwin":
        return (driver, "-shared", "-undefined", "dynamic_lookup")
    return (driver, "-shared", "-nostdlib")


def _system(path: str) -> Toolchain:
    return Toolchain((path,), _linker(path), _supported_version([path]), _identity(path))


def _zig() -> Toolchain | None:
    """The clang inside ziglang, which links for Linux only; ToolchainError if it cannot be used."""
    spec = find_spec("ziglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(next(iter(spec.submodule_search_locations))) / "zig"
    if not path.is_file():
        return None
    zig = str(path)
    # An image is so small that starting linker threads costs more than they save.
    link: tuple[str, ...] = (zig, "ld.lld", "--threads=1", "-shared")
    system = "unknown-linux-gnu"
    if sys.platform == "darwin":
        link, system = _linker(_driver()), "apple-macos11"
    command = (zig, "clang", f"--target={_machine()}-{system}")
    return Toolchain(command, link, f"{_supported_version(command)} (ziglang)", _identity(zig))


def _driver() -> str:
    path = shutil.which("clang++")
    try:
        # Without the tools, macOS has a program of this name that only offers to install them.
        _version([path or "clang++"])
    except ToolchainError as error:
        raise ToolchainError(
            f"ziglang's clang links with Xcode's command line tools, and {error}: run "
            "`xcode-select --install`"
        ) from None
    return path or "clang++"


def _advice() -> str:
    newest = "run `pip install -U ziglang`, which brings one"
    if sys.platform == "darwin":
        if int(platform.mac_ver()[0].split(".")[0] or 0) >= OLDEST_MACOS_OF_ZIG:
            return f"update Xcode's command line tools to 16.3 or later, or {newest}"
        # The newest Xcode of macOS 14 is 16.2. The wheels of later zigs claim to run there too.
        return f"run `pip install 'ziglang{ZIG_OF_OLDER_MACOS}'`, which brings one for this macOS"
    return newest


def _candidates() -> Iterator[str]:
    names = ["clang++", *(f"clang++-{n}" for n in range(NEWEST, OLDEST[_machine()] - 1, -1))]
    for name in names:
        path = shutil.which(name)
        if path:
            yield path


@lru_cache(maxsize=1)
def find() -> Toolchain:
    """The clang of TORCH_METAL_ATTN_CLANG, or the system's if it is new enough, or ziglang's."""
    if platform.machine().lower() not in MACHINES:
        raise ToolchainError(f"the simulator runs on x86-64 and arm64, not {platform.machine()}")
    override = os.environ.get(OVERRIDE)
    if override == ZIGLANG:
        zig = _zig()
        if zig is None:
            raise ToolchainError(f"{OVERRIDE}={ZIGLANG}: the package is not installed")
        return zig
    if override:
        path = shutil.which(override)
        if path is None:
            raise ToolchainError(f"{OVERRIDE}={override}: no such program")
        return _system(path)
    problems: list[str] = []
    attempts: list[Callable[[], Toolchain | None]]
    attempts = [*(partial(_system, path) for path in _candidates()), _zig]
    for attempt in attempts:
        try:
            if tool := attempt():
                return tool
        except ToolchainError as error:
            problems.append(str(error))
    why = f" ({'; '.join(problems)})" if problems else ""
    whose = "Apple's clang" if sys.platform == "darwin" else "clang"
    oldest = (OLDEST_APPLE if sys.platform == "darwin" else OLDEST)[_machine()]
    raise ToolchainError(
        f"the simulator needs {whose} {oldest} or later to compile Metal{why}: {_advice()}, "
        f"or set {OVERRIDE} to a clang++"
    )


def describe() -> str:
    """The compiler's version for `python -m torch_metal_attn info`; the reason if there is none."""
    try:
        toolchain = find()
    except ToolchainError as error:
        return f"none: {error}"
    return f"{toolchain.version} ({toolchain.compile_command[0]})"
