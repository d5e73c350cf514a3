"""Draws calls of every public op and function, runs them and checks the results: docs/numerics.md.

A case is one call as plain data. `check` runs it on this machine's best device and compares the
result with float64, or expects an error where the documentation promises one.
"""

from torch_metal_attn.runtime.device import best_device
from torch_metal_attn.testing.attention import Attention
from torch_metal_attn.testing.cascades import Cascade
from torch_metal_attn.testing.case import Case
from torch_metal_attn.testing.copies import Copy, Quantised
from torch_metal_attn.testing.index_scores import IndexScores
from torch_metal_attn.testing.merges import Merge
from torch_metal_attn.testing.rotations import Rotation, Tables
from torch_metal_attn.testing.running import Outcome, run
from torch_metal_attn.testing.softmaxes import Softmax
from torch_metal_attn.testing.steps import Step

__all__ = [
    "Attention",
    "Cascade",
    "Copy",
    "IndexScores",
    "Merge",
    "Quantised",
    "Rotation",
    "Softmax",
    "Step",
    "Tables",
    "check",
]


def check(case: Case) -> Outcome:
    """The outcome of a case: on mps, or in the simulator with every check.

    Raises ValueError if no call can be made from its fields.
    """
    if reason := case.invalid_reason():
        raise ValueError(f"{case}: {reason}")
    with best_device(check=True) as device:
        return run(case, device)
