"""Assembles every program of FOLDER with CUDA's ptxas."""

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import manifest

ARCHITECTURE = "sm_90"  # Hopper


def assemble(ptx: Path) -> str:
    """Assemble a text into a file beside it; ptxas's message if that fails."""
    command = ["ptxas", "-lineinfo", f"-arch={ARCHITECTURE}", str(ptx)]
    command += ["-o", str(ptx.with_suffix(".cubin"))]
    done = subprocess.run(command, capture_output=True, text=True)
    said = (done.stdout + done.stderr).strip()[-600:]
    return f"{ptx.stem}: {said}" if done.returncode else ""


def main() -> None:
    """Every program, on all cores."""
    parser = argparse.ArgumentParser(prog="tests.outside.sanitizer.assemble", description=__doc__)
    parser.add_argument("folder", type=Path, help="what `pack` has written")
    folder = parser.parse_args().folder
    programs = [folder / f"{name}.ptx" for name in manifest.read(folder).programs]
    with ThreadPoolExecutor() as pool:
        errors = [error for error in pool.map(assemble, programs) if error]
    print(f"{len(programs) - len(errors)} of {len(programs)} assembled")
    if errors:
        sys.exit("\n".join(errors))


if __name__ == "__main__":
    main()
