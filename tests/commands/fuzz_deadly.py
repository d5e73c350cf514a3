"""Cases that end or block their process, for tests of the watcher of `fuzz`."""

import os
import time
from dataclasses import dataclass

from torch_metal_attn.testing import Quantised
from torch_metal_attn.testing.case import Case
from torch_metal_attn.testing.families import FAMILIES, Family


@dataclass(frozen=True)
class Deadly(Case):
    """call: "dies" or "hangs"."""

    def __reduce__(self):
        return received, (self.call,)


def received(call):
    """Unpickle a case in another process, and register its family there."""
    FAMILIES[Deadly] = Family(0, prepare)
    return Deadly(call=call)


def prepare(case, device):
    if case.call == "dies":
        os._exit(7)
    time.sleep(600)


def draw(seed, index):
    return (Deadly(call="dies"), Quantised(seed=seed), Deadly(call="hangs"))[index % 3]
