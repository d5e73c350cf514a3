"""Assembles every program of FOLDER for each of its numbers of registers, with CUDA's ptxas."""

import argparse
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import manifest as manifests
from .driver import assembled

# The NVIDIA GPUs that the results are of: Hopper.
ARCHITECTURE = "sm_90"


class AssemblyError(RuntimeError):
    """ptxas refuses a program."""


def limited(ptx: str, limit: int) -> str:
    """The text with a limit in it: ptxas ignores its own option where .maxntid is given."""
    if limit == manifests.NO_LIMIT:
        return ptx
    return re.sub(r"(\.maxntid [^\n]*)", rf"\1\n.maxnreg {limit}", ptx)


def assemble(ptx: str, limit: int, output: Path) -> None:
    """Assemble a text for at most `limit` registers; raises AssemblyError with ptxas's message."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "program.ptx")
        source.write_text(limited(ptx, limit))
        command = ["ptxas", f"-arch={ARCHITECTURE}", str(source), "-o", str(output)]
        if ".loc" in ptx:
            command.insert(1, "-lineinfo")
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise AssemblyError((done.stdout + done.stderr).strip()[-600:])


def main() -> None:
    """Every program and number of registers, on all cores."""
    parser = argparse.ArgumentParser(prog="bench.replay.assemble", description=__doc__)
    parser.add_argument("folder", type=Path, help="what `python -m bench.replay` has written")
    folder = parser.parse_args().folder
    programs = manifests.read(folder).programs.values()
    jobs = [(program.name, limit) for program in programs for limit in program.limits]

    def one(job: tuple[str, int]) -> str:
        name, limit = job
        try:
            assemble((folder / f"{name}.ptx").read_text(), limit, assembled(folder, name, limit))
        except AssemblyError as error:
            return f"{name} for {limit} registers: {error}"
        return ""

    with ThreadPoolExecutor() as pool:
        errors = [error for error in pool.map(one, jobs) if error]
    print(f"{len(jobs) - len(errors)} of {len(jobs)} assembled")
    if errors:
        sys.exit("\n".join(errors))


if __name__ == "__main__":
    main()
