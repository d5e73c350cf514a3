"""Cases of attention as data, and the check of their results by the policy of docs/numerics.md."""

import dataclasses

from torch_metal_attn import testing
from torch_metal_attn.testing import Attention
from torch_metal_attn.testing.attention import OPS

HOME = 16  # the default head dim of tests, so that they share compiled kernels
FORWARD = {"backward": False, "through_lse": False}
SIZES = {"batch": 2, "heads": 4, "kv_heads": 2, "q_length": 77, "kv_length": 101}
LENGTHS = {"seqused_k": (90, 70), "leftpad_k": (7, 40)}
SCORES = {"softcap": 1.5, "softmax_scale": 0.5, "learnable_sink": "float32", "dropout_p": 0.3}
PACKED = {"heads": 4, "kv_heads": 2, "q_length": 1, "kv_length": 1, "causal": True}
PACKED |= {"packed": ((40, 50), (0, 3), (77, 64)), "spare_rows": 9, "call": "flash_varlen_fwd"}


def rotated(columns, interleaved=False):
    rotary = {"rotary": "qk", "rotary_columns": columns, "rotary_interleaved": interleaved}
    return rotary | {"rotary_by_sequence": True}


def case(**fields):
    """A float16 case with odd lengths. Its gradients are checked unless `fields` has FORWARD."""
    arguments = {"dtype": "float16", "heads": 2, "q_length": 33, "kv_length": 65, "head_dim": HOME}
    arguments |= fields
    arguments.setdefault("v_head_dim", arguments["head_dim"])
    problem = Attention(strict=True, **arguments)
    if problem.differentiable and "backward" not in fields:
        problem = dataclasses.replace(problem, backward=True, through_lse=problem.call in OPS)
    return problem


def hold(cases, device):
    wrong = []
    for problem in cases:
        assert not problem.invalid_reason(), f"{problem}: {problem.invalid_reason()}"
        outcome = testing.run(problem, device)
        if outcome.status != "ok":
            wrong.append(f"{problem}: {outcome.status}: {outcome.message or outcome.worst}")
    assert not wrong, "\n".join([f"{len(wrong)} of {len(cases)} cases failed:", *wrong])
