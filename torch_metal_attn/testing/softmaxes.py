"""Cases of softmax, softmax_ and apply_causal_mask_, and their gradients."""

import dataclasses
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from torch_metal_attn.testing import spoiling, tensors
from torch_metal_attn.testing.case import Case, Prepared, shorter
from torch_metal_attn.testing.judge import (
    ROUNDING,
    Measure,
    near,
    normal,
    same_bits,
    worst_of,
)
from torch_metal_attn.testing.tensors import Layout, Memory, dtype_of, numbers

_CALLS = ("softmax", "softmax_", "apply_causal_mask_")
_LAYOUTS: tuple[Layout, ...] = ((), ("padded 3",), ("order 10",), ("order 10", "padded 5"))


@dataclass(frozen=True)
class Softmax(Case):
    """A softmax along a dimension of a tensor, or scores with a causal mask.

    Attributes: hidden: the share of -inf. q_offset: for apply_causal_mask_.
    """

    call: str = "softmax"
    shape: tuple[int, ...] = (1,)
    dim: int = -1
    q_offset: int = 0
    hidden: float = 0.0
    backward: bool = False
    values: str = "normal"
    layout: Layout = ()

    WAYS: ClassVar[tuple[str, ...]] = spoiling.ways(("x",), ())

    def meaningless(self) -> str:
        if self.layout and len(self.shape) < 2:
            return "one dimension has one order"
        if self.backward and self.call != "softmax":
            return "gradients are of what is not in place"
        if self.call == "apply_causal_mask_" and (self.dim != -1 or len(self.shape) < 2):
            return "a mask has two dimensions"
        if self.call != "apply_causal_mask_" and self.q_offset:
            return "softmax has no offset"
        if self.spoilt and (self.spoilt != "dtype of x" or self.call == "apply_causal_mask_"):
            return "what is spoilt is not there"
        return ""

    def refused(self) -> str:
        if not -len(self.shape) <= self.dim < len(self.shape):
            return "a dimension that is not there"
        return super().refused()

    def smaller(self) -> Iterator["Softmax"]:
        for shape in shorter(self.shape):
            yield dataclasses.replace(self, shape=shape)
        for i in range(len(self.shape)):
            if len(self.shape) > 1:
                yield dataclasses.replace(self, shape=self.shape[:i] + self.shape[i + 1 :])


def draw(r: random.Random) -> Softmax:
    """Any meaningful case. A few must be refused."""
    while True:
        call = r.choice(_CALLS)
        shape = tuple(
            r.choice((0, 1, 2, 3, 7, 33, 65, 300) if i else (1, 2, 5, 33, 1500))
            for i in range(r.choice((1, 2, 2, 3, 4)))
        )
        if math.prod(shape) > 30000:
            continue
        rank = len(shape)
        case = Softmax(
            call=call,
            seed=r.randrange(2**31),
            spoilt="dtype of x" if r.random() < 0.04 else "",
            dtype=r.choice(tensors.DTYPES),
            shape=shape,
            dim=r.choice((-1, -1, r.randrange(-rank, rank), rank + (r.random() < 0.3) - 1)),
            q_offset=r.randint(-40, 40),
            hidden=r.choice((0.0, 0.0, 0.3, 1.0)),
            backward=r.random() < 0.3,
            values=r.choice((*tensors.KINDS, "normal", "normal")),
            layout=r.choice(_LAYOUTS),
        )
        if call == "apply_causal_mask_":
            case = dataclasses.replace(case, dim=-1)
        else:
            case = dataclasses.replace(case, q_offset=0)
        if not case.meaningless():
            return case


def vary(case: Softmax, r: random.Random) -> Softmax:
    """Other values."""
    values = r.choice((*tensors.KINDS, "normal"))
    return dataclasses.replace(case, seed=r.randrange(2**31), values=values)


def prepare(case: Softmax, device: torch.device) -> Prepared:
    """The call. Rows in which everything is -inf give 0."""
    memory = Memory(device)
    x = numbers(*case.shape, kind=case.values, seed=case.seed, dtype=dtype_of(case.dtype))
    x = x.masked_fill(
        torch.sigmoid(normal(*case.shape, seed=case.seed + 1)) < case.hidden, -math.inf
    )
    placed = memory.place("x", x, case.layout)
    in_place = ("x",) if case.call.endswith("_") else ()
    judge = partial(_judge, case, x)
    if case.call == "apply_causal_mask_":
        arguments = {"scores": placed, "q_offset": case.q_offset}
        return Prepared(torch.ops.metal_attn.apply_causal_mask_, arguments, judge, memory, in_place)
    arguments = {"x": placed, "dim": case.dim}
    return Prepared(partial(_run, case), arguments, judge, memory, in_place)


def _run(case: Softmax, x: Tensor, dim: int) -> Any:
    op = getattr(torch.ops.metal_attn, case.call)
    if not case.backward:
        return op(x, dim)
    leaf = x.detach().requires_grad_()
    found = op(leaf, dim)
    weights = _gradient_of(case).to(x.device)
    return found.detach(), torch.autograd.grad(found, leaf, weights)[0]


def _gradient_of(case: Softmax) -> Tensor:
    return normal(*case.shape, seed=case.seed + 2, dtype=dtype_of(case.dtype))


def _judge(case: Softmax, x: Tensor, results: Any) -> list[Measure]:
    if case.call == "apply_causal_mask_":
        visible = torch.ones(x.shape[-2:], dtype=torch.bool).tril(case.q_offset)
        return [same_bits("scores", results, x.masked_fill(~visible, -math.inf))]
    found, gradient = results if case.backward else (results, None)
    exact, own = (torch._safe_softmax(y, case.dim) for y in (x.double(), x))
    measures = [near("weights", found, exact, worst_of([(own, exact)]))]
    if gradient is not None:
        weights = _gradient_of(case)
        exact_gradient, own_gradient = (
            y * (g - (g * y).sum(case.dim, keepdim=True))
            for y, g in ((exact, weights.double()), (own, weights))
        )
        error = worst_of([(own_gradient, exact_gradient)])
        # The weights that the forward returned are rounded.
        terms = (exact * weights.double()).abs()
        slack = ROUNDING[x.dtype] * (exact_gradient.abs() + exact * terms.sum(case.dim, True))
        measures.append(near("dx", gradient, exact_gradient, error, slack))
    return measures
