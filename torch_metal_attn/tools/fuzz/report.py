"""The results of a run: a JSON file whose failures can be replayed, and texts for the terminal."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_metal_attn.simulator.exit_status import BadRequest
from torch_metal_attn.testing.case import Case
from torch_metal_attn.testing.storage import from_json, outcome_to_json, snippet, to_json
from torch_metal_attn.tools.fuzz.workers import Ran
from torch_metal_attn.wording import count_text


@dataclass
class Report:
    """The results for a seed. ran: the number of cases by family and call."""

    machine: dict[str, str]
    seed: int
    ran: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    failures: list[Ran] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, ran: Ran) -> None:
        self.ran[f"{type(ran.case).__name__} {ran.case.call}"] += 1
        self.refused += bool(ran.case.refused())
        if not ran.outcome.ok:
            self.failures.append(ran)

    def news_of(self, ran: Ran) -> str:
        """The text of an added failure, or the number of the earlier case that it repeats."""
        shrunk = ran.shrunk and ran.shrunk[0]
        for earlier in self.failures:
            if earlier is not ran and shrunk and earlier.shrunk and earlier.shrunk[0] == shrunk:
                return f"case {ran.index}: the same failure as case {earlier.index}"
        return failure_text(ran)

    @property
    def summary(self) -> str:
        if not self.ran:
            return f"no case ended within {self.seconds:.0f} s"
        cases = f"{count_text(self.ran.total(), 'case')} ran in {self.seconds:.0f} s"
        return f"{cases}, seed {self.seed}: {len(self.failures) or 'none'} failed"

    def write(self, path: Path) -> None:
        data = {
            "machine": self.machine,
            "seed": self.seed,
            "cases": self.ran.total(),
            "of_which_must_be_refused": self.refused,
            "seconds": round(self.seconds, 1),
            "cases_by_call": dict(sorted(self.ran.items())),
            "failures": [_failure(ran) for ran in self.failures],
        }
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _failure(ran: Ran) -> dict[str, Any]:
    case, outcome = ran.shrunk or (ran.case, ran.outcome)
    return {
        "case": to_json(case),
        "python": snippet(case),
        **outcome_to_json(outcome),
        "drawn_as": {"index": ran.index, **to_json(ran.case)},
    }


class BadReport(BadRequest):
    """The file is not a report; the message says why."""


def read(path: Path) -> list[Case]:
    """The failures in a report. Raises OSError and BadReport."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or "failures" not in data:
            raise BadReport(f"{path} is not a report of fuzz: it is not an object with failures")
        cases = [from_json(failure["case"]) for failure in data["failures"]]
    except BadReport:
        raise
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise BadReport(f"{path} is not a report of fuzz that can be replayed: {reason}") from None
    if not cases and not data.get("cases"):
        raise BadReport(f"{path} is the report of a run in which no case ended")
    return cases


def failure_text(ran: Ran) -> str:
    """A failure for the terminal: its errors, and Python code that reproduces it."""
    case, outcome = ran.shrunk or (ran.case, ran.outcome)
    lines = [f"case {ran.index} {outcome.status}: {outcome.what}"]
    lines += outcome.message.splitlines()[:12]
    lines += [
        f"{m.what}: error {m.error:.2e}, bound {m.bound:.2e}" for m in outcome.measures if not m.ok
    ]
    return "\n".join([*lines, "", *(f"    {line}" for line in snippet(case).splitlines()), ""])
