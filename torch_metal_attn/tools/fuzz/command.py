"""`python -m torch_metal_attn fuzz`: runs random calls, or the failures of a report again."""

import argparse
import math
import time
from pathlib import Path

from torch_metal_attn.runtime import machine
from torch_metal_attn.runtime.device import best_device
from torch_metal_attn.simulator.exit_status import BadRequest
from torch_metal_attn.simulator.runs import MOST_WORKERS
from torch_metal_attn.testing import running
from torch_metal_attn.testing.families import draw
from torch_metal_attn.tools.fuzz import report, workers
from torch_metal_attn.tools.fuzz.report import Report
from torch_metal_attn.tools.progress import Progress

OUT = Path("torch_metal_attn-fuzz.json")
_MOST_CASES = 10**9


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--minutes", type=_positive(float), default=1.0, help="run for this long (default: 1)"
    )
    parser.add_argument(
        "--cases",
        type=_positive(int, _MOST_CASES),
        help="stop after this many cases, even before --minutes",
    )
    parser.add_argument(
        "--seed", type=int, help="seed of all cases (default: a new one, which is printed)"
    )
    parser.add_argument(
        "--workers",
        type=_positive(int, MOST_WORKERS),
        default=1,
        help="number of processes (default: 1)",
    )
    parser.add_argument("--case", type=_index, metavar="I", help="run only case I; needs --seed")
    parser.add_argument(
        "--case-seconds",
        type=_positive(float),
        default=120.0,
        metavar="S",
        help="a case that takes longer, compilation included, counts as hung (default: 120)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=OUT,
        metavar="FILE",
        help=f"where to write the report (default: {OUT})",
    )
    parser.add_argument(
        "--replay", type=Path, metavar="FILE", help="run the failures in a report again"
    )


def _index(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a case number: give 0 or more")
    return int(text)


def _positive(kind: type[int] | type[float], most: float = math.inf) -> "type[int] | type[float]":
    def read(text: str) -> int | float:
        value = kind(text)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is not a positive, finite number")
        if value > most:
            raise argparse.ArgumentTypeError(f"{text} is above {most}")
        return value

    read.__name__ = kind.__name__
    return read  # type: ignore[return-value]


def fuzz(options: argparse.Namespace) -> bool:
    """Run the cases. True if none failed. Raises OSError for files, BadRequest if no case ran."""
    _check(options)
    if options.replay is not None:
        return _replay(options.replay)
    seed = time.time_ns() % 2**31 if options.seed is None else options.seed
    indices = range(options.cases or _MOST_CASES)
    if options.case is not None:
        indices = range(options.case, options.case + 1)
    with best_device(check=True) as device:
        described = machine.describe(device)
    results = Report(described, seed)
    results.write(options.out)  # fails now if the path is wrong, not after an hour
    print(f"Fuzzing on {described['backend']}, seed {seed}", flush=True)
    start = time.monotonic()
    seconds = 60 * options.minutes
    progress = Progress(options.cases, ends=start + seconds)
    try:
        for ran in workers.run(
            draw,
            seed,
            indices,
            min(options.workers, len(indices)),
            case_seconds=options.case_seconds,
            ends=start + seconds,
        ):
            results.seconds = time.monotonic() - start
            if ran is None:
                continue
            results.add(ran)
            minute = int(results.seconds // 60) + 1
            progress.step(f"minute {minute}", f"{len(results.failures)} failed, {ran.case.call}")
            if not ran.outcome.ok:
                results.write(options.out)
                progress.say(results.news_of(ran))
    finally:
        results.write(options.out)
        progress.say(f"{results.summary}; the report is {options.out}")
    if not results.ran:
        raise BadRequest("no case ran, so nothing was tested: give more --minutes")
    return not results.failures


def _check(options: argparse.Namespace) -> None:
    """Refuse options that would be ignored."""
    used = [name for name in ("seed", "cases", "case") if getattr(options, name) is not None]
    if options.replay is not None and used:
        raise BadRequest(f"--replay runs the failures of a report: leave out --{used[0]}")
    if options.case is not None and options.cases is not None:
        raise BadRequest("--case runs a single case: leave out --cases")
    if options.case is not None and options.seed is None:
        raise BadRequest("--case needs --seed: give the seed that the case was drawn with")


def _replay(path: Path) -> bool:
    cases = report.read(path)
    failed = 0
    with best_device(check=True) as device:
        for i, case in enumerate(cases):
            ran = workers.Ran(i, case, running.run(case, device))
            failed += not ran.outcome.ok
            print(report.failure_text(ran) if not ran.outcome.ok else f"case {i} ok: {case}")
    print(f"{failed} of {len(cases)} fail" if cases else f"{path} has no failures to run again")
    return not failed
