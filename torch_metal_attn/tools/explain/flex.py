"""Explains a call of `flex_attention`, with the share of skipped blocks."""

import dataclasses
from typing import Any

from torch_metal_attn.flex.attention import planned
from torch_metal_attn.sdpa import NAMES
from torch_metal_attn.tools import costs
from torch_metal_attn.tools.explain.ops import Explanation, explain_op


def explain_flex(*arguments: Any, backward: bool = False, **options: Any) -> Explanation:
    """See `torch_metal_attn.explain`. Traces score_mod and mask_mod."""
    try:
        call = planned(*arguments, **options)
        options = call.options(backward)
    except (IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return Explanation(op="flex_fwd", refusal=str(error))
    explanation = explain_op("flex_fwd", call.operands, options, backward=backward)
    if explanation.refusal is not None:
        return dataclasses.replace(explanation, refusal=NAMES.text(explanation.refusal))
    if call.blocks is None:
        return explanation
    skipped = 1 - costs.listed_share({"k": call.key} | options)
    return dataclasses.replace(
        explanation, reason=f"{skipped:.1%} of the blocks skipped; {explanation.reason}"
    )
