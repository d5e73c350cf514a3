"""The compiler that turns rewritten Metal into code for this machine."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

OVERRIDE = "TORCH_METAL_ATTN_CLANG"
OLDEST, NEWEST = 16, 30
# Apple numbers its clang by Xcode: 15 is built from LLVM 16.
OLDEST_APPLE = 15

MACHINES = {"x86_64": "x86_64", "amd64": "x86_64", "arm64": "aarch64", "aarch64": "aarch64"}


class ToolchainError(RuntimeError):
    """No compiler that can build Metal for this machine."""


@dataclass(frozen=True)
class Toolchain:
    """How to call the compiler and the linker."""

    compile_command: tuple[str, ...]
    link_command: tuple[str, ...]
    version: str  # as shown by `info`
    identity: str  # changes whenever the compiler does: part of every cache key
    major: int = NEWEST  # LLVM's version, as far as flags depend on it

    def compiler_flags(self) -> list[str]:
        """What machine and compiler need: x86-64 has FMA and half conversion only on request."""
        flags = ["-fPIC"]
        if MACHINES[platform.machine().lower()] == "x86_64":
            flags += ["-mavx2", "-mf16c", "-mfma"]
        if self.major >= 17:  # an older one has no such precision to switch off
            flags += ["-Xclang", "-fbfloat16-excess-precision=none"]
        return flags


def _version(path: str) -> tuple[str, int, bool]:
    """(version line, major, is Apple's) of a clang; raises ToolchainError if it is none."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise ToolchainError(f"cannot run {path}: {error}") from error
    first = done.stdout.strip().split("\n")[0]
    match = re.search(r"clang version (\d+)\.[\d.]+", first)
    if done.returncode or not match:
        raise ToolchainError(f"{path} is not a clang (it says {first or done.stderr[:200]!r})")
    return first, int(match.group(1)), first.startswith("Apple")


def _identity(path: str) -> str:
    real = os.path.realpath(path)
    about = os.stat(real)
    return f"{real}:{about.st_size}:{about.st_mtime_ns}"


def _system(path: str) -> Toolchain:
    version, major, apple = _remembered_version(path)
    oldest = OLDEST_APPLE if apple else OLDEST
    if major < oldest:
        raise ToolchainError(f"{path} is clang {major}; the simulator needs {oldest} or later")
    link = [path, "-shared"]
    if sys.platform == "darwin":
        link += ["-undefined", "dynamic_lookup"]
    llvm = major + 1 if apple else major
    return Toolchain((path,), tuple(link), version, _identity(path), llvm)


def _remembered_version(path: str) -> tuple[str, int, bool]:
    """`_version`, kept on disk: starting a compiler only to ask costs more than a cache hit."""
    from .cache import cache_dir

    memory = cache_dir() / "compilers.json"
    identity = _identity(path)
    try:
        known = json.loads(memory.read_text())
        first, major, apple = known[identity]
        return str(first), int(major), bool(apple)
    except (OSError, ValueError, KeyError, TypeError):
        known = {}
    known[identity] = _version(path)
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        scratch = memory.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(known))
        scratch.replace(memory)
    except OSError:
        pass  # an unwritable cache only costs time
    found: tuple[str, int, bool] = known[identity]
    return found


def _zig() -> Toolchain | None:
    """The clang inside the ziglang package; its linker is used for Linux only."""
    spec = find_spec("ziglang")
    if spec is None or not spec.submodule_search_locations or sys.platform != "linux":
        return None
    path = Path(next(iter(spec.submodule_search_locations))) / "zig"
    if not path.is_file():
        return None
    zig = str(path)
    target = f"--target={MACHINES[platform.machine().lower()]}-unknown-linux-gnu"
    link = (zig, "ld.lld", "-shared")
    return Toolchain((zig, "clang", target), link, f"ziglang's clang ({zig})", _identity(zig))


def _candidates() -> Iterator[str]:
    names = ["clang++", *(f"clang++-{n}" for n in range(NEWEST, OLDEST - 1, -1))]
    for name in names:
        path = shutil.which(name)
        if path:
            yield path


@lru_cache(maxsize=1)
def find() -> Toolchain:
    """The system's clang (16 or later), else the one in ziglang; raises ToolchainError if neither.

    The environment variable TORCH_METAL_ATTN_CLANG names another clang.
    """
    if platform.machine().lower() not in MACHINES:
        raise ToolchainError(f"the simulator runs on x86-64 and arm64, not {platform.machine()}")
    override = os.environ.get(OVERRIDE)
    if override:
        path = shutil.which(override)
        if path is None:
            raise ToolchainError(f"{OVERRIDE}={override}: no such program")
        return _system(path)
    refused: list[str] = []
    for path in _candidates():
        try:
            return _system(path)
        except ToolchainError as error:
            refused.append(str(error))
    zig = _zig()
    if zig is not None:
        return zig
    what = "xcode-select --install" if sys.platform == "darwin" else "pip install ziglang"
    found = f" ({'; '.join(refused)})" if refused else ""
    raise ToolchainError(
        f"the simulator needs clang {OLDEST} or later to compile Metal{found}: run `{what}`, "
        f"or set {OVERRIDE} to a clang++"
    )


def describe() -> str:
    """The compiler's version for `python -m torch_metal_attn info`; the reason if there is none."""
    try:
        toolchain = find()
        if len(toolchain.compile_command) > 1:
            done = subprocess.run(
                [*toolchain.compile_command, "--version"], capture_output=True, text=True
            )
            return f"{done.stdout.splitlines()[0]} (ziglang)"
        return f"{toolchain.version} ({toolchain.compile_command[0]})"
    except (ToolchainError, OSError, IndexError) as error:
        return f"none: {error}"
