"""Steps as cases: what they leave and return, against float64 and the bits of their caches."""

import torch

from torch_metal_attn.testing import Step, steps

DEFAULTS = {"call": "decode_step", "dtype": "float16", "heads": 4, "kv_heads": 2}
DEFAULTS |= {"head_dim": 64, "v_head_dim": 64, "capacity": 64, "lengths": (13, 20)}


def step(**fields):
    """A step whose queries are as many as its new rows."""
    given = DEFAULTS | fields
    if "length" in fields:
        given.setdefault("q_length", fields["length"])
    return Step(**given)


def check_step(**fields):
    """The step as a problem: faults that the simulator reports are raised, as mutants need them."""
    prepared = steps.prepare(step(**fields), torch.device("cpu"))
    results = prepared.function(**prepared.arguments)
    around = prepared.memory.undisturbed(prepared.written)
    wrong = [measure for measure in (*prepared.judge(results), around) if not measure.ok]
    assert not wrong, wrong
