"""Times several calls alternately, so that other load on the machine affects all of them."""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Call = Callable[[], object]

_ROUNDS = 15
_SAMPLE_SECONDS = 0.01  # the shortest sample; the wait for the GPU is short in comparison
_MOST_CALLS = 1 << 16  # in one sample


def add_rounds(parser: argparse.ArgumentParser) -> None:
    help_text = f"samples of each time (default: {_ROUNDS})"
    parser.add_argument("--rounds", type=int, default=_ROUNDS, metavar="N", help=help_text)


@dataclass(frozen=True)
class Timer:
    """A clock in seconds, and a function that waits until the device is idle."""

    now: Callable[[], float]
    synchronise: Callable[[], None]


def timer_of(device: torch.device) -> Timer:
    synchronise = torch.mps.synchronize if device.type == "mps" else lambda: None
    return Timer(time.perf_counter, synchronise)


@dataclass(frozen=True)
class Times:
    """Seconds per call in each sample, or the error of the call."""

    seconds: tuple[float, ...] = ()
    error: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def interleaved(calls: Mapping[str, Call], timer: Timer, rounds: int) -> dict[str, Times]:
    """The times of each call, or its error. A round has one sample per call, of at least 10 ms."""
    failed: dict[str, Times] = {}
    counts: dict[str, int] = {}
    for name, call in calls.items():
        try:
            _sample(call, timer, 1)
            counts[name] = _calls_per_sample(call, timer)
        except (RuntimeError, ValueError, TypeError) as error:  # OutOfMemoryError is a RuntimeError
            failed[name] = Times(error=f"{type(error).__name__}: {error}")
    samples: dict[str, list[float]] = {name: [] for name in counts}
    for number in range(rounds):
        # Every second round runs in reverse, so that no call always follows the same one.
        for name in list(counts)[:: 1 if number % 2 == 0 else -1]:
            samples[name].append(_sample(calls[name], timer, counts[name]))
    return failed | {name: Times(tuple(seconds)) for name, seconds in samples.items()}


def _calls_per_sample(call: Call, timer: Timer) -> int:
    count = 1
    while _sample(call, timer, count) * count < _SAMPLE_SECONDS and count < _MOST_CALLS:
        count *= 2
    return count


def _sample(call: Call, timer: Timer, count: int) -> float:
    timer.synchronise()
    start = timer.now()
    for _ in range(count):
        call()
    timer.synchronise()
    return (timer.now() - start) / count
