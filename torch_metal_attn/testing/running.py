"""Runs one case, whose result must be right, or which must raise if the documentation says so."""

import contextvars
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from torch_metal_attn.runtime import tensor_tiles
from torch_metal_attn.runtime.machine import without_paths
from torch_metal_attn.runtime.tensor_tiles import allow_tf32
from torch_metal_attn.simulator import SimulatorFault, cache, toolchain
from torch_metal_attn.testing.case import Case
from torch_metal_attn.testing.families import FAMILIES
from torch_metal_attn.testing.invalidation import invalidate
from torch_metal_attn.testing.judge import Measure, Skipped, same_bits

PASSED, FAILED, RAISED, REFUSED, ACCEPTED = "ok", "FAILED", "raised", "refused", "accepted"
DIED, HUNG, SKIPPED = "died", "hung", "skipped"

_REFUSALS: tuple[type[Exception], ...] = (ValueError, TypeError, NotImplementedError)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case.

    Attributes: status: PASSED; FAILED, an error beyond its bound; RAISED, an exception that is not
        a refusal; REFUSED although the call is legal; ACCEPTED although it is not; DIED or HUNG, if
        the process that ran the case did; SKIPPED, for the reason in the message. what: the result
        or the type of exception.
    """

    status: str
    what: str = ""
    message: str = ""
    measures: tuple[Measure, ...] = ()

    @property
    def ok(self) -> bool:
        return self.status in (PASSED, SKIPPED)

    @property
    def worst(self) -> Measure | None:
        """The measure that is nearest to its bound, or furthest beyond it."""
        return max(self.measures, key=lambda measure: measure.share, default=None)

    def shows(self, fault: "Outcome") -> bool:
        """True if this outcome has the same failure, maybe with other numbers or more failures."""
        wrong = {self.what} | {measure.what for measure in self.measures if not measure.ok}
        return self.status == fault.status and fault.what in wrong


def run(case: Case, device: torch.device) -> Outcome:
    """Run a case. Raises ToolchainError or CacheError if no kernel can be compiled."""
    with settings_of(case):
        return _run(case, device)


@contextmanager
def settings_of(case: Case) -> Iterator[None]:
    tiles = tensor_tiles.off() if case.tiles == "8x8" else nullcontext()
    # Float32 is judged as float32, even if the user allows TF32.
    with allow_tf32(case.tiles == "TF32"), tiles:
        yield


def _run(case: Case, device: torch.device) -> Outcome:
    family = FAMILIES[type(case)]
    expected = case.refused()
    try:
        prepared = family.prepare(case, device)
        arguments = invalidate(prepared.arguments, case.invalidated)
    except Skipped as reason:
        return Outcome(SKIPPED, message=without_paths(str(reason)))
    except Exception as error:
        return _raised(RAISED, error, "while making the case")
    refusals: tuple[type[Exception], ...] = _REFUSALS + case.ALSO_RAISES.get(case.call, ())
    try:
        results = prepared.function(**arguments)
    except (toolchain.ToolchainError, cache.CacheError):
        raise
    except SimulatorFault as error:
        return _raised(RAISED, error)
    except refusals as error:
        if not expected:
            return _raised(REFUSED, error)
        unwritten = prepared.memory.undisturbed()
        return Outcome(PASSED) if unwritten.ok else Outcome(FAILED, unwritten.what)
    except Exception as error:
        return _raised(RAISED, error)
    unchecked_on_mps = device.type == "mps" and expected in case.UNREAD_ON_MPS
    if expected and not unchecked_on_mps:
        return Outcome(ACCEPTED, expected, f"it must be refused: {expected}")
    try:
        measures = [prepared.memory.undisturbed(prepared.written)]
        if not unchecked_on_mps:
            repeated = _repeat(partial(prepared.function, **arguments), results, case.threads)
            measures = [*prepared.judge(results), *repeated, *measures]
    except Exception as error:
        return _raised(FAILED, error)
    judged = [measure for measure in measures if not measure.ok] or measures
    status = PASSED if judged is measures else FAILED
    what = max(judged, key=lambda measure: measure.share).what
    return Outcome(status, what, measures=tuple(measures))


def _repeat(call: Callable[[], Any], first: Any, threads: int) -> list[Measure]:
    """Compares the bits of the first results with those of the same call in each thread."""
    if not threads:
        return []
    # simulate() applies to the context in which it was entered.
    contexts = [contextvars.copy_context() for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        runs = [pool.submit(context.run, call) for context in contexts]
    return [
        same_bits(f"result {i} of another run", again, before)
        for run in runs
        for i, (again, before) in enumerate(_tensors(run.result(), first))
    ]


def _tensors(*results: Any) -> Iterator[tuple[Tensor, ...]]:
    return zip(*([x for x in tree_leaves(r) if x is not None] for r in results), strict=True)


def _raised(status: str, error: Exception, where: str = "") -> Outcome:
    text = f"{error} ({where})" if where else str(error)
    what = getattr(error, "kind", None) or type(error).__name__
    if status == FAILED or where:  # a bug of this package, so the traceback helps
        text += "\n" + "".join(traceback.format_tb(error.__traceback__)[-3:])
    return Outcome(status, what, without_paths(f"{type(error).__name__}: {text}"))
