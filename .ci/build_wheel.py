"""Builds a wheel into dist/ and checks it: for this machine, or for macOS with `--macos`."""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import check_library
import check_wheel
import macho
import macos_cc
import repository
import torches
from check_wheel import ROOT

DIST = ROOT / "dist"


def build(environment: dict[str, str]) -> Path:
    """Build a wheel without isolation, so that it is compiled with this environment's torch."""
    # An earlier build may have copied modules that no longer exist.
    for stale in (ROOT / "build").glob("lib*"):
        shutil.rmtree(stale)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps"]
        command += ["--wheel-dir", folder, str(ROOT)]
        subprocess.run(command, env=os.environ | environment, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        DIST.mkdir(exist_ok=True)
        return Path(shutil.move(wheel, DIST / wheel.name))


def load_torches() -> list[torches.Torch]:
    versions = torches.versions()
    loaded = []
    for number, version in enumerate(versions, 1):
        print(f"== Symbols of torch {version} for macOS ({number} of {len(versions)})", flush=True)
        loaded.append(torches.load(version))
    return loaded


def build_macos(known: list[torches.Torch]) -> Path:
    tools = ROOT / "build" / "macos"
    tools.mkdir(parents=True, exist_ok=True)
    # The linker may find only symbols that the oldest torch exports.
    macos_cc.write_stub(tools, torches.TORCH_CPU, known[0].exports[torches.TORCH_CPU])
    libcxx = (torch.taken_from_macos.get(torches.LIBCXX, []) for torch in known)
    macos_cc.write_stub(tools, torches.LIBCXX, set().union(*libcxx))
    # torch's build takes the name of a compiler, not a command.
    compiler = tools / "c++"
    command = shlex.join([sys.executable, macos_cc.__file__, str(tools)])
    compiler.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    compiler.chmod(0o755)
    return build(
        {
            **dict.fromkeys(("CC", "CXX", "LDSHARED", "LDCXXSHARED"), str(compiler)),
            "_PYTHON_HOST_PLATFORM": "macosx-{}.{}-arm64".format(*torches.MACOS),
            "TORCH_DONT_CHECK_COMPILER_ABI": "1",
        }
    )


def check_macos(wheel: Path, known: list[torches.Torch]) -> list[str]:
    faults = check_wheel.faults(wheel, torches.MACOS_PLATFORM)
    with zipfile.ZipFile(wheel) as archive:
        if check_wheel.EXTENSION not in archive.namelist():
            return faults
        library = macho.read(archive.read(check_wheel.EXTENSION), check_wheel.EXTENSION)
    return faults + check_library.faults(library, known)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--macos", action="store_true")
    for_macos = parser.parse_args().macos
    if for_macos and sys.platform != "linux":
        parser.error("--macos cross-compiles on Linux only; on a Mac run `make wheel` instead")
    try:
        if for_macos:
            known = load_torches()
            wheel = build_macos(known)
            faults = check_macos(wheel, known)
        else:
            wheel = build({})
            faults = check_wheel.faults(wheel, wheel.stem.split("-")[-1])
    except (RuntimeError, ValueError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for fault in faults:
        print(f"{wheel.name}: {fault}", file=sys.stderr)
    if not repository.url():
        print("note: [tool.torch_metal_attn] repository in pyproject.toml is empty")
    if faults:
        wheel.unlink()  # it must not be uploaded
    else:
        print(f"{wheel.relative_to(ROOT)}: built and checked, {wheel.stat().st_size >> 10} KiB")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
