"""Runs one case: its result must be right, or an error where the documentation says so."""

import traceback
from dataclasses import dataclass

import torch

from torch_metal_attn.runtime.machine import without_paths
from torch_metal_attn.runtime.tensor_tiles import allow_tf32
from torch_metal_attn.simulator import SimulatorFault, cache, toolchain
from torch_metal_attn.testing.case import Case
from torch_metal_attn.testing.families import FAMILIES
from torch_metal_attn.testing.judge import Measure
from torch_metal_attn.testing.spoiling import spoil

PASSED, FAILED, RAISED, REFUSED, ACCEPTED = "ok", "FAILED", "raised", "refused", "accepted"
DIED, HUNG = "died", "hung"

_REFUSALS: tuple[type[Exception], ...] = (ValueError, TypeError, NotImplementedError)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case.

    Attributes: status: PASSED; FAILED, a result beyond its bound; RAISED, an error that is not a
        refusal; REFUSED although the call is legal; ACCEPTED although it is not; DIED or HUNG with
        the process that ran it. what: the result or the type of exception.
    """

    status: str
    what: str = ""
    message: str = ""
    measures: tuple[Measure, ...] = ()

    @property
    def ok(self) -> bool:
        return self.status == PASSED

    def shows(self, fault: "Outcome") -> bool:
        """Whether it fails in the same way as the other, apart from numbers and other failures."""
        wrong = {self.what} | {measure.what for measure in self.measures if not measure.ok}
        return self.status == fault.status and fault.what in wrong


def run(case: Case, device: torch.device) -> Outcome:
    """Run a case. Raises ToolchainError or CacheError if nothing can be compiled."""
    # Float32 is judged as such, whatever the user's setting.
    with allow_tf32(False):
        return _run(case, device)


def _run(case: Case, device: torch.device) -> Outcome:
    family = FAMILIES[type(case)]
    expected = case.refused()
    try:
        prepared = family.prepare(case, device)
        arguments = spoil(prepared.arguments, case.spoilt)
    except Exception as error:
        return _raised(RAISED, error, "the case could not be made")
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
    untold = device.type == "mps" and expected in case.UNREAD_ON_MPS
    if expected and not untold:
        return Outcome(ACCEPTED, expected, f"it must be refused: {expected}")
    try:
        around = prepared.memory.undisturbed(prepared.written)
        measures = (around,) if untold else (*prepared.judge(results), around)
    except Exception as error:
        return _raised(FAILED, error)
    worst = max(measures, key=lambda measure: measure.share)
    wrong = [measure for measure in measures if not measure.ok]
    if wrong:
        return Outcome(FAILED, max(wrong, key=lambda m: m.share).what, measures=measures)
    return Outcome(PASSED, worst.what, measures=measures)


def _raised(status: str, error: Exception, where: str = "") -> Outcome:
    text = f"{where}: {error}" if where else str(error)
    what = getattr(error, "kind", None) or type(error).__name__
    if status == FAILED or where:  # a mistake of this package: say where it is
        text += "\n" + "".join(traceback.format_tb(error.__traceback__)[-3:])
    return Outcome(status, what, without_paths(f"{type(error).__name__}: {text}"))
