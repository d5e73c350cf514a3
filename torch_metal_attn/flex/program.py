"""A call's score_mod and mask_mod, compiled to texts and the tensors that they index."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.flex.derivative import slope
from torch_metal_attn.flex.graph import Graph, Node
from torch_metal_attn.flex.text import body
from torch_metal_attn.flex.tracing import Captured, trace

# What shaders/params.h has room for.
MAX_CAPTURES = 12
MAX_DIMENSIONS = 24


@dataclass(frozen=True)
class Program:
    """What kernels compute of a score and of its position.

    Attributes: score, mask: the graphs, None where there is nothing to compute. texts: the bodies
        of functions in shaders/flex.h, by the names of the op's options. captured: the tensors that
        they index, in the order of the kernel's buffers, with their names.
    """

    score: Node | None
    mask: Node | None
    texts: dict[str, str]
    captured: Captured

    @property
    def captures(self) -> list[Tensor]:
        return self.captured.tensors


def compiled(
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | None,
    device: torch.device,
) -> Program:
    """Trace the functions, which run once. What they may do is in `tracing.trace`."""
    graph, captured = Graph(), Captured()
    score = mask = None
    if score_mod is not None:
        score = trace("score_mod", score_mod, graph, captured, device)
    if mask_mod is not None:
        mask = trace("mask_mod", mask_mod, graph, captured, device)
    if score is not None and score.op == "input":
        score = None  # score itself
    if mask is not None and mask.op == "constant" and mask.value is True:
        mask = None  # everything is seen
    _check_room(captured)
    ranks = [tensor.dim() for tensor in captured.tensors]
    texts = {}
    if score is not None:
        texts["score"] = body(score, ranks)
        texts["slope"] = body(slope(graph, score), ranks)
    if mask is not None:
        texts["mask"] = body(mask, ranks)
    return Program(score, mask, texts, captured)


def _check_room(captured: Captured) -> None:
    names = ", ".join(captured.names)
    if len(captured.tensors) > MAX_CAPTURES:
        raise ValueError(
            f"score_mod and mask_mod index {len(captured.tensors)} tensors ({names}); Metal has "
            f"buffers for {MAX_CAPTURES}: stack tensors of one shape"
        )
    dimensions = sum(tensor.dim() for tensor in captured.tensors)
    if dimensions > MAX_DIMENSIONS:
        raise ValueError(
            f"score_mod and mask_mod index tensors of {dimensions} dimensions in all ({names}); "
            f"there is room for {MAX_DIMENSIONS}: flatten some"
        )
