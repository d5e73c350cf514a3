"""The families of cases: how often each is drawn, and the function that prepares its calls."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torch_metal_attn.testing import (
    attention_run,
    cascades,
    copies,
    index_scores,
    merges,
    rotations,
    softmaxes,
    steps,
)
from torch_metal_attn.testing.attention import Attention
from torch_metal_attn.testing.case import Case, Prepared, drawn


class Family(NamedTuple):
    """weight: how often it is drawn; 0 for families that are not drawn."""

    weight: int
    prepare: Callable[[Any, torch.device], Prepared]


FAMILIES: dict[type[Case], Family] = {
    Attention: Family(60, attention_run.prepare),
    steps.Step: Family(15, steps.prepare),
    rotations.Rotation: Family(8, rotations.prepare),
    softmaxes.Softmax: Family(6, softmaxes.prepare),
    merges.Merge: Family(6, merges.prepare),
    index_scores.IndexScores: Family(3, index_scores.prepare),
    cascades.Cascade: Family(2, cascades.prepare),
    copies.Copy: Family(2, copies.prepare_copy),
    copies.Quantised: Family(3, copies.prepare_quantised),
    rotations.Tables: Family(0, rotations.prepare_tables),
}
# Compiling takes longer than running, so cases are variations of a few templates: _TEMPLATES at
# first, and one more per _CASES_PER_TEMPLATE cases.
_TEMPLATES, _CASES_PER_TEMPLATE = 16, 20
_REFUSED = 0.1  # the share of cases that must be refused
_TRIES = 20


def draw(seed: int, index: int) -> Case:
    """Case `index` of a run. It depends only on the two numbers."""
    r = random.Random(f"{seed}/{index}")
    number = r.randrange(_TEMPLATES + index // _CASES_PER_TEMPLATE)
    template = random.Random(f"{seed}/model {number}")  # the text is part of every seed
    weights = [family.weight for family in FAMILIES.values()]
    (family,) = template.choices(list(FAMILIES), weights)
    return vary(draw_of(family, template), r)


def draw_of(family: type[Case], r: random.Random) -> Case:
    """A meaningful case of a family. One case in ten must be refused."""
    fields = drawn(family)
    call = fields.pop("call").draw(r, None)
    while True:
        case = family(call=call)
        for name, how in fields.items():
            if case.has(name) and (how.share == 1 or r.random() < how.share):
                _set(case, name, how.draw(r, case))
        if not case.invalid_reason() and not case.refused():
            return _made_wrong(case, r) if r.random() < _REFUSED else case


def _set(case: Case, name: str, value: Any) -> None:
    """Set a field of a new case in place, because `replace` would take milliseconds."""
    if value is not None:
        object.__setattr__(case, name, value)


def _made_wrong(case: Case, r: random.Random) -> Case:
    kinds = [[{"invalidated": way} for way in case.ways()], case.wrong()]
    kinds = [changes for changes in kinds if changes]
    for _ in range(_TRIES if kinds else 0):
        bad = dataclasses.replace(case, **r.choice(r.choice(kinds)))
        if not bad.invalid_reason() and bad.refused():
            return bad
    return case


def vary(case: Case, r: random.Random) -> Case:
    """The case with other values, lengths and limits."""
    for _ in range(_TRIES):
        varied = dataclasses.replace(case)
        for name, how in drawn(type(case)).items():
            is_drawn = how.share == 1 or name in case.fields()
            if how.varied and is_drawn and varied.has(name):
                _set(varied, name, how.draw(r, varied))
        if not varied.invalid_reason() and bool(varied.refused()) == bool(case.refused()):
            return varied
    return dataclasses.replace(case, seed=r.randrange(2**31))
