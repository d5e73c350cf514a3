"""Runs a case of the self-test. A case that fails or raises gives a result like any other."""

from dataclasses import dataclass

import torch

from torch_metal_attn.runtime.machine import without_paths
from torch_metal_attn.simulator import cache, toolchain
from torch_metal_attn.testing.judge import Measure, Skipped
from torch_metal_attn.tools.verify.cases import Case

PASSED, FAILED, RAISED, SKIPPED = "ok", "FAILED", "raised", "skipped"


@dataclass(frozen=True)
class Result:
    """The result of one case.

    Attributes: status: one of PASSED, FAILED (beyond a bound), RAISED and SKIPPED. measures: empty
        if it raised or was skipped. message: the error, or why it was skipped.
    """

    case: Case
    status: str
    measures: tuple[Measure, ...] = ()
    message: str = ""

    @property
    def worst(self) -> Measure | None:
        """The measure that is nearest to its bound, or furthest beyond it."""
        return max(self.measures, key=lambda measure: measure.share, default=None)

    @property
    def bad(self) -> bool:
        return self.status in (FAILED, RAISED)


def run(case: Case, device: torch.device) -> Result:
    """Raises ToolchainError or CacheError if nothing can be compiled."""
    try:
        measures = tuple(case.run(device))
    except (toolchain.ToolchainError, cache.CacheError):
        raise
    except Skipped as reason:
        return Result(case, SKIPPED, message=without_paths(str(reason)))
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        return Result(case, RAISED, message=without_paths(message))
    status = PASSED if all(measure.ok for measure in measures) else FAILED
    return Result(case, status, measures)
