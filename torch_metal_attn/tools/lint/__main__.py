"""`python -m torch_metal_attn.tools.lint shaders`: lint every kernel family of a folder."""

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from torch_metal_attn.runtime.shaders import LANGUAGES, ShaderError, flatten
from torch_metal_attn.simulator.exit_status import exit_status
from torch_metal_attn.simulator.lint import Finding, lint_source
from torch_metal_attn.simulator.metal import versions

from .specialisations import SPECIALISATIONS


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
    findings = {finding for path in families for finding in lint_family(path)}
    for finding in sorted(findings):
        print(finding)
    print(f"{len(families)} kernel families, {len(findings)} findings,", end=" ")
    print(f"{time.perf_counter() - started:.1f} s")
    return not findings


def lint_family(path: Path) -> set[Finding]:
    """Findings in one family, in each of its representative specialisations."""
    if path.stem not in SPECIALISATIONS:
        message = "has no entry in torch_metal_attn/tools/lint/specialisations.py"
        return {Finding(str(path), 1, "specialisations", message)}
    try:
        source = flatten(path)
    except ShaderError as error:
        return {Finding(str(path), 1, "flatten", str(error))}
    language = LANGUAGES.get(path.stem, versions.DEFAULT)
    return {
        finding
        for defines in SPECIALISATIONS[path.stem]
        for finding in lint_source(source, defines=defines, language=language)
    }


if __name__ == "__main__":
    # Syntax trees have many nodes and no cycles: collections take a third of the time.
    gc.disable()
    sys.exit(main())
