"""Cases of softmax, softmax_ and apply_causal_mask_, and their gradients."""

import math
import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.testing.case import Case, Prepared, call, chance, field, kinds, layout, one_of
from torch_metal_attn.testing.judge import ROUNDING, Measure, near, normal, same_bits, worst_of
from torch_metal_attn.testing.tensors import Memory, dtype_of, numbers

_CALLS = ("softmax", "softmax_", "apply_causal_mask_")


def _shape(r: random.Random, case: "Softmax") -> tuple[int, ...]:
    shape: tuple[int, ...] = (r.choice((1, 2, 5, 33, 1500)),)
    for _ in range(r.choice((0, 1, 1, 2, 3))):
        fits = [n for n in (0, 1, 2, 3, 7, 33, 65, 300) if n * math.prod(shape) <= 30000]
        shape += (r.choice(fits),)
    return shape


def _dim(r: random.Random, case: "Softmax") -> int:
    rank = len(case.shape)
    return r.choice((-1, -1, r.randrange(-rank, rank), rank - 1))


@dataclass(frozen=True)
class Softmax(Case):
    """A softmax along a dimension, or a causal mask for scores. hidden: the share of -inf in x."""

    call: str = call(*_CALLS)
    shape: tuple[int, ...] = field((1,), _shape)
    dim: int = field(-1, _dim, calls=_CALLS[:2])
    q_offset: int = field(0, lambda r, case: r.randint(-40, 40), calls=_CALLS[2:])
    hidden: float = field(0.0, one_of(0.0, 0.0, 0.3, 1.0))
    backward: bool = field(False, chance(0.3), calls=_CALLS[:1])
    values: str = kinds()
    layout: tuple[str, ...] = layout(("padded 3",), ("order 10",), ("order 10", "padded 5"))

    def ways(self) -> tuple[str, ...]:
        return ("dtype of x",) if self.call != "apply_causal_mask_" else ()

    def conflicts(self) -> dict[str, Any]:
        return {
            "a layout needs two dimensions": self.layout and len(self.shape) < 2,
            "a mask needs two dimensions": self.call == _CALLS[2] and len(self.shape) < 2,
        }

    def illegal(self) -> dict[str, Any]:
        rank = len(self.shape)
        return {"dim out of range": not -rank <= self.dim < rank}

    def wrong(self) -> list[dict[str, Any]]:
        return [{"dim": len(self.shape)}]


def prepare(case: Softmax, device: torch.device) -> Prepared:
    """The call. Rows of only -inf must give 0."""
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
    actual = op(leaf, dim)
    weights = _gradient_of(case).to(x.device)
    return actual.detach(), torch.autograd.grad(actual, leaf, weights)[0]


def _gradient_of(case: Softmax) -> Tensor:
    return normal(*case.shape, seed=case.seed + 2, dtype=dtype_of(case.dtype))


def _judge(case: Softmax, x: Tensor, results: Any) -> list[Measure]:
    if case.call == "apply_causal_mask_":
        visible = torch.ones(x.shape[-2:], dtype=torch.bool).tril(case.q_offset)
        return [same_bits("scores", results, x.masked_fill(~visible, -math.inf))]
    actual, gradient = results if case.backward else (results, None)
    exact, rounded = (torch._safe_softmax(y, case.dim) for y in (x.double(), x))
    measures = [near("weights", actual, exact, worst_of([(rounded, exact)]))]
    if gradient is not None:
        weights = _gradient_of(case)
        exact_gradient, rounded_gradient = (
            y * (g - (g * y).sum(case.dim, keepdim=True))
            for y, g in ((exact, weights.double()), (rounded, weights))
        )
        error = worst_of([(rounded_gradient, exact_gradient)])
        # The forward returned rounded weights.
        terms = (exact * weights.double()).abs()
        slack = ROUNDING[x.dtype] * (exact_gradient.abs() + exact * terms.sum(case.dim, True))
        measures.append(near("dx", gradient, exact_gradient, error, slack))
    return measures
