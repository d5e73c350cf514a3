"""`python -m torch_metal_attn.tools.lint shaders`: lint every kernel family of a folder."""

import argparse
import gc
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from torch_metal_attn.runtime.shaders import LANGUAGES, ShaderError, flatten, with_defines
from torch_metal_attn.simulator import build, cache, toolchain
from torch_metal_attn.simulator.exit_status import exit_status
from torch_metal_attn.simulator.lint import Finding, lint_source
from torch_metal_attn.simulator.metal import versions
from torch_metal_attn.wording import count_text

from .specialisations import specialisations

MOST_WORKERS = 4  # each has a syntax tree in memory
Text = tuple[str, str]  # a specialisation's source and language


def main(arguments: Sequence[str] | None = None) -> int:
    """Print each finding as `file:line: rule: message`; returns 1 if there is one."""
    parser = argparse.ArgumentParser(prog="python -m torch_metal_attn.tools.lint")
    parser.add_argument("folder", type=Path, help="where the families' .metal files are")
    folder: Path = parser.parse_args(arguments).folder
    return exit_status(lambda: _lint(folder))


def _lint(folder: Path) -> bool:
    started = time.perf_counter()
    families = sorted(folder.glob("*.metal"))
    if not families:
        raise FileNotFoundError(f"{folder} has no .metal files")
    findings: set[Finding] = set()
    texts: list[Text] = []
    for path in families:
        if path.stem not in specialisations():
            message = "torch_metal_attn/tools/lint/specialisations.py never launches this family"
            findings.add(Finding(str(path), 1, "specialisations", message))
            continue
        try:
            source = flatten(path)
        except ShaderError as error:
            findings.add(Finding(str(path), 1, "flatten", str(error)))
            continue
        language = LANGUAGES.get(path.stem, versions.DEFAULT)
        defines = specialisations()[path.stem]
        texts += [(with_defines(source, each), language) for each in defines]
    # Syntax trees have many nodes and no cycles, and garbage collection takes a third of the time.
    workers = min(os.cpu_count() or 1, MOST_WORKERS)
    with ProcessPoolExecutor(workers, initializer=gc.disable) as pool:
        findings.update(*pool.map(lint_text, texts))
    for finding in sorted(findings):
        print(finding)
    print(f"{len(families)} kernel families, {count_text(len(findings), 'finding')},", end=" ")
    print(f"{time.perf_counter() - started:.1f} s")
    return not findings


def lint_text(text: Text) -> list[Finding]:
    """The findings in one specialisation. The cache of kernels records texts without findings."""
    source, language = text
    made_by = build.own_digest("lint"), toolchain.find().identity
    key = cache.digest(["lint", *made_by, source, language])
    if cache.lookup(key):
        return []
    findings = lint_source(source, language=language)
    if not findings:
        cache.store(key, {"findings.json": b"[]"})
    return findings


if __name__ == "__main__":
    sys.exit(main())
