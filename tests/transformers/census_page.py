"""The pages of census.py: a summary by outcome, and a table of the classes of each model type."""

import re
import subprocess
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile

import transformers

OUTCOMES = (
    "wrong",
    "equal",
    "equal, not sensitive",
    "partly refused",
    "refused",
    "not built small",
)
# Ways that are shown by one word where a class has all of them.
_WAYS = {
    "padded": {"mask of ones", "padded left", "padded right"},
    "generate": {"dynamic cache", "static cache"},
}


@dataclass
class Entry:
    """A class and its outcome. ways: the largest difference, or the reason of a refusal."""

    model_type: str
    kind: str
    ways: dict[str, float | str] = field(default_factory=dict)
    calls: int = 0
    refused: str = ""
    not_small: str = ""
    faults: list[str] = field(default_factory=list)
    dull: bool = False  # 2 percent in the scale of the scores do not show

    @property
    def outcome(self) -> str:
        if self.faults:
            return "wrong"
        if self.refused or self.not_small:
            return "refused" if self.refused else "not built small"
        if any(isinstance(apart, str) for apart in self.ways.values()):
            return "partly refused"
        return "equal, not sensitive" if self.dull else "equal"


def _by_outcome(entries: list[Entry]) -> dict[str, list[Entry]]:
    groups: dict[str, list[Entry]] = defaultdict(list)
    for entry in sorted(entries, key=lambda one: (one.model_type, one.kind)):
        groups[entry.outcome].append(entry)
    return groups


def summary(entries: list[Entry], total: int, tolerance: float) -> str:
    """The census as a page that a person reads: counts, and the model types of each outcome."""
    groups = _by_outcome(entries)
    commit = ["git", "log", "-1", "--format=%h of %cs"]
    made = subprocess.run(commit, capture_output=True, text=True, check=True).stdout.strip()
    lines = [
        *_counts(entries, total, tolerance),
        "",
        f"Made at {made}. `make census` writes a row for each class to build/census.md.",
        "A model type is under each outcome that one of its classes has; those that are under none",
        "are equal in all classes. The advice of a refusal was followed, and its answer compared;",
        "none: load the model as it is.",
    ]
    for name in OUTCOMES:
        if groups[name] and name not in ("equal", "refused"):
            lines += ["", f"## {name.capitalize()}", "", *_model_types(groups[name])]
        for (reason, advised), refused in _refused_for(groups[name], name == "refused").items():
            number = f"{len(refused)} class" + "es" * (len(refused) > 1)
            lines += ["", f"## Refused: {reason}", ""]
            lines += [f"{number}; the refusal advises: {advised}", "", *_model_types(refused)]
    return "\n".join(lines) + "\n"


def _refused_for(entries: list[Entry], are_refused: bool) -> dict[tuple[str, str], list[Entry]]:
    """The refused classes by reason and advice, most first."""
    groups: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    for entry in entries if are_refused else ():
        groups[_reason(entry).split(",")[0], next(advice([entry]))].append(entry)
    return dict(sorted(groups.items(), key=lambda pair: -len(pair[1])))


def _model_types(entries: list[Entry]) -> list[str]:
    names = ", ".join(dict.fromkeys(entry.model_type for entry in entries))
    return textwrap.wrap(names, 138, break_on_hyphens=False)


def tables(entries: list[Entry], total: int, tolerance: float) -> str:
    """The census as a page for looking up: counts, then a table for each outcome."""
    groups = _by_outcome(entries)
    lines = [*_counts(entries, total, tolerance), "", *_legend()]
    for name in OUTCOMES:
        if not groups[name]:
            continue
        lines += ["", f"## {name.capitalize()}", ""]
        if name == "refused":
            lines += _refusals(groups[name])
        elif name == "not built small":
            lines += _table(groups[name], "reason", lambda entry: entry.not_small, lambda _: ())
        else:
            lines += _table(
                groups[name], "ways | least calls | difference | notes", _ways, _numbers
            )
    return "\n".join(lines) + "\n"


def _legend() -> list[str]:
    return [
        "Differences are the largest of all ways. A row holds the classes of one model type that",
        "have the same outcome, without the beginning that their names share. The advice of a",
        "refusal was followed, and its answer compared; none: load the model as it is.",
    ]


def _counts(entries: list[Entry], total: int, tolerance: float) -> list[str]:
    groups = _by_outcome(entries)
    return [
        f"# Census of transformers {transformers.__version__} (`make census`)",
        "",
        "Tiny random models of every class in transformers' auto mappings, with enlarged weights,",
        "against their own eager attention on the CPU in float32. Ways: unpadded (no mask), padded",
        "(a mask of ones, padding on the left, padding on the right; sounds on the right only) and",
        "generate (a dynamic and a static cache, padded left). A model is not sensitive if scores",
        f"that are off by 2 % change its answer by less than {tolerance:g} of its largest number.",
        "",
        f"{len(entries)} of {total} classes were examined.",
        "",
        "| outcome | classes | model types with such a class |",
        "| --- | --- | --- |",
        *(
            f"| {name} | {len(groups[name])} | {len({e.model_type for e in groups[name]})} |"
            for name in OUTCOMES
        ),
        f"| all | {len(entries)} | {len({entry.model_type for entry in entries})} |",
    ]


def _table(
    entries: list[Entry],
    columns: str,
    told: Callable[[Entry], str],
    numbers: Callable[[list[Entry]], Iterator[str] | tuple[()]],
) -> Iterator[str]:
    """A row for the classes of a model type of which the same is told."""
    yield f"| model type | classes | {columns} |"
    yield "| --- " * (columns.count("|") + 3) + "|"
    rows: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    for entry in entries:
        rows[entry.model_type, told(entry)].append(entry)
    for (model_type, text), same in rows.items():
        cells = (model_type, _names(same), text, *numbers(same))
        yield f"| {' | '.join(map(_cell, cells))} |"


def _refusals(entries: list[Entry]) -> Iterator[str]:
    """A table for each reason, without the names in it, and what the refusal advises instead."""
    reasons: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        reasons[_reason(entry)].append(entry)
    for reason, refused in sorted(reasons.items(), key=lambda pair: -len(pair[1])):
        yield from (f"### The class, or a part of it, {reason.split(',')[0]} ({len(refused)})", "")
        if "," in reason:
            yield from (f"It {reason}.", "")
        yield from _table(refused, "part | advice", _refused_part, advice)
        yield ""


def _reason(entry: Entry) -> str:
    """Why a class is refused, without the names in it."""
    reason = re.sub(r"^\w+( at '[^']*')? (\([^)]*\) )?", "", entry.refused).split(". ")[0]
    return re.sub(r"\b[A-Z0-9_]+_CLASSES\b", "a table", reason)


def _refused_part(entry: Entry) -> str:
    """The part that is refused and where it is; empty for the class itself."""
    part = re.match(r"\w+( at '[^']*')?", entry.refused)
    return part[0] if part and part[0] != entry.kind else ""


def advice(entries: list[Entry]) -> Iterator[str]:
    """The attention that runs the classes, as their refusals say."""
    named = {
        "sdpa_replaced()" if "sdpa_replaced()" in entry.refused else name
        for entry in entries
        for name in re.findall(r'attn_implementation="(\w+)"', entry.refused) or ["none"]
    }
    yield ", ".join(sorted(named))


def _names(entries: list[Entry]) -> str:
    """The classes' names without what they share, up to a capital letter."""
    names = [entry.kind for entry in entries]
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    shared = "".join(letters[0] for letters in same) if len(names) > 1 else ""
    while shared and not all(re.match(r"[A-Z]", name[len(shared) :] or "A") for name in names):
        shared = shared[:-1]
    shared = shared.removesuffix("For")
    if not shared:
        return ", ".join(names)
    return f"{shared}: {', '.join(name.removeprefix(shared) or shared for name in names)}"


def _ways(entry: Entry) -> str:
    equal = {way for way, apart in entry.ways.items() if isinstance(apart, float)}
    for name, all_of_them in _WAYS.items():
        if all_of_them <= equal:
            equal = equal - all_of_them | {name}
    return ", ".join(sorted(equal, key=["unpadded", *_WAYS, *entry.ways].index))


def _numbers(entries: list[Entry]) -> Iterator[str]:
    yield str(min(entry.calls for entry in entries))
    apart = [a for entry in entries for a in entry.ways.values() if isinstance(a, float)]
    yield f"{max(apart):.1e}" if apart else ""
    notes = [
        note
        for entry in entries
        for note in (
            *entry.faults,
            *(f"{way}: {why}" for way, why in entry.ways.items() if isinstance(why, str)),
        )
    ]
    yield "; ".join(dict.fromkeys(notes))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")[:400]
