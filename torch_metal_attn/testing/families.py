"""The families of cases: what draws each case and what makes it a call."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torch_metal_attn.testing import (
    attention_draw,
    attention_run,
    copies,
    merges,
    rotations,
    softmaxes,
    steps,
)
from torch_metal_attn.testing.attention import Attention
from torch_metal_attn.testing.case import Case, Prepared


class Family(NamedTuple):
    """weight: how often it is drawn; 0 for families of listed cases alone."""

    weight: int
    draw: Callable[[random.Random], Any] | None
    vary: Callable[[Any, random.Random], Any] | None
    prepare: Callable[[Any, torch.device], Prepared]


FAMILIES: dict[type[Case], Family] = {
    Attention: Family(60, attention_draw.draw, attention_draw.vary, attention_run.prepare),
    steps.Step: Family(15, steps.draw, steps.vary, steps.prepare),
    rotations.Rotation: Family(8, rotations.draw, rotations.vary, rotations.prepare),
    softmaxes.Softmax: Family(6, softmaxes.draw, softmaxes.vary, softmaxes.prepare),
    merges.Merge: Family(6, merges.draw, merges.vary, merges.prepare),
    copies.Copy: Family(2, copies.draw_copy, copies.vary_copy, copies.prepare_copy),
    copies.Quantised: Family(
        3, copies.draw_quantised, copies.vary_quantised, copies.prepare_quantised
    ),
    rotations.Tables: Family(0, None, None, rotations.prepare_tables),
}
# Compiling takes longer than running, so cases are variations of a few models: of _MODELS at first,
# and of one more for every _CASES_OF_A_MODEL cases.
_MODELS, _CASES_OF_A_MODEL = 16, 20


def draw(seed: int, index: int) -> Case:
    """Case `index` of a run. It depends only on the two numbers, not on who runs it."""
    r = random.Random(f"{seed}/{index}")
    model = random.Random(f"{seed}/model {r.randrange(_MODELS + index // _CASES_OF_A_MODEL)}")
    weights = [family.weight for family in FAMILIES.values()]
    (family,) = model.choices(list(FAMILIES.values()), weights)
    assert family.draw is not None
    assert family.vary is not None
    case: Case = family.vary(family.draw(model), r)
    return case
