"""What a call of `flex_attention` would run: the texts, and how many blocks are skipped."""

import dataclasses
from typing import Any

from torch_metal_attn.flex.attention import planned
from torch_metal_attn.sdpa import NAMES
from torch_metal_attn.tools import costs
from torch_metal_attn.tools.explain.ops import Explanation, explain_op


def explain_flex(*arguments: Any, backward: bool = False, **options: Any) -> Explanation:
    """`torch_metal_attn.explain` of `flex_attention`. The functions are traced."""
    try:
        call = planned(*arguments, **options)
        given = call.options(backward)
    except (IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return Explanation(op="flex_fwd", refusal=str(error))
    found = explain_op("flex_fwd", call.operands, given, backward=backward)
    if found.refusal is not None:
        return dataclasses.replace(found, refusal=NAMES.text(found.refusal))
    if call.blocks is None:
        return found
    skipped = 1 - costs.listed_share({"k": call.key} | given)
    return dataclasses.replace(found, reason=f"{skipped:.1%} of the blocks skipped; {found.reason}")
