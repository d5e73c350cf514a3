"""Runs flash-attn's own tests on our kernels.

    git clone --branch v2.8.3 --depth 1 https://github.com/Dao-AILab/flash-attention
    pip install einops
    python -m tests.outside.flash_attn_suite flash-attention --minutes 20

It runs tests/test_flash_attn.py and tests/test_rotary.py of that checkout. The only edit is the
device: "cuda" becomes --device. torch.cuda reports an A100, and `flash_attn` is the module of
`install_flash_attn()`. --seed draws cases whose size (queries times keys times head dim) is at most
--size. Each test starts with one of its smallest cases, and all tests share the time equally.
Outcomes are printed to stderr, and a Markdown table of counts to stdout.
"""

import argparse
import contextlib
import inspect
import io
import math
import random
import signal
import sys
import time
import types
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from torch_metal_attn import install_flash_attn, simulate

FILES = ("tests/test_flash_attn.py", "tests/test_rotary.py")
# {test that needs a build for CUDA: reason}.
OF_CUDA = {"test_compilation_count": "counts what Triton compiles"}


class TooLong(BaseException):
    """Derives from BaseException, so that a case does not catch it."""


@dataclass
class Test:
    """A test function and the values of its parameters."""

    function: Callable[..., None]
    axes: list[tuple[tuple[str, ...], list[Any]]] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __len__(self) -> int:
        return math.prod(len(values) for _, values in self.axes)

    def case(self, index: int) -> dict[str, Any]:
        parameters: dict[str, Any] = {}
        for names, values in self.axes:
            index, place = divmod(index, len(values))
            value = values[place]
            parameters |= zip(names, value if len(names) > 1 else (value,), strict=True)
        return parameters

    def drawn(self, largest: int, rng: random.Random) -> list[int]:
        """One of the smallest cases, then all other cases up to `largest`, in random order."""
        sizes = [size(self.case(index)) for index in range(len(self))]
        cases = sorted(range(len(self)), key=lambda _: rng.random())
        first = min(cases, key=sizes.__getitem__)
        return [first, *(i for i in cases if sizes[i] <= largest and i != first)]

    def run(self, case: dict[str, Any], limit: float) -> None:
        start = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, limit)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                self.function(**case)
            outcome = "passed"
        except pytest.skip.Exception:
            outcome = "skipped by itself"
        except TooLong:
            outcome = "too long"
        except Exception as error:
            outcome = "failed"
            self.failures.append(f"`{case}`: {summary(error)}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        self.outcomes[outcome] += 1
        seconds = time.monotonic() - start
        self.seconds += seconds
        print(f"{self.function.__name__} {case}: {outcome}, {seconds:.0f} s", file=sys.stderr)


def size(case: dict[str, Any]) -> int:
    """Queries times keys times head dim. A missing parameter counts as 1."""
    q_length = case.get("seqlen_q", case.get("seqlen", 1))
    kv_length = case.get("seqlen_k", case.get("seqlen", 1))
    return int(q_length * kv_length * case.get("d", 1))


def summary(error: Exception) -> str:
    frame = inspect.trace()[-1]
    line = "".join(frame.code_context or []).strip()
    text = str(error).splitlines()[0] if str(error) else line
    return f"{type(error).__name__} at line {frame.lineno}: {text}"


def tests_of(module: types.ModuleType) -> list[Test]:
    tests = []
    for name, function in vars(module).items():
        if name.startswith("test_") and name not in OF_CUDA:
            marks = [m for m in getattr(function, "pytestmark", []) if m.name == "parametrize"]
            axes = [(tuple(m.args[0].replace(" ", "").split(",")), [*m.args[1]]) for m in marks]
            tests.append(Test(function, axes))
    return tests


def load(path: Path, device: str) -> types.ModuleType:
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    text = path.read_text().replace('"cuda"', f'"{device}"')
    # test_rotary.py imports Triton for the test in OF_CUDA.
    with mock.patch.dict(sys.modules, {"triton": types.ModuleType("triton")}):
        exec(compile(text, str(path), "exec"), vars(module))
    return module


def run(tests: list[Test], cases: list[list[int]], seconds: float, limit: float) -> None:
    end = time.monotonic() + seconds
    waiting = [(test, drawn[::-1]) for test, drawn in zip(tests, cases, strict=True)]
    while (waiting := [entry for entry in waiting if entry[1]]) and time.monotonic() < end:
        test, rest = min(waiting, key=lambda entry: entry[0].seconds)
        test.run(test.case(rest.pop()), limit)


def table(tests: list[Test], eligible: list[int]) -> str:
    outcomes = ("passed", "failed", "skipped by itself", "too long")
    heads = ("test", "cases", "small enough", "run", *outcomes, "seconds")
    rows = [
        [len(t), n, t.outcomes.total(), *(t.outcomes[o] for o in outcomes), round(t.seconds)]
        for t, n in zip(tests, eligible, strict=True)
    ]
    named = [[t.function.__name__, *row] for t, row in zip(tests, rows, strict=True)]
    named.append(["all", *map(sum, zip(*rows, strict=True))])
    lines = [f"| {' | '.join(map(str, row))} |" for row in (heads, ["---"] * len(heads), *named)]
    failures = [f"- {t.function.__name__} {text}" for t in tests for text in t.failures]
    return "\n".join([*lines, "", *failures])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="a checkout of flash-attn 2.8")
    parser.add_argument("--device", default="cpu", help="cpu or mps")
    parser.add_argument("--simulator", action="store_true", help="run the kernels on the CPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds per case")
    parser.add_argument("--size", type=int, default=2**22, help="most queries * keys * head dim")
    parser.add_argument("--only", default="", help="tests whose names contain this")
    options = parser.parse_args()

    def stop(*_: Any) -> None:
        raise TooLong

    signal.signal(signal.SIGALRM, stop)
    rng = random.Random(options.seed)
    # On machines with a GPU inductor reads the version too.
    a100 = types.SimpleNamespace(total_memory=80 * 2**30, major=8, minor=0)
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(8, 0)),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=a100),
        install_flash_attn(),
        simulate() if options.simulator else contextlib.nullcontext(),
    ):
        modules = [load(options.checkout / name, options.device) for name in FILES]
        tests = [test for module in modules for test in tests_of(module)]
        tests = [test for test in tests if options.only in test.function.__name__]
        cases = [test.drawn(options.size, rng) for test in tests]
        run(tests, cases, 60 * options.minutes, options.limit)
    print(table(tests, [len(drawn) for drawn in cases]))


if __name__ == "__main__":
    main()
