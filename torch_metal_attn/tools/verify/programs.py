"""How many programs Metal compiles for cases of `verify --full`, counted without running any."""

from collections.abc import Iterable

import torch

from torch_metal_attn.simulator import simulate
from torch_metal_attn.testing.families import FAMILIES
from torch_metal_attn.testing.running import settings_of
from torch_metal_attn.tools.verify.cases import Listed


def counted(cases: Iterable[Listed]) -> list[int]:
    """How many programs are needed up to and with each case.

    Nearly those of mps: an address or a trial there may choose another program.
    """
    known = set()
    counts = []
    for listed in cases:
        case = listed.case
        try:
            with settings_of(case), simulate(record=True) as run:
                prepared = FAMILIES[type(case)].prepare(case, torch.device("cpu"))
                prepared.function(**prepared.arguments)
        except Exception:  # a refusal, which is the case's own, or no memory
            pass
        known |= {(one.family, one.kernel, *sorted(one.defines.items())) for one in run.recorded}
        counts.append(len(known))
    return counts
