"""Processes that each run a share of the cases, watched by the process that started them."""

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

Draw = Callable[[int, int], Case]
_PERIOD = 0.5  # seconds between two looks at the clock


@dataclass(frozen=True)
class Ran:
    """A case that was run.

    Attributes: index: the case's in the run. shrunk: the simplest case that fails in the same way,
        and its outcome; None if the case did not fail, or ended its process.
    """

    index: int
    case: Case
    outcome: Outcome
    shrunk: tuple[Case, Outcome] | None = None


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    case: tuple[int, Case] | None = None  # the one that it runs
    since: float = 0.0
    shrinking: Outcome | None = None
    done: bool = False
    lost: bool = False


def run(
    draw: Draw,
    seed: int,
    indices: range,
    count: int,
    *,
    case_seconds: float,
    ends: float,
) -> Iterator[Ran | None]:
    """Each case when it has run, or None if none has finished for a while.

    Worker w of `count` runs every count-th index, starting with the w-th. A process that dies, or
    that takes longer than case_seconds for a case, is replaced by another, which goes on with the
    next case. No case begins after time.monotonic() == ends. Raises RuntimeError if a worker cannot
    start.
    """
    shares = [indices[w::count] for w in range(count)]
    workers = [_start(draw, seed, share) for share in shares]
    try:
        while workers:
            if time.monotonic() >= ends:
                for worker in workers:
                    if worker.case is None:
                        worker.done = True
            ready = wait([worker.pipe for worker in workers], _PERIOD)
            nothing = True
            for i, worker in enumerate(workers):
                ran = None
                if worker.pipe in ready:
                    ran = _receive(worker, may_begin=time.monotonic() < ends)
                elif worker.case and time.monotonic() - worker.since > _limit(worker, case_seconds):
                    ran = _lost(worker, running.HUNG, f"no end after {case_seconds:.0f} s")
                if ran is not None:
                    nothing = False
                    yield ran
                    if worker.lost:
                        rest = range(ran.index, indices.stop, count)[1:]
                        if rest:
                            workers[i] = _start(draw, seed, rest)
                        else:
                            worker.done = True
            if nothing:
                yield None
            for worker in workers:
                if worker.done:
                    _stop(worker)
            workers = [worker for worker in workers if not worker.done]
    finally:
        for worker in workers:
            _stop(worker)


def _start(draw: Draw, seed: int, share: range) -> _Worker:
    """Start a worker by spawn, because a process that has used mps may not fork."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(draw, seed, share, theirs), daemon=True)
    with _interrupts_ignored():
        process.start()
    theirs.close()
    return _Worker(process, ours)


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """A context for starting a process: only the watcher handles Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _limit(worker: _Worker, case_seconds: float) -> float:
    return case_seconds if worker.shrinking is None else case_seconds + SHRINK_SECONDS


def _stop(worker: _Worker) -> None:
    worker.process.kill()
    worker.process.join()
    worker.pipe.close()


def _receive(worker: _Worker, may_begin: bool) -> Ran | None:
    """What the worker sends: the case that it wants to begin, its outcome, its end."""
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
    if message is None:
        worker.done = True
        return None
    if isinstance(message, Ran):
        worker.case = None
        return message
    if isinstance(message, Outcome):  # of the case, which it shrinks now
        worker.shrinking, worker.since = message, time.monotonic()
        return None
    if not may_begin:
        worker.done = True
        return None
    worker.case, worker.since, worker.shrinking = message, time.monotonic(), None
    worker.pipe.send(True)
    return None


def _lost(worker: _Worker, status: str, words: str) -> Ran:
    """The case that the process was running, which failed, or had failed before it was shrunk."""
    assert worker.case is not None
    index, case = worker.case
    worker.lost = True
    _stop(worker)
    if worker.shrinking is not None:
        return Ran(index, case, worker.shrinking)
    return Ran(index, case, Outcome(status, "the process", words))


def _work(draw: Draw, seed: int, share: range, pipe: Connection) -> None:
    """The worker's loop. It asks before each case, so that the watcher knows which one it runs."""
    torch.set_num_threads(1)
    try:
        with best_device(check=True) as device:
            for index in share:
                case = draw(seed, index)
                pipe.send((index, case))
                pipe.recv()
                pipe.send(run_and_shrink(index, case, device, pipe.send))
        pipe.send(None)
    except (BrokenPipeError, EOFError):
        return  # the watcher is gone
    except Exception as error:
        pipe.send(error)


def run_and_shrink(
    index: int, case: Case, device: torch.device, tell: Callable[[Outcome], Any] = lambda _: None
) -> Ran:
    """Run one case. tell: receives the outcome of a failure before it is shrunk."""
    outcome = running.run(case, device)
    if outcome.ok:
        return Ran(index, case, outcome)
    tell(outcome)
    return Ran(index, case, outcome, shrink(case, outcome, lambda c: running.run(c, device)))
