"""Times several calls interleaved, so that what slows the machine affects all of them."""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Call = Callable[[], object]

_ROUNDS = 15
_SAMPLE_SECONDS = 0.01  # at least, so that a wait for the GPU is short in comparison
_MOST_CALLS = 1 << 16  # in a sample


def add_rounds(parser: argparse.ArgumentParser) -> None:
    help_text = f"samples of each time (default: {_ROUNDS})"
    parser.add_argument("--rounds", type=int, default=_ROUNDS, metavar="N", help=help_text)


@dataclass(frozen=True)
class Timer:
    """A clock in seconds, and a wait until the device has done all its work."""

    now: Callable[[], float]
    synchronise: Callable[[], None]


def timer_of(device: torch.device) -> Timer:
    """The timer of mps; a CPU has nothing to wait for."""
    if device.type == "mps":
        return Timer(time.perf_counter, torch.mps.synchronize)
    return Timer(time.perf_counter, lambda: None)


@dataclass(frozen=True)
class Times:
    """Seconds per call, one for each sample; or why there are none."""

    seconds: tuple[float, ...] = ()
    error: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def interleaved(calls: Mapping[str, Call], timer: Timer, rounds: int) -> dict[str, Times]:
    """Each call's times, or its error, with one sample of at least 10 ms of each per round."""
    failed: dict[str, Times] = {}
    counts: dict[str, int] = {}
    for name, call in calls.items():
        try:
            _sample(call, timer, 1)
            count = _calls_of_a_sample(call, timer)
        except (RuntimeError, ValueError, TypeError) as error:  # torch's OutOfMemoryError too
            failed[name] = Times(error=f"{type(error).__name__}: {error}")
        else:
            counts[name] = count
    samples: dict[str, list[float]] = {name: [] for name in counts}
    for number in range(rounds):
        # Every second round runs in reverse, so that no call always follows the same one.
        for name in list(counts)[:: 1 if number % 2 == 0 else -1]:
            samples[name].append(_sample(calls[name], timer, counts[name]))
    return failed | {name: Times(tuple(seconds)) for name, seconds in samples.items()}


def _calls_of_a_sample(call: Call, timer: Timer) -> int:
    """The number of calls in a sample: a single short call would mostly time the wait."""
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
