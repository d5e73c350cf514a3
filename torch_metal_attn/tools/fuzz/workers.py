"""Worker processes that run cases, and the process that supervises them."""

import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from torch_metal_attn.runtime.device import best_device
from torch_metal_attn.testing import running
from torch_metal_attn.testing.case import Case
from torch_metal_attn.testing.running import Outcome
from torch_metal_attn.testing.shrinking import SHRINK_SECONDS, shrink

_PERIOD = 0.5  # seconds between two readings of the clock
_READY = "ready"


@dataclass(frozen=True)
class Ran:
    """A case with its outcome. shrunk: the simplest case that fails in the same way, or None."""

    index: int
    case: Case
    outcome: Outcome
    shrunk: tuple[Case, Outcome] | None = None


class _Clock:
    """Counts the seconds in which this process runs. While it is paused, its workers are too."""

    def __init__(self) -> None:
        self._last, self._seconds = time.monotonic(), 0.0

    def look(self) -> float:
        now = time.monotonic()
        self._seconds += min(now - self._last, 2 * _PERIOD)
        self._last = now
        return self._seconds


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    case: tuple[int, Case] | None = None  # the running case
    since: float = 0.0
    shrinking: Outcome | None = None

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def run(
    draw: Callable[[int, int], Case],
    seed: int,
    indices: range,
    count: int,
    *,
    case_seconds: float,
    ends: float,
) -> Iterator[Ran | None]:
    """Yields each case after its run, or None if none ended for a while. Starts none after `ends`.

    draw: makes case `index` of a seed. count: number of workers.
    """
    begun, clock = 0, _Clock()
    workers = [_start() for _ in range(count)]
    try:
        while workers:
            ready = wait([worker.pipe for worker in workers], _PERIOD)
            now = clock.look()
            results: list[Ran | None] = []
            for worker in list(workers):
                news = None
                if worker.pipe in ready:
                    news = _receive(worker, now)
                elif worker.case and now - worker.since > case_seconds + (
                    0 if worker.shrinking is None else SHRINK_SECONDS
                ):
                    news = _lost(worker, running.HUNG, f"no end after {case_seconds:.0f} s")
                if isinstance(news, Ran):
                    results.append(news)
                may_begin = begun < len(indices) and time.monotonic() < ends
                if worker.pipe.closed:
                    workers.remove(worker)
                    workers += [_start()] if may_begin else []
                elif worker.case is None and news and may_begin:
                    worker.case = indices[begun], draw(seed, indices[begun])
                    worker.since, worker.shrinking = now, None
                    worker.pipe.send(worker.case)
                    begun += 1
                elif worker.case is None and not may_begin:
                    worker.stop()
                    workers.remove(worker)
            yield from results or [None]
    finally:
        for worker in workers:
            worker.stop()


def _start() -> _Worker:
    """Start a worker by spawn, because a process that has used mps must not fork."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs,), daemon=True)
    with _interrupts_ignored():
        process.start()
    theirs.close()
    return _Worker(process, ours)


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """A context for starting a process that ignores Ctrl-C, which only the supervisor handles."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _receive(worker: _Worker, now: float) -> "Ran | str | None":
    try:
        message = worker.pipe.recv()
    except EOFError:
        worker.process.join()
        code = worker.process.exitcode
        if worker.case is None:
            raise RuntimeError(
                f"a worker ended with exit status {code} outside of a case"
            ) from None
        words = f"by signal {-code}" if code < 0 else f"with exit status {code}"
        return _lost(worker, running.DIED, f"the process ended {words}")
    if isinstance(message, Exception):
        raise message
    if isinstance(message, Outcome):  # of the case, which the worker now shrinks
        worker.shrinking, worker.since = message, now
        return None
    worker.case = None
    news: Ran | str = message
    return news


def _lost(worker: _Worker, status: str, words: str) -> Ran:
    """Stop the worker. Its case has the failure that it was shrinking, or else `status`."""
    assert worker.case is not None
    worker.stop()
    return Ran(*worker.case, worker.shrinking or Outcome(status, "the process", words))


def _work(pipe: Connection) -> None:
    torch.set_num_threads(1)
    try:
        with best_device(check=True) as device:
            pipe.send(_READY)
            while True:
                index, case = pipe.recv()
                pipe.send(run_and_shrink(index, case, device, pipe.send))
    except (BrokenPipeError, EOFError):
        return  # the supervisor has ended
    except Exception as error:
        pipe.send(error)


def run_and_shrink(
    index: int, case: Case, device: torch.device, tell: Callable[[Outcome], Any] = lambda _: None
) -> Ran:
    """Run one case. tell: called with the outcome of a failure before it is shrunk."""
    outcome = running.run(case, device)
    if outcome.ok:
        return Ran(index, case, outcome)
    tell(outcome)
    return Ran(index, case, outcome, shrink(case, outcome, lambda c: running.run(c, device)))
