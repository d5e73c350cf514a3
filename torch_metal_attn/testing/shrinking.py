"""Simplifies a failing case as far as it still fails in the same way."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch_metal_attn.testing.case import Case
from torch_metal_attn.testing.running import Outcome

# The time limit; after it the simplest case so far is returned.
SHRINK_SECONDS = 120.0


def shrink(case: Case, outcome: Outcome, run: Callable[[Case], Outcome]) -> tuple[Case, Outcome]:
    """The simplest case found, and its outcome."""
    tried, fault = {case}, outcome
    ends = time.monotonic() + SHRINK_SECONDS
    progress = True
    while progress:
        progress = False
        for simpler in _simpler(case):
            if simpler in tried or simpler.meaningless():
                continue
            if bool(simpler.refused()) != bool(case.refused()):
                continue
            if time.monotonic() > ends:
                return case, outcome
            tried.add(simpler)
            found = run(simpler)
            if found.shows(fault):
                case, outcome, progress = simpler, found, True
                break
    return case, outcome


def _simpler(case: Case) -> Iterator[Case]:
    """The largest steps first: whole fields at their defaults, then halves, then one less."""
    yield from case.smaller()
    for field in dataclasses.fields(case):
        value = getattr(case, field.name)
        if field.name in ("call", "spoilt") or value == field.default:
            continue
        for less in _less(value, field.default):
            yield dataclasses.replace(case, **{field.name: less})


def _less(value: Any, default: Any) -> Iterator[Any]:
    yield default
    if isinstance(value, tuple):  # of words; tuples of sizes are made smaller by `smaller`
        if value and isinstance(value[0], str):
            for i in range(len(value)):
                yield value[:i] + value[i + 1 :]
    elif isinstance(value, str) and " " in value:  # a mask and its dimensions
        kind, dims = value.split(" ", 1)
        if set(dims) <= set("bhqk"):
            for letter in dims:
                yield f"{kind} {dims.replace(letter, '')}"
    elif type(value) is int and type(default) is int:
        for step in (value // 2, value - 1):
            if abs(step - default) < abs(value - default):
                yield step
