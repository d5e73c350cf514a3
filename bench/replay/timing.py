"""Times of launches on the GPU, and how they are printed."""

import time
from collections.abc import Mapping, Sequence

import torch

from .driver import Launch, Programs, synchronise
from .manifest import NO_LIMIT, Candidate

# Registers of a thread on M1 and M2.
M1_REGISTERS = 128


def launches(
    programs: Programs, candidate: Candidate, limit: int, pointers: Mapping[str, int]
) -> list[Launch]:
    """The candidate's dispatches, each for `limit` registers if it is assembled for that."""
    known = programs.manifest.programs
    return [
        Launch(programs, d, limit if limit in known[d.program].limits else NO_LIMIT, pointers)
        for d in candidate.dispatches
    ]


def limits(programs: Programs, candidate: Candidate) -> list[int]:
    """The numbers of registers that some dispatch is assembled for."""
    known = programs.manifest.programs
    return sorted({n for dispatch in candidate.dispatches for n in known[dispatch.program].limits})


def by_clock(copies: Sequence[Sequence[Launch]], stream: int, seconds: float = 0.006) -> float:
    """Microseconds on a part of the GPU: the least of three rounds, by the host's clock.

    copies: the same work on other memory, in rotation, so that no cache has it.
    """

    def run(count: int) -> float:
        begin = time.perf_counter()
        for index in range(count):
            for launch in copies[index % len(copies)]:
                launch.enqueue(stream)
        synchronise(stream)
        return (time.perf_counter() - begin) / count

    run(2)
    count = max(3, min(400, int(seconds / run(1))))
    return min(run(count) for _ in range(3)) * 1e6


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table in Markdown."""
    print("| " + " | ".join(headings) + " |")
    print("| --- " * len(headings) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)
    print()


def print_device() -> None:
    """What was measured on."""
    properties = torch.cuda.get_device_properties(0)
    print(f"{properties.name}, {properties.multi_processor_count} SMs, torch {torch.__version__}\n")
