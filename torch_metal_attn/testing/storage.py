"""Converts cases and outcomes to JSON, and a case to Python code."""

import dataclasses
from typing import Any

from torch_metal_attn.testing.case import Case
from torch_metal_attn.testing.families import FAMILIES
from torch_metal_attn.testing.running import Outcome
from torch_metal_attn.wording import value_text

_BY_NAME = {family.__name__: family for family in FAMILIES}


def to_json(case: Case) -> dict[str, Any]:
    return {"family": type(case).__name__, **case.fields()}


def from_json(data: dict[str, Any]) -> Case:
    """Read a case. Raises ValueError if the data are not a case."""
    fields = dict(data)
    name = fields.pop("family", None)
    if name not in _BY_NAME:
        raise ValueError(f"family is {value_text(name)}; it must be one of {', '.join(_BY_NAME)}")
    known = {field.name for field in dataclasses.fields(_BY_NAME[name])}
    unknown = sorted(set(fields) - known)
    if unknown:
        raise ValueError(f"{name} has no {', '.join(unknown)}: another version wrote the file")
    case = _BY_NAME[name](**{n: _tuples(x) for n, x in fields.items()})
    if case.invalid_reason():
        raise ValueError(f"{case}: {case.invalid_reason()}")
    return case


def _tuples(value: Any) -> Any:
    return tuple(_tuples(x) for x in value) if isinstance(value, list) else value


def outcome_to_json(outcome: Outcome) -> dict[str, Any]:
    """An outcome for people. It is not read back."""
    rows = [
        {"what": m.what, "error": m.error, "bound": m.bound} for m in outcome.measures if not m.ok
    ]
    kept = {"status": outcome.status, "what": outcome.what, "message": outcome.message}
    return kept | {"beyond_their_bounds": rows}


def snippet(case: Case) -> str:
    return f"from torch_metal_attn import testing\n\nprint(testing.check(testing.{case}))\n"
