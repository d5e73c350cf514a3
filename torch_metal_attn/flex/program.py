"""A call's score_mod and mask_mod, compiled to Metal texts and the tensors that they index."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.flex.captured import Captured, loaded_dtype
from torch_metal_attn.flex.derivative import derivative, slope
from torch_metal_attn.flex.graph import Graph, Node, ordered
from torch_metal_attn.flex.text import body, place
from torch_metal_attn.flex.traces import Parts, Unknown
from torch_metal_attn.flex.tracing import POSITIONS, trace
from torch_metal_attn.ops.differentiation import transforming

Mod = Callable[..., Any]
# The sizes of arrays in shaders/params/attention.h.
MAX_CAPTURES = 12
MAX_DIMENSIONS = 24


@dataclass(frozen=True)
class Share:
    """The gradient of one load. text: Metal body of its value. place: that of its index."""

    capture: int
    text: str
    place: str
    owners: int  # bits of `_OWNERS`: the positions that index the load


@dataclass(frozen=True)
class Program:
    """Graphs, which are None for an identity score or a mask that hides no key; texts by option."""

    score: Node | None
    mask: Node | None
    texts: dict[str, str]
    captured: Captured
    shares: tuple[Share, ...] = ()

    @property
    def captures(self) -> list[Tensor]:
        return self.captured.tensors

    def options(self) -> dict[str, Any]:
        """The op's options. Captured tensors without a derivative are detached."""
        shares = self.shares if torch.is_grad_enabled() else ()
        shares = tuple(x for x in shares if self.captures[x.capture].requires_grad)
        differentiated = {x.capture for x in shares}
        captures = [x if i in differentiated else x.detach() for i, x in enumerate(self.captures)]
        captures = [x if x.dtype is loaded_dtype(x) else x.float() for x in captures]
        options: dict[str, Any] = {"captures": captures} | self.texts
        if shares:
            options["shares"] = [x.text for x in shares]
            options["places"] = [x.place for x in shares]
            options["share_captures"] = [x.capture for x in shares]
            options["share_owners"] = [x.owners for x in shares]
        return options


# The bits of Share.owners, equal to FlexOwner in csrc/.
_OWNERS = {name: 1 << i for i, name in enumerate(POSITIONS)}


def _shares(graph: Graph, score: Node, ranks: list[int]) -> tuple[Share, ...]:
    results = []
    for load in list(ordered(score)):
        if load.op != "load" or not load.dtype.is_floating_point:
            continue
        share = derivative(graph, score, load)
        if share.op == "constant" and share.value == 0:
            continue
        owners = {_OWNERS.get(_index(argument).value, 0) for argument in load.args}
        results.append(Share(load.value, body(share, ranks), place(load, ranks), sum(owners)))
    return tuple(results)


def _index(node: Node) -> Node:
    """An index without casts to wider integers, which do not change its value."""
    while node.op == "cast" and node.dtype in (torch.int32, torch.int64):
        (node,) = node.args
    return node


# By key (`Parts`): a program, and the indices in `Parts.tensors` of the tensors that it captures.
_programs: dict[Any, tuple[Program, list[int]]] = {}
_MAX_PROGRAMS = 256


def compiled(score_mod: Mod | None, mask_mod: Mod | None, device: torch.device) -> Program:
    """The functions' program. They are traced again only if a dependency has changed."""
    if transforming():
        from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

        # The meta scalars of a trace must not enter a transform of torch.func.
        with temporarily_clear_interpreter_stack():
            return traced(score_mod, mask_mod, device)
    try:
        parts = Parts(score_mod, mask_mod)
    except Unknown:
        return traced(score_mod, mask_mod, device)
    key = parts.key, device
    known = _programs.get(key)
    if known is not None:
        program, numbers = known
        captured = Captured([parts.tensors[i] for i in numbers], program.captured.names)
        return dataclasses.replace(program, captured=captured)
    program = traced(score_mod, mask_mod, device)
    number_of = {id(x): i for i, x in enumerate(parts.tensors)}
    used = program.captured
    if not used.depends_on_values and all(id(x) in number_of for x in used.tensors):
        if len(_programs) >= _MAX_PROGRAMS:
            _programs.clear()
        # The program is stored without its tensors, so that they can be freed.
        empty = dataclasses.replace(program, captured=Captured([], used.names))
        _programs[key] = empty, [number_of[id(x)] for x in used.tensors]
    return program


def traced(score_mod: Mod | None, mask_mod: Mod | None, device: torch.device) -> Program:
    """Trace the functions by running each once. Raises as `flex_attention`."""
    graph, captured = Graph(), Captured()
    score = mask = None
    if score_mod is not None:
        score = trace("score_mod", score_mod, graph, captured, device)
    if mask_mod is not None:
        mask = trace("mask_mod", mask_mod, graph, captured, device)
    captured.finish()
    if score is not None and score.op == "input":
        score = None  # the result is the score itself
    if mask is not None and mask.op == "constant" and mask.value is True:
        mask = None  # everything is seen
    _check_room(captured)
    ranks = [tensor.dim() for tensor in captured.tensors]
    texts = {}
    shares: tuple[Share, ...] = ()
    if score is not None:
        texts["score"] = body(score, ranks)
        texts["slope"] = body(slope(graph, score), ranks)
        if any(tensor.requires_grad for tensor in captured.tensors):
            shares = _shares(graph, score, ranks)
    if mask is not None:
        texts["mask"] = body(mask, ranks)
    return Program(score, mask, texts, captured, shares)


def _check_room(captured: Captured) -> None:
    names = ", ".join(captured.names)
    if len(captured.tensors) > MAX_CAPTURES:
        raise ValueError(
            f"score_mod and mask_mod index {len(captured.tensors)} tensors ({names}); Metal has "
            f"buffers for {MAX_CAPTURES}: stack tensors of equal shape"
        )
    dimensions = sum(tensor.dim() for tensor in captured.tensors)
    if dimensions > MAX_DIMENSIONS:
        raise ValueError(
            f"score_mod and mask_mod index tensors of {dimensions} dimensions in all ({names}); "
            f"at most {MAX_DIMENSIONS} are supported: flatten some tensors"
        )
