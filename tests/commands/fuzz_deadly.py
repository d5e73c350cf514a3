"""Cases that end their process, for the watcher of `fuzz`."""

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
    """A case after it was sent to a process, in which its family is registered."""
    FAMILIES[Deadly] = Family(0, prepare)
    return Deadly(call=call)


def prepare(case, device):
    if case.call == "dies":
        os._exit(7)
    time.sleep(600)


def draw(seed, index):
    return (Deadly(call="dies"), Quantised(seed=seed), Deadly(call="hangs"))[index % 3]
