"""The page of census.py: counts, and the model types of each outcome."""

import re
import subprocess
import textwrap
from collections import defaultdict
from dataclasses import dataclass, field

import transformers

OUTCOMES = (
    "wrong",
    "equal",
    "equal, not sensitive",
    "partly refused",
    "refused",
    "not built small",
)


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
        f"Made at {made}. `make census` writes what it found of each class to build/census.jsonl.",
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
        groups[_reason(entry).split(",")[0], advice(entry)].append(entry)
    return dict(sorted(groups.items(), key=lambda pair: -len(pair[1])))


def _model_types(entries: list[Entry]) -> list[str]:
    names = ", ".join(dict.fromkeys(entry.model_type for entry in entries))
    return textwrap.wrap(names, 138, break_on_hyphens=False)


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


def _reason(entry: Entry) -> str:
    """Why a class is refused, without the names in it."""
    reason = re.sub(r"^\w+( at '[^']*')? (\([^)]*\) )?", "", entry.refused).split(". ")[0]
    return re.sub(r"\b[A-Z0-9_]+_CLASSES\b", "a table", reason)


def advice(entry: Entry) -> str:
    """The attention that runs the class, as its refusal says."""
    if "sdpa_replaced()" in entry.refused:
        return "sdpa_replaced()"
    named = re.findall(r'attn_implementation="(\w+)"', entry.refused)
    return ", ".join(sorted(set(named))) or "none"
