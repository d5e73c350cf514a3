"""flex_attention inside a graph of torch.compile.

Dynamo traces score_mod and mask_mod into graphs and turns captured tensors into inputs, as
for torch's own higher-order operator. When these graphs run, this module traces them into Metal
texts, so AOTAutograd and Inductor see a call of the op with these texts.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator

from torch_metal_attn.flex.call import plan
from torch_metal_attn.ops.flex import LISTS
from torch_metal_attn.runtime.refusals import untraced

_BLOCK_SIZES = ("BLOCK_SIZE", "seq_lengths")


def _identity(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score


def _on_float32(score_mod: Callable[..., Any]) -> Callable[..., Any]:
    """score_mod on the score as float32; Dynamo passes it in query's dtype."""

    def mod(score: Tensor, *position: Tensor) -> Any:
        return score_mod(score.float(), *position)

    return mod


def _everything(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return b.new_ones((), dtype=torch.bool)


class _FlexAttention(HigherOrderOperator):
    """The operator in a graph of Dynamo, which calls the op without dispatch."""

    def __init__(self) -> None:
        super().__init__("torch_metal_attn_flex")
        # Dynamo finds the tracing rule by this name, and FX finds the function by its module.
        self.__name__ = "flex_attention"
        self.__module__ = __name__

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Callable[..., Any],
        block_mask: tuple[Any, ...],
        scale: float | None,
        options: dict[str, Any],
        score_captures: tuple[Any, ...] = (),
        mask_captures: tuple[Any, ...] = (),
    ) -> tuple[Tensor, Tensor]:
        *lists, mask_mod = block_mask

        def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score_mod(score, b, h, q_idx, kv_idx, *score_captures)

        def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return mask_mod(b, h, q_idx, kv_idx, *mask_captures)

        blocks = None
        if lists:
            named = dict(zip((*_BLOCK_SIZES, *LISTS), lists, strict=True))
            blocks = SimpleNamespace(**named, mask_mod=mask)
        return _launch(query, key, value, score, blocks, scale, **options)


_flex_attention = _FlexAttention()


@untraced
def _launch(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Call the op, untraced: after a graph break Dynamo would trace this library's code."""
    call = plan(*arguments, **options)
    return call.launch(call.options())


def attend(
    operands: tuple[Tensor, Tensor, Tensor],
    score_mod: Callable[..., Any] | None,
    block_mask: Any,
    scale: float | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    blocks: tuple[Any, ...] = (_everything,)
    if block_mask is not None:
        lists = tuple(getattr(block_mask, name) for name in (*_BLOCK_SIZES, *LISTS))
        blocks = (*lists, block_mask.mask_mod)
    score = _identity if score_mod is None else _on_float32(score_mod)
    return _flex_attention(*operands, score, blocks, scale, options)
