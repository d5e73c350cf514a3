"""`python -m torch_metal_attn verify`: the kernels on this machine against a float64 reference."""

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from torch_metal_attn import machine, mps
from torch_metal_attn.device import best_device
from torch_metal_attn.progress import Progress
from torch_metal_attn.self_test import cases as listed
from torch_metal_attn.self_test import report
from torch_metal_attn.self_test.runner import PASSED, Result, run

REPORT = Path("torch_metal_attn-verify.md")


def verify() -> bool:
    """Run a few cases in every dtype, print a line for each, and say whether all are in bounds.

    A bound is twice the error that torch's own attention makes in the same dtype on what it has of
    the problem, plus one rounding of the result. Raises ToolchainError or CacheError if nothing can
    be compiled.
    """
    start = time.perf_counter()
    passed, total = 0, len(listed.QUICK)
    progress = Progress(total)
    with best_device(check=True) as device:
        print(f"The kernels on {_where(device)}; errors against float64")
        print("Kernels are compiled when they first run: a minute or two, less the next time.\n")
        print(f"{'problem':<76} {'dtype':<9} {'error':>9} {'bound':>9}", flush=True)
        try:
            for case in listed.QUICK:
                progress.step("", f"{case} {case.dtype}")
                (result,) = run([case], device)
                progress.end()
                passed += result.status == PASSED
                print(_line(result), flush=True)
        finally:
            progress.end()
    print(f"\n{passed} of {total} ok, {time.perf_counter() - start:.1f} s")
    return passed == total


def verify_full(path: Path = REPORT) -> bool:
    """Run every case, write the report to `path`, and say whether none failed.

    What fails is printed as it comes. The report is written before each case, with its name: so a
    run that is interrupted, or ends with its process, leaves what was done. Raises OSError if it
    cannot be written, and as `verify`.
    """
    start = time.perf_counter()
    cases = listed.full()
    results: list[Result] = []
    progress = Progress(len(cases))
    with best_device(check=True) as device:
        described = machine.describe(device)

        def write() -> None:
            seconds = time.perf_counter() - start
            text = report.markdown(results, cases, described, seconds)
            path.write_text(text, encoding="utf-8")

        write()
        print(f"The kernels on {_where(device)}: {len(cases)} cases", flush=True)
        try:
            for case in cases:
                write()
                progress.step(case.family, f"{case.dtype} {case.words}")
                results += run([case], device)
                if results[-1].bad:
                    progress.end()
                    print(_line(results[-1]), flush=True)
        finally:
            progress.end()
            write()
            _conclude(results, path)
    return not any(result.bad for result in results)


def _conclude(results: Sequence[Result], path: Path) -> None:
    failed = sum(result.bad for result in results)
    words = f"{failed} of {len(results)} cases failed" if failed else f"{len(results)} cases ran"
    print(f"{words}; the report is {path}", flush=True)


def _where(device: torch.device) -> str:
    if device.type == "mps":
        return "mps"
    return f"the simulator, every access checked ({mps.problem()})"


def _line(result: Result) -> str:
    head = f"{result.case!s:<76} {result.case.dtype:<9}"
    if result.worst is None:
        return f"{head} {result.status}  {result.message}"
    return f"{head} {result.worst.error:9.1e} {result.worst.bound:9.1e}  {result.status}"
