"""Simplifies a failing case while it still fails in the same way."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch_metal_attn.testing.case import Case
from torch_metal_attn.testing.running import Outcome

SHRINK_SECONDS = 120.0
# Sizes to try first, because tiles and the blocks of formats divide them.
_FIRST_SIZES = (8, 32)


def shrink(case: Case, outcome: Outcome, run: Callable[[Case], Outcome]) -> tuple[Case, Outcome]:
    """The simplest case that fails like `case`, and its outcome. Stops after SHRINK_SECONDS."""
    tried, fault = {case}, outcome
    ends = time.monotonic() + SHRINK_SECONDS
    progress = True
    while progress:
        progress = False
        for simpler in _simpler(case):
            if simpler in tried or simpler.invalid_reason():
                continue
            if bool(simpler.refused()) != bool(case.refused()):
                continue
            if time.monotonic() > ends:
                return case, outcome
            tried.add(simpler)
            actual = run(simpler)
            if actual.shows(fault):
                case, outcome, progress = simpler, actual, True
                break
    return case, outcome


def _simpler(case: Case) -> Iterator[Case]:
    """Yields the largest steps first: fewer sequences, smaller sizes, defaults, smaller values."""
    by_sequence = {n: getattr(case, n) for n in case.OF_SEQUENCES if case.has(n)}
    count = max((_count(value) for value in by_sequence.values()), default=0)
    for b in range(count if count > 1 else 0):
        yield dataclasses.replace(case, **{n: _without(x, b) for n, x in by_sequence.items()})
    defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(case)}
    for names in case.SIZES:
        sizes = {n: getattr(case, n) for n in names if case.has(n)}
        for less in (*_FIRST_SIZES, *_fewer(max(sizes.values(), default=0))):
            smaller = {n: min(size, max(less, defaults[n])) for n, size in sizes.items()}
            if smaller != sizes:
                yield dataclasses.replace(case, **smaller)
    for field in dataclasses.fields(case):
        value = getattr(case, field.name)
        if field.name not in ("call", "invalidated") and value != field.default:
            for less in (field.default, *_less(value, field.default)):
                yield dataclasses.replace(case, **{field.name: less})


def _count(of_sequences: Any) -> int:
    return of_sequences if isinstance(of_sequences, int) else len(of_sequences or ())


def _without(of_sequences: Any, b: int) -> Any:
    if isinstance(of_sequences, int):
        return of_sequences - 1
    return of_sequences and of_sequences[:b] + of_sequences[b + 1 :]


def _fewer(n: int) -> Iterator[int]:
    return (less for less in dict.fromkeys((0, 1, n // 2, n - 1)) if 0 <= less < n)


def _less(value: Any, default: Any) -> Iterator[Any]:
    if isinstance(value, tuple):
        yield from (value[:i] + value[i + 1 :] for i in range(len(value)))
        yield from _smaller(value)
    elif isinstance(value, str) and " " in value:  # a mask and its dimensions
        kind, dims = value.split(" ", 1)
        if set(dims) <= set("bhqk"):
            for letter in dims:
                yield f"{kind} {dims.replace(letter, '')}"
    elif type(value) is int and type(default) is int:
        for step in (value // 2, value - 1):
            if abs(step - default) < abs(value - default):
                yield step


def _smaller(counts: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """The counts with one of them reduced. If it is a pair, one or both of its numbers are."""
    for i, n in enumerate(counts):
        lesser: list[Any] = []
        if isinstance(n, tuple):
            lesser = [*_smaller(n), *((less,) * len(n) for less in _fewer(min(n)))]
        elif isinstance(n, int):
            lesser = list(_fewer(n))
        yield from ((*counts[:i], less, *counts[i + 1 :]) for less in lesser)
