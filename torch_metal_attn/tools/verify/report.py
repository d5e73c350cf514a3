"""The Markdown report of `verify --full`, to be attached to an issue."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch_metal_attn.testing.judge import Measure
from torch_metal_attn.testing.running import SKIPPED, Outcome
from torch_metal_attn.testing.storage import snippet
from torch_metal_attn.tools import text_table
from torch_metal_attn.tools.verify.cases import Listed
from torch_metal_attn.wording import count_text

_FAMILY = ("family", "cases", "failed", "worst share", "of", "in")
_MESSAGE_LINES = 60  # of one error: a compiler's log can have hundreds


class Result(NamedTuple):
    """A listed case and its outcome."""

    case: Listed
    outcome: Outcome


def markdown(
    results: Sequence[Result], cases: Sequence[Listed], machine: dict[str, str], seconds: float
) -> str:
    """The report. If there are fewer results than cases, the run did not finish."""
    bad = [result for result in results if not result.outcome.ok]
    skipped = [result for result in results if result.outcome.status == SKIPPED]
    passed = len(results) - len(bad) - len(skipped)
    counts = [f"{len(bad)} failed" if bad else "No failures", f"{passed} passed"]
    counts += [f"{len(skipped)} skipped"] if skipped else []
    lines = ["# torch_metal_attn: verify --full", "", f"**{', '.join(counts)}**", ""]
    if len(results) < len(cases):
        case = cases[len(results)]
        lines += [f"The run ended after {len(results)} of {len(cases)} cases, in this case:", ""]
        lines += [f"{case} ({case.dtype})", ""]
    lines += [*text_table.markdown(("", ""), machine.items()), ""]
    lines += [
        "Errors are against float64. A bound is twice the error of torch's own attention in the",
        "same dtype on the same problem, plus the rounding of the result. The worst share is the",
        "largest error divided by its bound. Caches and repeated runs are compared bit for bit.",
        "",
        *text_table.markdown(_FAMILY, _family_rows(results), numbers=(1, 2, 3)),
        "",
    ]
    if bad:
        lines += ["## Failures", ""]
        for result in bad:
            lines += _failure(result)
    if skipped:
        lines += ["## Skipped", ""]
        lines += [f"- {r.case} ({r.case.dtype}): {r.outcome.message}" for r in skipped]
        lines.append("")
    lines.append(f"{count_text(len(results), 'case')} in {seconds:.0f} s, compilation included.")
    return "\n".join(lines) + "\n"


def _family_rows(results: Sequence[Result]) -> Iterator[list[Any]]:
    families: dict[str, list[Result]] = {}
    for result in results:
        families.setdefault(result.case.family, []).append(result)
    for family, members in families.items():
        failed = sum(not member.outcome.ok for member in members)
        measured = [(member, m) for member in members for m in member.outcome.measures]
        cells = ["-", "-", "-"]
        if measured:
            member, worst = max(measured, key=lambda pair: pair[1].share)
            words = f"{member.case.dtype}, {member.case.words}"
            cells = [share_text(worst), worst.what, words]
            if worst.error == 0:
                cells[1:] = ["every bit", "all"]
        yield [family, len(members), failed, *cells]


def share_text(measure: Measure) -> str:
    """The error divided by the bound, such as 0.43, or the bytes that differ if the bound is 0."""
    if measure.bound == 0:
        return "0" if measure.error == 0 else count_text(round(measure.error), "byte")
    return f"{measure.share:.2f}" if measure.share < 1e4 else f"{measure.share:.1e}"


def _failure(result: Result) -> list[str]:
    case, outcome = result
    lines = [f"### {case} ({case.dtype})", ""]
    if outcome.message:
        text = outcome.message.splitlines()
        left_out = len(text) - _MESSAGE_LINES
        lines += ["```", *text[:_MESSAGE_LINES]]
        lines += [f"... {left_out} more lines"] if left_out > 0 else []
        lines += ["```", ""]
    if outcome.measures:
        rows = (
            (m.what, f"{m.error:.2e}", f"{m.bound:.2e}", "ok" if m.ok else "FAILED")
            for m in outcome.measures
        )
        headings = ("result", "error", "bound", "")
        lines += [*text_table.markdown(headings, rows, numbers=(1, 2)), ""]
    return [*lines, "```python", *snippet(case.case).splitlines(), "```", ""]
