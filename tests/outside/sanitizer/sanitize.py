"""Runs compute-sanitizer's four tools on the small problems of FILE, and on planted faults.

Every problem must have the right results and no finding. Every planted fault must be found by its
tool.
"""

import argparse
import lzma
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from . import driver, packed
from .packed import Problem, Program

TOOLS = {
    "memcheck": ("--destroy-on-device-error", "kernel", "--padding", "4096"),
    "racecheck": ("--racecheck-report", "all"),
    "initcheck": (),
    "synccheck": (),
}
FINDING = re.compile(r"=========\s+(Error: |Warning: |Invalid |Uninitialized |Barrier error|Race )")
PROBLEM = "problem: "
SECONDS, FAULT_SECONDS = 480, 40
# Bounds of errors by the dtype of the call, relative to numbers above 1. Other dtypes are exact.
ALLOWED = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-4}


def numbers(data: bytes, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        halves = np.frombuffer(data, np.uint16).astype(np.uint32)
        return (halves << 16).view(np.float32).astype(np.float64)
    # Formats that numpy lacks are compared as bytes.
    known = "uint8" if dtype.startswith("float8") else dtype
    return np.frombuffer(data, np.dtype(known)).astype(np.float64)


def error(actual: np.ndarray, expected: np.ndarray) -> float:
    """The largest error. NaN equals NaN."""
    with np.errstate(all="ignore"):
        same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
        errors = np.where(same, 0, np.abs(actual - expected) / np.maximum(1, np.abs(expected)))
    return float(np.nan_to_num(errors, nan=np.inf).max(initial=0.0))


def assemble(program: Program) -> bytes:
    """The program for this GPU, with line numbers. Raises RuntimeError with ptxas's message."""
    with tempfile.TemporaryDirectory() as scratch:
        source, output = Path(scratch, "program.ptx"), Path(scratch, "program.cubin")
        source.write_text(program.ptx)
        command = ["ptxas", "-lineinfo", "-arch=sm_90", str(source), "-o", str(output)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{program.entry}: {(done.stdout + done.stderr).strip()[-600:]}")
        return output.read_bytes()


def replay(programs: driver.Programs, problem: Problem) -> bool:
    """Run one problem in memory of exactly its size. Returns True if its results are right."""
    print(f"{PROBLEM}{problem.name}", flush=True)
    planted = (problem.fault.tool, problem.fault.tensor) if problem.fault else None
    pointers = {}
    inputs = {n: x if isinstance(x, bytes) else x.data() for n, x in problem.inputs.items()}
    sizes = problem.scratch | {name: len(data) for name, data in inputs.items()}
    for name, size in sizes.items():
        if planted == ("memcheck", name):
            pointers[name] = driver.allocate(size // 2)
        elif name in inputs and planted != ("initcheck", name):
            pointers[name] = driver.upload(inputs[name])
        else:
            pointers[name] = driver.allocate(size)
    for dispatch in problem.dispatches:
        programs.launch(dispatch, pointers)
    right = True
    for name, (dtype, expected) in problem.expected.items():
        actual = numbers(driver.download(pointers[name], len(expected)), dtype)
        worst = error(actual, numbers(expected, dtype))
        fits = worst <= (ALLOWED[problem.dtype] if dtype in ALLOWED else 0.0)
        right = right and fits
        print(f"  {'right' if fits else 'WRONG'}: {name}, {dtype}, error {worst:.1e}", flush=True)
    for pointer in pointers.values():
        driver.free(pointer)
    return right


def replay_all(folder: Path, fault: str | None) -> bool:
    contents = packed.read(folder / "packed")
    programs = driver.Programs(folder, contents)
    chosen = [p for p in contents.problems if (p.name == fault if fault else p.fault is None)]
    right = [replay(programs, problem) for problem in chosen]
    return all(right)


def run(folder: Path, tool: str | None, fault: str | None = None) -> tuple[str, int]:
    prefix: Sequence[str] = ()
    if tool:
        prefix = ("compute-sanitizer", "--tool", tool, "--show-backtrace", "no", *TOOLS[tool])
    command = [*prefix, sys.executable, "-m", __spec__.name, str(folder), "--replay"]
    command += ["--fault", fault] if fault else []
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        both = subprocess.STDOUT
        process = subprocess.Popen(command, stdout=output, stderr=both, start_new_session=True)
        try:
            code = process.wait(FAULT_SECONDS if fault else SECONDS)
        except subprocess.TimeoutExpired:
            # The tool runs the program in another process.
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        output.seek(0)
        return output.read(), code


def findings(output: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    name = "before the first problem"
    for line in output.split("\n"):
        if line.startswith(PROBLEM):
            name = line.removeprefix(PROBLEM)
            counts.setdefault(name, 0)
        elif FINDING.match(line):
            counts[name] = counts.get(name, 0) + 1
    return counts


def check(folder: Path, log: list[str]) -> list[str]:
    problems = packed.read(folder / "packed").problems
    names = [p.name for p in problems if p.fault is None]
    bad = []
    tools = (None, *TOOLS)
    with ThreadPoolExecutor(len(tools)) as pool:
        results = list(pool.map(lambda tool: run(folder, tool), tools))
    for tool, (output, code) in zip(tools, results, strict=True):
        words = tool or "no tool"
        log.append(f"##### {words}\n{output}")
        counts = findings(output)
        wrong = output.count("WRONG")
        total = sum(counts.values())
        print(f"{words}: {len(counts)} problems, {wrong} wrong results, {total} findings")
        bad += [f"{words}: {name}: {count} findings" for name, count in counts.items() if count]
        bad += [f"{words}: not reached: {name}" for name in names if name not in counts]
        if wrong or code:
            bad.append(f"{words}: exit code {code}\n{output[-800:]}")
    planted = [(p, p.fault) for p in problems if p.fault]
    with ThreadPoolExecutor(8) as pool:
        outputs = list(pool.map(lambda pair: run(folder, pair[1].tool, pair[0].name), planted))
    for (problem, fault), (output, _) in zip(planted, outputs, strict=True):
        log.append(f"##### {problem.name}: {fault.what}\n{output}")
        count = sum(findings(output).values())
        print(f"{fault.tool}, {problem.kernel}, {fault.what}: {count} findings")
        if not count:
            bad.append(f"not found: {problem.name} ({fault.what}): {output[-300:]}")
    return bad


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.outside.sanitizer.sanitize", description=__doc__)
    parser.add_argument("file", type=Path, help="the file that `pack` wrote")
    parser.add_argument("--log", type=Path, help="a file for the output of the tools")
    parser.add_argument("--replay", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--fault", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.replay:
        sys.exit(not replay_all(arguments.file, arguments.fault))
    log: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with lzma.open(arguments.file) as source, (folder / "packed").open("wb") as target:
            shutil.copyfileobj(source, target)
        programs = packed.read(folder / "packed").programs
        with ThreadPoolExecutor() as pool:
            for program, image in zip(programs, pool.map(assemble, programs.values()), strict=True):
                (folder / program).write_bytes(image)
        bad = check(folder, log)
    if arguments.log:
        arguments.log.write_text("\n".join(log))
    sys.exit("\n".join(bad))


if __name__ == "__main__":
    main()
