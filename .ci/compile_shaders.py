"""Compiles every shader family by Apple's two compilers, on a Mac with Xcode. Nothing is run.

One is Xcode's `metal`, held to the oldest Metal that is supported; the other is macOS' own, which
torch uses on users' machines. The specialisations are the shader lint's, which between them reach
every line. FOLDER receives each text as it was compiled, what `metal` made of it, and log.txt.
"""

import argparse
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from torch_metal_attn import shaders
from torch_metal_attn.simulator.lint.specialisations import SPECIALISATIONS

METAL = ["xcrun", "-sdk", "macosx", "metal"]
# As MLX, PyTorch and llama.cpp compile theirs; torch compiles without fast math too.
FLAGS = ["-std=metal3.1", "-mmacosx-version-min=14.0", "-fno-fast-math", "-Wall", "-Wextra"]
# Of families that need a newer language, which the compilers have from this macOS on.
NEWER_FLAGS = ["-std=metal4.0", "-mmacosx-version-min=26.2", *FLAGS[2:]]
NEWER_MACOS = 26

Compiler = Callable[[Path], str]  # returns warnings, raises CompileError


class CompileError(RuntimeError):
    """A compiler's output where it refuses a text."""


class NoCompilerError(RuntimeError):
    """One of the compilers is not on this machine."""


def by_xcode(path: Path) -> str:
    """What Xcode's compiler says of a text that it takes."""
    output = path.with_suffix(".air")
    newer = path.stem.rpartition("_")[0] in shaders.LANGUAGES
    done = subprocess.run(
        [*METAL, *(NEWER_FLAGS if newer else FLAGS), "-c", str(path), "-o", str(output)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        raise CompileError(f"exit status {done.returncode}\n{done.stdout}")
    return done.stdout


def by_torch(path: Path) -> str:
    """macOS' own compiler, whose warnings torch does not tell."""
    try:
        torch.mps.compile_shader(path.read_text(encoding="ascii"))
    except (RuntimeError, SyntaxError) as error:
        raise CompileError(str(error)) from error
    return ""


def xcode_version() -> str:
    """The version of Xcode's compiler; raises NoCompilerError if there is none."""
    command = [*METAL, "--version"]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
        )
    except FileNotFoundError:
        raise NoCompilerError(
            "there is no xcrun here: this needs a Mac with Xcode, not the command line tools alone"
        ) from None
    except subprocess.CalledProcessError as error:
        raise NoCompilerError(f"{' '.join(command)} failed:\n{error.stdout}") from None
    return done.stdout


def require_torch() -> None:
    """Raises NoCompilerError if torch has no mps, virtual or not."""
    if not torch.backends.mps.is_available():
        raise NoCompilerError("torch.backends.mps is not available: torch compiles nothing here")


def families() -> list[str]:
    """Those whose language the compilers of this macOS have."""
    newer = int(platform.mac_ver()[0].partition(".")[0] or 0) >= NEWER_MACOS
    return [name for name in shaders.families() if newer or name not in shaders.LANGUAGES]


def write_texts(folder: Path) -> Iterator[tuple[str, Path]]:
    """Of each specialisation its name and defines, and the file of its text."""
    for family in families():
        for number, defines in enumerate(SPECIALISATIONS[family]):
            path = folder / f"{family}_{number}.metal"
            lines = [f"#define {name} {value}\n" for name, value in defines.items()]
            path.write_text("".join(lines) + shaders.source(family), encoding="ascii")
            words = (f"{name}={value}" for name, value in defines.items())
            yield " ".join([path.stem, *words]), path


def main(arguments: list[str] | None = None) -> int:
    """0 if both compilers take everything, 1 if not, 2 if one is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    folder: Path = parser.parse_args(arguments).folder
    folder.mkdir(parents=True, exist_ok=True)
    texts = list(write_texts(folder))
    with (folder / "log.txt").open("w", encoding="utf-8") as log:

        def say(line: str) -> None:
            print(line, flush=True)
            log.write(line.rstrip("\n") + "\n")
            log.flush()

        say(f"{len(texts)} texts of {len(families())} families are in {folder.name}/")
        for name in set(shaders.LANGUAGES) - set(families()):
            say(f"{name} is left out: it needs macOS {NEWER_MACOS}")
        say(f"Each is given to {' '.join([*METAL, *FLAGS])} -c, and to torch.mps.compile_shader.")
        try:
            say(xcode_version())
            require_torch()
        except NoCompilerError as error:
            say(f"error: {error}")
            return 2
        compilers: dict[str, Compiler] = {"metal": by_xcode, "torch": by_torch}
        failures = [
            f"{name} by {compiler}"
            for name, path in texts
            for compiler, compile_text in compilers.items()
            if not compiles(f"{name} by {compiler}", compile_text, path, say)
        ]
        say(f"{len(failures)} of {len(texts) * len(compilers)} compilations failed")
        for failure in failures:
            say(f"  {failure}")
    return 1 if failures else 0


def compiles(name: str, compile_text: Compiler, path: Path, say: Callable[[str], None]) -> bool:
    """Whether the text does, with what there is to say of it."""
    started = time.perf_counter()
    try:
        words, verdict = compile_text(path), "ok"
    except CompileError as error:
        words, verdict = str(error), "FAILED"
    say(f"{verdict}, {time.perf_counter() - started:.1f} s: {name}")
    if words:
        say(words)
    return verdict == "ok"


if __name__ == "__main__":
    sys.exit(main())
