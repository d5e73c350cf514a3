"""Tests in fresh environments: the wheel in dist/ for this machine, or README.md's code blocks."""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Sequence
from importlib import metadata
from itertools import groupby
from pathlib import Path

from check_wheel import ROOT
from packaging.requirements import Requirement

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Blocks that are not run: `make` creates another environment, and the model does not exist.
_LEFT_OUT = re.compile(r'^make |"your/model"', re.MULTILINE)


def verify(wheel: Path, torch: str) -> bool:
    """True if `python -m torch_metal_attn verify` passes in a fresh environment."""
    print(f"== {wheel.name} with torch {torch}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        (python,) = Path(folder).glob("bin/python")
        for command in (
            ["-m", "pip", "install", "--no-cache-dir", f"torch=={torch}", str(wheel)],
            ["-m", "torch_metal_attn", "info"],
            ["-m", "torch_metal_attn", "verify"],
        ):
            # -I hides this checkout, so that the wheel's package is imported.
            if subprocess.run([python, "-I", *command], cwd=folder).returncode != 0:
                print(f"{wheel.name}: failed with torch {torch}", file=sys.stderr)
                return False
    return True


def readme() -> bool:
    """True if the README's blocks run unchanged in a clone and print the outputs it shows."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (cloned,) = re.findall(r"^git clone (\S+)$", text, re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        venv.create(f"{folder}/venv", with_pip=True)
        (packages,) = Path(folder).glob("venv/lib/python*/site-packages")
        _link_package("torch", packages)
        settings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        settings["PATH"] = f"{folder}/venv/bin{os.pathsep}{settings['PATH']}"
        # git clones this checkout in place of the README's URL.
        settings |= {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": f"url.{ROOT}.insteadOf"}
        return passes(text, folder, settings | {"GIT_CONFIG_VALUE_0": cloned})


def _link_package(name: str, packages: Path) -> None:
    """Link a package of this environment, and what it requires, into the folder `packages`."""
    for first in {file.parts[0] for file in metadata.files(name) or ()} - {"..", "__pycache__"}:
        if not (packages / first).exists():
            place = metadata.distribution(name).locate_file(first)
            (packages / first).symlink_to(Path(str(place)))
    for line in metadata.requires(name) or ():
        needed = Requirement(line)
        wanted = needed.marker is None or needed.marker.evaluate({"extra": ""})
        if wanted and needed.name != "setuptools":  # the README installs it
            _link_package(needed.name, packages)


def passes(text: str, folder: str, settings: dict[str, str]) -> bool:
    """True if all blocks run in `folder` as one session and print the outputs shown in `text`."""
    session = before = ""
    blocks = list(_blocks(text))
    install = next(block for block in blocks if block[0] == "sh")
    blocks.remove(install)
    for language, block, outputs in [install, *blocks]:
        print(f"== README.md\n{block}==", flush=True)
        if language == "python":
            session += block
        shell = language == "sh"
        command = ["bash", "-eo", "pipefail", "-c", block] if shell else ["python", "-c", session]
        kept = None if shell and not outputs else subprocess.PIPE
        done = subprocess.run(command, cwd=folder, env=settings, text=True, stdout=kept)
        printed = (done.stdout or "").removeprefix(before)
        print(printed, end="", flush=True)
        if done.returncode != 0 or (outputs and printed not in outputs):
            print(f"error: exit status {done.returncode}; the README shows", file=sys.stderr)
            print(" or\n".join(outputs), file=sys.stderr)
            return False
        before = before if shell else done.stdout
        for entered in re.findall(r"^cd (\S+)$", block, re.MULTILINE) if shell else ():
            folder = f"{folder}/{entered}"
    return True


def _blocks(text: str) -> Iterator[tuple[str, str, Sequence[str]]]:
    """The language and text of each block that is run, and the outputs shown after it."""
    rows = [[*row] for _, row in groupby(_BLOCK.findall(text), key=lambda pair: pair[0] == "text")]
    for row, after in zip(rows, [*rows[1:], []], strict=True):
        for number, (language, block) in enumerate(row, 1):
            if language != "text" and not _LEFT_OUT.search(block):
                yield language, block, [text for _, text in after] if number == len(row) else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--readme", action="store_true", help="the blocks of README.md, in a clone")
    parser.add_argument("torches", nargs="*", metavar="TORCH", help="a version of torch: 2.10.0")
    options = parser.parse_args()
    if options.readme == bool(options.torches):
        parser.error("give --readme or versions of torch")
    if options.readme:
        return 0 if readme() else 1
    platform = "macosx" if sys.platform == "darwin" else "linux"
    wheels = sorted((ROOT / "dist").glob(f"torch_metal_attn-*-{platform}_*.whl"))
    if len(wheels) != 1:
        names = ", ".join(wheel.name for wheel in wheels) or "none"
        rule = f"dist/ must have exactly one wheel for {platform}"
        print(f"{rule}, and has {names}; run `make wheel`", file=sys.stderr)
        return 1
    passed = [torch for torch in options.torches if verify(wheels[0], torch)]
    print(f"== {wheels[0].name} passed with torch {', '.join(passed) or 'none'}")
    return 0 if passed == options.torches else 1


if __name__ == "__main__":
    sys.exit(main())
