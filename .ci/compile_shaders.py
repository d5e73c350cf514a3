"""Compiles every shader family with Apple's two compilers on a Mac, without running a kernel.

The compilers are Xcode's `metal`, if it is installed, and the one in macOS that torch uses. FOLDER
receives each text that was compiled, the output of `metal`, and log.txt.
"""

import argparse
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from torch_metal_attn.runtime import shaders
from torch_metal_attn.runtime.tensor_tiles import OLDEST_MACOS
from torch_metal_attn.tools.lint.specialisations import specialisations

XCRUN = ["xcrun", "-sdk", "macosx"]
METAL = [*XCRUN, "metal"]
# MLX, PyTorch and llama.cpp compile with these flags. torch leaves fast math off by default too.
FLAGS = ["-std=metal3.1", "-mmacosx-version-min=14.0", "-fno-fast-math", "-Wall", "-Wextra"]
# The first macOS and SDK whose compilers support the language versions in shaders.LANGUAGES.
NEWER_MACOS = 26


class NoCompilerError(RuntimeError):
    """This machine lacks a compiler."""


def by_xcode(path: Path, flags: list[str]) -> tuple[bool, str]:
    """Compile with Xcode; True for success, and the output."""
    return output_of([*METAL, *flags, "-c", str(path), "-o", str(path.with_suffix(".air"))])


def by_torch(path: Path) -> tuple[bool, str]:
    """Compile with the compiler in macOS, whose warnings torch drops."""
    try:
        torch.mps.compile_shader(path.read_text(encoding="ascii"))
    except (RuntimeError, SyntaxError) as error:
        return False, str(error)
    return True, ""


def output_of(command: list[str]) -> tuple[bool, str]:
    """True for success, and the output of a command. Raises NoCompilerError if it cannot run."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except FileNotFoundError:
        raise NoCompilerError(
            f"{command[0]} is not installed; install Xcode on a Mac, because the command line "
            "tools are not enough"
        ) from None
    return done.returncode == 0, done.stdout


def require(command: list[str]) -> str:
    """The output of a command; raises NoCompilerError if it fails."""
    passed, words = output_of(command)
    if not passed:
        raise NoCompilerError(f"{' '.join(command)} failed:\n{words}")
    return words


def xcode_flags() -> dict[str, list[str]]:
    """Xcode's flags for each family whose language version the SDK supports."""
    command = [*XCRUN, "--show-sdk-version"]
    words = require(command)
    # xcrun may print warnings before the version.
    version = re.search(r"^(\d+)(?:\.(\d+))?[.\d]*$", words, re.MULTILINE)
    if version is None:
        raise NoCompilerError(f"{' '.join(command)} printed no version:\n{words}")
    sdk = int(version[1]), int(version[2] or 0)
    # A compiler rejects a macOS later than its SDK.
    oldest = ".".join(map(str, min(sdk, OLDEST_MACOS)))
    newer = ["-std=metal4.0", f"-mmacosx-version-min={oldest}", *FLAGS[2:]]
    return {
        name: newer if name in shaders.LANGUAGES else FLAGS
        for name in families()
        if sdk[0] >= NEWER_MACOS or name not in shaders.LANGUAGES
    }


def families() -> list[str]:
    """The families whose language version the compilers of this macOS support."""
    newer = int(platform.mac_ver()[0].partition(".")[0] or 0) >= NEWER_MACOS
    return [name for name in shaders.families() if newer or name not in shaders.LANGUAGES]


def write_texts(folder: Path) -> Iterator[tuple[str, str, Path]]:
    """Write each specialisation. Yields its family, its name with its defines, and its file."""
    for family in families():
        for number, defines in enumerate(specialisations()[family]):
            path = folder / f"{family}_{number}.metal"
            text = shaders.with_defines(shaders.source(family), defines)
            path.write_text(text, encoding="ascii")
            words = (f"{name}={value}" for name, value in defines.items())
            yield family, " ".join([path.stem, *words]), path


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 if every text compiles, 1 if not, 2 if torch cannot compile here."""
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
        say(f"Compilers: {' '.join([*METAL, *FLAGS])} -c, and torch.mps.compile_shader.")
        if not torch.backends.mps.is_available():
            say("error: torch.backends.mps is not available: torch compiles nothing here")
            return 2
        flags: dict[str, list[str]] = {}
        try:
            say(require([*METAL, "--version"]))
            flags = xcode_flags()
        except NoCompilerError as error:
            say(f"warning: {error}")
        return compile_all(texts, flags, say)


def compile_all(
    texts: list[tuple[str, str, Path]], flags: dict[str, list[str]], say: Callable[[str], None]
) -> int:
    """Compile with torch, and with Xcode if a family has flags. Returns 1 if a text fails."""
    left_out = sorted({family for family, _, _ in texts} - set(flags))
    if left_out:
        warning = f"compiled by torch alone, not by Xcode's metal: {', '.join(left_out)}"
        say(f"warning: {warning}")
        if "GITHUB_ACTIONS" in os.environ:  # shown at the head of the job's page
            print(f"::warning::{warning}", flush=True)
    count, failures = 0, []
    for family, name, path in texts:
        compilers: dict[str, Callable[[Path], tuple[bool, str]]] = {"torch": by_torch}
        if family in flags:
            compilers["metal"] = partial(by_xcode, flags=flags[family])
        for compiler, compile_text in compilers.items():
            started = time.perf_counter()
            passed, words = compile_text(path)
            seconds = time.perf_counter() - started
            say(f"{'ok' if passed else 'FAILED'}, {seconds:.1f} s: {name} by {compiler}")
            if words:
                say(words)
            count += 1
            failures += [] if passed else [f"{name} by {compiler}"]
    say("\n  ".join([f"{len(failures)} of {count} compilations failed", *failures]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
