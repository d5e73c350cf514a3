"""compute-sanitizer's four tools over the small problems of FOLDER, and over planted faults.

Every problem must have the right results and no finding of any tool; every planted fault must be
found by its tool.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from bench.replay import driver, manifest
from bench.replay.manifest import NO_LIMIT, Problem

TOOLS = {
    "memcheck": ("--destroy-on-device-error", "kernel", "--padding", "4096"),
    "racecheck": ("--racecheck-report", "all"),
    "initcheck": (),
    "synccheck": (),
}
FINDING = re.compile(
    r"=========\s+(?:Error: |Warning: |Invalid |Uninitialized |Barrier error|Race )"
)
PROBLEM = "problem: "
SECONDS, FAULT_SECONDS = 480, 40
WORKERS = 8
# By the call's dtype: of its results, relative to the numbers, or to 1 where they are smaller.
# What is no float is exact.
ALLOWED = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-4}


def numbers(data: bytes, dtype: str) -> np.ndarray:
    """The elements as float64."""
    if dtype == "bfloat16":
        halves = np.frombuffer(data, np.uint16).astype(np.uint32)
        return (halves << 16).view(np.float32).astype(np.float64)
    # Formats that numpy does not have are compared as bytes, exactly.
    known = "uint8" if dtype.startswith("float8") else dtype
    return np.frombuffer(data, np.dtype(known)).astype(np.float64)


def error(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest error; NaN where NaN is expected is right."""
    with np.errstate(all="ignore"):
        same = (found == expected) | (np.isnan(found) & np.isnan(expected))
        errors = np.where(same, 0, np.abs(found - expected) / np.maximum(1, np.abs(expected)))
    return float(np.nan_to_num(errors, nan=np.inf).max(initial=0.0))


def replay(programs: driver.Programs, problem: Problem, data: Mapping[str, np.ndarray]) -> bool:
    """Run one problem in memory of exactly its size; whether its results are right."""
    print(f"{PROBLEM}{problem.name}", flush=True)
    (candidate,) = problem.candidates
    case = problem.sizes.get("case", problem.name)
    planted = problem.sizes.get("tool"), problem.sizes.get("tensor")
    pointers = {}
    sizes = {**candidate.scratch}
    inputs = {k.split("/")[2]: v for k, v in data.items() if k.startswith(f"{case}/in/")}
    for name, content in inputs.items():
        sizes[name] = content.nbytes
    for name, size in sizes.items():
        if planted == ("memcheck", name):
            pointers[name] = driver.allocate(size // 2)
        elif name in inputs and planted != ("initcheck", name):
            pointers[name] = driver.upload(inputs[name].tobytes())
        else:
            pointers[name] = driver.allocate(size)
    for dispatch in candidate.dispatches:
        driver.Launch(programs, dispatch, NO_LIMIT, pointers).enqueue()
        driver.synchronise()
    right = True
    for name, dtype in problem.sizes.get("dtypes", {}).items():
        expected = data[f"{case}/out/{name}"]
        found = numbers(driver.download(pointers[name], expected.nbytes), dtype)
        worst = error(found, numbers(expected.tobytes(), dtype))
        fits = worst <= (ALLOWED[problem.sizes["dtype"]] if dtype in ALLOWED else 0.0)
        right = right and fits
        print(f"  {'right' if fits else 'WRONG'}: {name}, {dtype}, error {worst:.1e}", flush=True)
    for pointer in pointers.values():
        driver.free(pointer)
    return right


def inside(folder: Path, name: str | None) -> None:
    """What runs under a tool: all small problems, or the one planted fault of this name."""
    contents = manifest.read(folder)
    programs = driver.Programs(folder, contents)
    data = dict(np.load(folder / "contents.npz"))
    chosen = [
        p for p in contents.problems if (p.kind == "small" if name is None else p.name == name)
    ]
    right = [replay(programs, problem, data) for problem in chosen]
    sys.exit(not all(right))


def run(folder: Path, tool: str | None, fault: str | None = None) -> tuple[str, int]:
    """The output of a run under a tool, and its exit code."""
    prefix: Sequence[str] = ()
    if tool:
        prefix = ("compute-sanitizer", "--tool", tool, "--show-backtrace", "no", *TOOLS[tool])
    command = [*prefix, sys.executable, "-m", __spec__.name, str(folder), "--inside"]
    command += ["--fault", fault] if fault else []
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(FAULT_SECONDS if fault else SECONDS)
        except subprocess.TimeoutExpired:
            # The tool runs the program in a process of its own.
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        output.seek(0)
        return output.read(), code


def findings(output: str) -> dict[str, int]:
    """How often a tool has found something, by problem."""
    found: dict[str, int] = {}
    name = "before the first problem"
    for line in output.split("\n"):
        if line.startswith(PROBLEM):
            name = line.removeprefix(PROBLEM)
            found.setdefault(name, 0)
        elif FINDING.match(line):
            found[name] = found.get(name, 0) + 1
    return found


def main() -> None:
    """All tools over all problems, then every planted fault."""
    parser = argparse.ArgumentParser(prog="tests.outside.sanitizer.sanitize", description=__doc__)
    parser.add_argument("folder", type=Path, help="with the programs, assembled")
    parser.add_argument("--log", type=Path, help="a file for all that the tools print")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--fault", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder = arguments.folder
    if arguments.inside:
        inside(folder, arguments.fault)
    problems = manifest.read(folder).problems
    names = [p.name for p in problems if p.kind == "small"]
    log, bad = [], []
    tools = (None, *TOOLS)
    with ThreadPoolExecutor(len(tools)) as pool:
        results = list(pool.map(lambda tool: run(folder, tool), tools))
    for tool, (output, code) in zip(tools, results, strict=True):
        log.append(f"##### {tool or 'no tool'}\n{output}")
        found = findings(output)
        missing = [name for name in names if name not in found]
        wrong = output.count("WRONG")
        total = sum(found.values())
        print(
            f"{tool or 'no tool'}: {len(found)} problems, {wrong} wrong results, {total} findings"
        )
        bad += [f"{tool}: {name}: {count} findings" for name, count in found.items() if count]
        bad += [f"{tool}: not reached: {name}" for name in missing]
        if wrong or code:
            bad.append(f"{tool or 'no tool'}: exit code {code}\n{output[-800:]}")
    planted = [p for p in problems if p.kind == "fault"]
    with ThreadPoolExecutor(WORKERS) as pool:
        outputs = list(pool.map(lambda p: run(folder, p.sizes["tool"], p.name), planted))
    for problem, (output, _) in zip(planted, outputs, strict=True):
        log.append(f"##### {problem.name}: {problem.sizes['what']}\n{output}")
        count = sum(findings(output).values())
        what = problem.sizes["what"]
        print(f"{problem.sizes['tool']}, {problem.sizes['kernel']}, {what}: {count} findings")
        if not count:
            bad.append(f"not found: {problem.name} ({what}): {output[-300:]}")
    if arguments.log:
        arguments.log.write_text("\n".join(log))
    sys.exit("\n".join(bad))


if __name__ == "__main__":
    main()
