"""Cases of merge_state and its gradients, merge_state_ and merge_splits."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.testing import invalidation
from torch_metal_attn.testing.case import Case, Prepared, call, chance, field, layout, one_of
from torch_metal_attn.testing.judge import (
    ROUNDING,
    Measure,
    largest,
    near,
    near_statistic,
    normal,
    worst_of,
)
from torch_metal_attn.testing.rounding import STEPS, summing
from torch_metal_attn.testing.tensors import DTYPES, Memory, dtype_of

_STATES, _SPLITS = ("merge_state", "merge_state_"), ("merge_splits",)


@dataclass(frozen=True)
class Merge(Case):
    """Merges results for parts of the keys.

    Attributes: packed: (tokens, heads) instead of (batch, heads, length). empty: the share of parts
        without keys, whose out is NaN. infinity_is_empty: parts without keys in every second split
        have a log-sum-exp of +inf. masked: merge only some rows. sink: a dtype, for merge_splits.
    """

    call: str = call("merge_state", *_STATES, *_SPLITS)
    packed: bool = field(False, chance(0.3), calls=_STATES)
    batch: int = field(1, one_of(0, 1, 1, 2), when=lambda case: not case.packed)
    heads: int = field(1, one_of(1, 2, 5))
    length: int = field(1, one_of(0, 1, 3, 33))
    head_dim: int = field(8, one_of(1, 7, 8, 32, 64, 64, 128, 256, 512))
    splits: int = field(2, one_of(1, 2, 3, 31, 32, 33, 40, 130), calls=_SPLITS)
    empty: float = field(0.0, one_of(0.0, 0.3, 1.0), varied=True)
    infinity_is_empty: bool = field(False, chance(0.3))
    masked: bool = field(False, chance(0.3), calls=("merge_state_",))
    sink: str = field("", one_of("", "", *DTYPES), calls=_SPLITS)
    backward: bool = field(False, chance(0.4), calls=("merge_state",))
    layout: tuple[str, ...] = layout(
        ("padded 3",), ("order 021",), ("order 210", "padded 8"), calls=_STATES
    )

    def ways(self) -> tuple[str, ...]:
        if self.call in _SPLITS or self.head_dim < 2:
            return ()
        rows = ("out_a",) if self.batch * self.heads * self.length else ()
        return invalidation.ways(("out_a", "lse_a", "out_b"), rows)

    def conflicts(self) -> dict[str, Any]:
        ordered = any("order" in word for word in self.layout)
        return {"packed states have no batch": self.packed and ordered}

    def illegal(self) -> dict[str, Any]:
        splits = not 1 <= self.splits <= 1024
        return {"head dim": not 1 <= self.head_dim <= 512, "splits": splits}

    def wrong(self) -> list[dict[str, Any]]:
        return [{"head_dim": 513}, {"splits": 1025}]

    @property
    def rows(self) -> tuple[int, ...]:
        return (self.length, self.heads) if self.packed else (self.batch, self.heads, self.length)


def union(outs: Tensor, lses: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """The exact merge of outs (..., S, D) and lses (..., S) of S parts, and of a sink's logit."""
    logits = lses if sink is None else torch.cat([lses, sink.expand(*lses.shape[:-1], 1)], -1)
    weights = torch._safe_softmax(logits, -1)[..., : lses.shape[-1], None]
    has_keys = (lses != -math.inf)[..., None]
    return (weights * outs.where(has_keys, 0.0)).sum(-2), logits.logsumexp(-1)


def _parts(case: Merge) -> tuple[Tensor, Tensor]:
    """outs (..., S, D) and lses (..., S)."""
    outs = normal(*case.rows, case.splits, case.head_dim, seed=case.seed)
    lses = 3 * normal(*case.rows, case.splits, seed=case.seed + 1)
    hidden = torch.sigmoid(normal(*lses.shape, seed=case.seed + 2)) < case.empty
    lses = lses.masked_fill(hidden, -math.inf)
    dtype = torch.float32 if case.call == "merge_splits" else dtype_of(case.dtype)
    return outs.masked_fill(hidden[..., None], math.nan).to(dtype), lses


def prepare(case: Merge, device: torch.device) -> Prepared:
    """The call, with two states, or with float32 parts for merge_splits."""
    memory = Memory(device)
    outs, lses = _parts(case)
    judge = partial(_judge, case, outs, lses)
    called_lses = _with_infinities(case, lses)
    arguments: dict[str, Any] = {"infinity_is_empty": case.infinity_is_empty}
    if case.call == "merge_splits":
        arguments |= {
            "partial_out": memory.place("partial_out", outs),
            "partial_lse": memory.place("partial_lse", called_lses),
            "out_dtype": dtype_of(case.dtype),
        }
        if case.sink:
            arguments["learnable_sink"] = memory.place("sink", _sink(case))
        return Prepared(torch.ops.metal_attn.merge_splits, arguments, judge, memory)
    for part, name in enumerate("ab"):
        arguments[f"out_{name}"] = memory.place(f"out_{name}", outs[..., part, :], case.layout)
        lse = called_lses[..., part]
        arguments[f"lse_{name}"] = memory.place(f"lse_{name}", lse.t() if case.packed else lse)
    if case.call == "merge_state":
        return Prepared(partial(_run, case), arguments, judge, memory)
    if case.masked:
        arguments["mask"] = memory.place("mask", _mask(case))
    return Prepared(_run_in_place, arguments, judge, memory, ("out_a", "lse_a"))


def _mask(case: Merge) -> Tensor:
    rows = (case.length,) if case.packed else (case.batch, case.length)
    return normal(*rows, seed=case.seed + 6) > 0


def _with_infinities(case: Merge, lses: Tensor) -> Tensor:
    """With infinity_is_empty, +inf replaces -inf in every second split."""
    changed = lses.clone()
    if case.infinity_is_empty:
        changed[..., ::2] = changed[..., ::2].masked_fill(changed[..., ::2] == -math.inf, math.inf)
    return changed


def _sink(case: Merge) -> Tensor:
    return normal(case.heads, seed=case.seed + 3, dtype=dtype_of(case.sink))


def _run_in_place(out_a: Tensor, lse_a: Tensor, **others: Any) -> Any:
    torch.ops.metal_attn.merge_state_(out_a, lse_a, **others)
    return out_a, lse_a


def _run(case: Merge, infinity_is_empty: bool, **states: Tensor) -> Any:
    merge = partial(torch.ops.metal_attn.merge_state, infinity_is_empty=infinity_is_empty)
    if not case.backward:
        return merge(**states)
    leaves = {n: x.detach().requires_grad_() for n, x in states.items()}
    out, lse = merge(**leaves)
    douts = [g.to(x.device, x.dtype) for g, x in zip(_gradients_of(case), (out, lse), strict=True)]
    grads = torch.autograd.grad([out, lse], list(leaves.values()), douts)
    return out.detach(), lse.detach(), grads


def _gradients_of(case: Merge) -> tuple[Tensor, Tensor]:
    dlse = normal(*case.rows, seed=case.seed + 5)
    dout = normal(*case.rows, case.head_dim, seed=case.seed + 4, dtype=dtype_of(case.dtype))
    return dout, dlse.t() if case.packed else dlse


def _judge(case: Merge, outs: Tensor, lses: Tensor, results: Any) -> list[Measure]:
    sink = _sink(case)[:, None, None] if case.sink else None
    exact, exact_lse = union(outs.double(), lses.double(), None if sink is None else sink.double())
    rounded, _ = union(outs.float(), lses, None if sink is None else sink.float())
    rounded = rounded.to(dtype_of(case.dtype))
    actual, actual_lse = results[:2]
    actual_lse = actual_lse.t() if case.packed else actual_lse
    if case.masked:
        merged = _mask(case)[:, None] if case.packed else _mask(case)[:, None, :]
        rounded, exact = (
            x.where(merged[..., None], outs[..., 0, :].to(x.dtype)) for x in (rounded, exact)
        )
        exact_lse = exact_lse.where(merged, _with_infinities(case, lses)[..., 0].double())
    measures = [
        near("out", actual, exact, worst_of([(rounded, exact)])),
        near_statistic("lse", actual_lse, exact_lse, 1e-6),
    ]
    if case.backward:
        measures += _judge_gradients(case, outs, lses, results[2])
    return measures


def _judge_gradients(
    case: Merge, outs: Tensor, lses: Tensor, actual: tuple[Tensor, ...]
) -> list[Measure]:
    """Exact: w_a dout and w_a dlse + w_a w_b <dout, a - b>, with w_a = sigmoid(lse_a - lse_b)."""
    dout, dlse = _gradients_of(case)
    dlse = dlse.t() if case.packed else dlse

    def gradients(dtype: torch.dtype) -> list[Tensor]:
        weights = torch._safe_softmax(lses.to(dtype), -1)
        parts = outs.to(dtype).where((lses != -math.inf)[..., None], 0.0)
        wide = dout.to(dtype)
        apart = ((parts[..., 0, :] - parts[..., 1, :]) * wide).sum(-1)
        moved = weights.prod(-1) * apart
        results = []
        for part, sign in ((0, 1), (1, -1)):
            weight = weights[..., part]
            results += [weight[..., None] * wide, weight * dlse.to(dtype) + sign * moved]
        return results

    exact, rounded = gradients(torch.float64), gradients(torch.float32)
    # The terms of dlse may cancel. A weight errs by the rounding of the difference of the lses.
    weights = torch._safe_softmax(lses.double(), -1)
    apart = outs.double().nan_to_num(0, 0, 0).abs().sum(-2) * dout.double().abs()
    terms = dlse.double().abs() + weights.prod(-1) * apart.sum(-1)
    relative = summing(case.head_dim) + STEPS * ROUNDING[torch.float32] * (1 + largest(lses))
    measures = []
    for name, x, right, rough in zip(
        ("dout_a", "dlse_a", "dout_b", "dlse_b"), actual, exact, rounded, strict=True
    ):
        x = x.t() if case.packed and "lse" in name else x
        slack = relative * terms * weights[..., "ab".index(name[-1])] if "lse" in name else 0.0
        measures.append(near(name, x, right, worst_of([(rough.to(x.dtype), right)]), slack))
    return measures
