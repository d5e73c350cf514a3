"""Runs the self-test's cases: one that fails, or raises, does not hide the others."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from torch_metal_attn.machine import without_paths
from torch_metal_attn.self_test.cases import Case
from torch_metal_attn.self_test.measure import Measure, Skipped
from torch_metal_attn.simulator import cache, toolchain

PASSED, FAILED, RAISED, SKIPPED = "ok", "FAILED", "raised", "skipped"


@dataclass(frozen=True)
class Result:
    """What became of a case.

    Attributes: status: one of PASSED, FAILED (beyond a bound), RAISED and SKIPPED. measures: none
        if it raised or was skipped. message: of the error, or why it was skipped.
    """

    case: Case
    status: str
    measures: tuple[Measure, ...] = ()
    message: str = ""

    @property
    def worst(self) -> Measure | None:
        """The measure that is nearest to its bound, or furthest beyond."""
        return max(self.measures, key=lambda measure: measure.share, default=None)

    @property
    def bad(self) -> bool:
        return self.status in (FAILED, RAISED)


def run(cases: Iterable[Case], device: torch.device) -> Iterator[Result]:
    """Each case's result, as it comes. Raises ToolchainError or CacheError: nothing can compile."""
    for case in cases:
        try:
            measures = tuple(case.run(device))
        except (toolchain.ToolchainError, cache.CacheError):
            raise
        except Skipped as reason:
            yield Result(case, SKIPPED, message=without_paths(str(reason)))
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            yield Result(case, RAISED, message=without_paths(message))
        else:
            status = PASSED if all(measure.ok for measure in measures) else FAILED
            yield Result(case, status, measures)
