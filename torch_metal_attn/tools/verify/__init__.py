"""`python -m torch_metal_attn verify`: the kernels on this machine against a float64 reference."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from torch_metal_attn.runtime import machine, mps
from torch_metal_attn.runtime.device import best_device
from torch_metal_attn.testing.running import PASSED, run
from torch_metal_attn.tools.progress import Progress
from torch_metal_attn.tools.verify import cases as listed
from torch_metal_attn.tools.verify import report
from torch_metal_attn.tools.verify.cases import Listed
from torch_metal_attn.tools.verify.report import Result
from torch_metal_attn.wording import count_text

REPORT = Path("torch_metal_attn-verify.md")


def verify() -> bool:
    """Run a few cases in every dtype, with a line for each. True if all are within bounds."""
    start = time.perf_counter()
    with best_device(check=True) as device:
        print(f"The kernels on {_backend(device)}; errors against float64")
        print("Kernels are compiled when they first run, which takes a minute or two once.\n")
        print(f"{'problem':<76} {'dtype':<9} {'error':>9} {'bound':>9}", flush=True)
        results = list(_results(listed.QUICK, device, every_line=True))
    passed = sum(result.outcome.status == PASSED for result in results)
    print(f"\n{passed} of {len(results)} ok, {time.perf_counter() - start:.1f} s")
    return passed == len(results)


def verify_full(path: Path = REPORT) -> bool:
    """Run every case, and write the report after each. True if none failed."""
    start = time.perf_counter()
    cases = listed.full()
    results: list[Result] = []
    with best_device(check=True) as device:
        described = machine.describe(device)

        def write() -> None:
            seconds = time.perf_counter() - start
            text = report.markdown(results, cases, described, seconds)
            path.write_text(text, encoding="utf-8")

        write()
        print(f"The kernels on {_backend(device)}: {count_text(len(cases), 'case')}", flush=True)
        try:
            for result in _results(cases, device, every_line=False):
                results.append(result)
                write()
        finally:
            failed = sum(not result.outcome.ok for result in results)
            ran = count_text(len(results), "case")
            summary = f"{failed} of {ran} failed" if failed else f"{ran} ran"
            print(f"{summary}; the report is {path}", flush=True)
    return all(result.outcome.ok for result in results)


def _results(
    cases: Sequence[Listed], device: torch.device, *, every_line: bool
) -> Iterator[Result]:
    with Progress(len(cases)) as progress:
        for case in cases:
            group, text = ("", str(case)) if every_line else (case.family, case.words)
            progress.step(group, f"{text} {case.dtype}")
            result = Result(case, run(case.case, device))
            if every_line or not result.outcome.ok:
                progress.say(_line(result))
            yield result


def _backend(device: torch.device) -> str:
    if device.type == "mps":
        return "mps"
    return f"the simulator, every access checked ({mps.problem()})"


def _line(result: Result) -> str:
    head = f"{result.case!s:<76} {result.case.dtype:<9}"
    outcome = result.outcome
    if outcome.worst is None:
        return f"{head} {outcome.status}  {outcome.message}"
    return f"{head} {outcome.worst.error:9.1e} {outcome.worst.bound:9.1e}  {outcome.status}"
