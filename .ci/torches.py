"""The symbols of torch's macOS wheels: their exports, and their imports from macOS."""

import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import macho

from torch_metal_attn.runtime import macos
from torch_metal_attn.simulator import cache

OLDEST = (2, 10)
MACOS = (*macos.OLDEST, 0)
MACOS_PLATFORM = "macosx_{}_{}_arm64".format(*macos.OLDEST)
LIBCXX = "/usr/lib/libc++.1.dylib"
LIBSYSTEM = "/usr/lib/libSystem.B.dylib"
TORCH_CPU = "@rpath/libtorch_cpu.dylib"
# The libraries are the same for every version of Python.
WHEELS_FOR = [
    *("--only-binary", ":all:", "--platform", MACOS_PLATFORM),
    *("--python-version", "3.12", "--implementation", "cp", "--abi", "cp312"),
]


@dataclass(frozen=True)
class Torch:
    version: str
    exports: dict[str, list[str]]  # {install name of a library: its symbols}
    # {library of macOS: symbols}. macOS 14 must have these symbols, because a library of this
    # torch that was built for macOS 14 or earlier imports them.
    taken_from_macos: dict[str, list[str]]


def versions() -> list[str]:
    """The last patch of each minor version from 2.10 on, oldest first. Raises RuntimeError."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch", *WHEELS_FOR]
    answer = subprocess.run(command, capture_output=True, text=True)
    match = re.search(r"^Available versions: (.*)$", answer.stdout, re.MULTILINE)
    last: dict[tuple[int, int], int] = {}
    for version in re.findall(r"(\d+\.\d+\.\d+)(?:,|$)", match[1]) if match else []:
        major, minor, patch = map(int, version.split("."))
        if (major, minor) >= OLDEST:
            last[major, minor] = max(patch, last.get((major, minor), 0))
    if not last:
        raise RuntimeError(f"pip found no torch 2.10 or later for macOS on arm64:\n{answer.stderr}")
    return [f"{major}.{minor}.{patch}" for (major, minor), patch in sorted(last.items())]


def load(version: str) -> Torch:
    """A version's symbols, from the cache or its wheel (100 MB). Raises RuntimeError."""
    # The simulator's cache would delete files that have not been used for long.
    folder = cache.default_dir().with_name("torch_metal_attn-torches")
    cached = folder / f"torch-{version}-macos-arm64.json.gz"
    if cached.exists():
        return Torch(**json.loads(gzip.decompress(cached.read_bytes())))
    torch = _read_wheel(version)
    cached.parent.mkdir(parents=True, exist_ok=True)
    unfinished = cached.with_suffix(f".{os.getpid()}")
    unfinished.write_bytes(gzip.compress(json.dumps(asdict(torch)).encode()))
    unfinished.replace(cached)
    return torch


def _read_wheel(version: str) -> Torch:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", *WHEELS_FOR]
        # The wheel is only read, so constraints on installed packages do not apply.
        unconstrained = os.environ | {"PIP_CONSTRAINT": os.devnull}
        done = subprocess.run([*command, "--dest", folder, f"torch=={version}"], env=unconstrained)
        wheels = list(Path(folder).glob("torch-*.whl"))
        if done.returncode != 0 or len(wheels) != 1:
            raise RuntimeError(f"pip could not download torch {version} for macOS on arm64")
        exports: dict[str, list[str]] = {}
        taken: dict[str, set[str]] = defaultdict(set)
        with zipfile.ZipFile(wheels[0]) as wheel:
            for name in wheel.namelist():
                if not re.fullmatch(r"torch/lib/lib(torch\w*|c10|shm)\.dylib", name):
                    continue
                library = macho.read(wheel.read(name), name)
                exports[f"@rpath/{Path(name).name}"] = sorted(library.exports)
                if library.oldest_macos > MACOS:
                    continue
                for symbol, source in library.imports.items():
                    if source in (LIBCXX, LIBSYSTEM):
                        taken[source].add(symbol)
    return Torch(version, exports, {source: sorted(names) for source, names in taken.items()})
