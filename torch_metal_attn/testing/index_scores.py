"""Cases of index_scores, the scores of keys by an indexer."""

import math
import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.ops.index_scores import index_scores
from torch_metal_attn.testing import invalidation
from torch_metal_attn.testing.case import Case, Prepared, call, chance, field, kinds, layout, one_of
from torch_metal_attn.testing.judge import ROUNDING, Measure, apart, normal, worst
from torch_metal_attn.testing.rounding import STEPS, summing
from torch_metal_attn.testing.tensors import DTYPES, Memory, dtype_of, numbers


def _offset(r: random.Random, case: "IndexScores") -> int:
    return r.randint(-case.q_length, case.kv_length + 2)


@dataclass(frozen=True)
class IndexScores(Case):
    """An indexer's scores of all keys."""

    call: str = call("index_scores")
    batch: int = field(1, one_of(0, 1, 1, 2), varied=True)
    heads: int = field(1, one_of(0, 1, 3, 8, 17, 64), varied=True)
    q_length: int = field(1, one_of(0, 1, 2, 3, 9), varied=True)
    kv_length: int = field(1, one_of(0, 1, 31, 33, 100), varied=True)
    head_dim: int = field(8, one_of(1, 7, 16, 64, 128, 128, 256))
    weight_dtype: str = field("float32", one_of(*DTYPES))
    softmax_scale: float | None = field(None, one_of(None, None, 0.3, -1.0, 0.0), varied=True)
    causal: bool = field(False, chance(0.6))
    q_offset: int | None = field(
        None, _offset, share=0.4, when=lambda case: case.causal, varied=True
    )
    values: str = kinds()
    q_layout: tuple[str, ...] = layout(("padded 3",), ("order 021",), ("order 210", "padded 8"))
    k_layout: tuple[str, ...] = layout(("padded 3",), ("order 10", "padded 8"))

    def ways(self) -> tuple[str, ...]:
        q_rows = self.batch * self.heads * self.q_length and self.head_dim > 1
        return invalidation.ways(("q", "k", "weights"), ("q",) if q_rows else ())

    def illegal(self) -> dict[str, Any]:
        return {"head dim": not 1 <= self.head_dim <= 256}

    def wrong(self) -> list[dict[str, Any]]:
        return [{"head_dim": 257}]


def prepare(case: IndexScores, device: torch.device) -> Prepared:
    """The call. Its weights are (B, Lq, H) in memory, as in the models."""
    memory, dtype = Memory(device), dtype_of(case.dtype)

    def make(*shape: int, seed: int) -> Tensor:
        return numbers(*shape, kind=case.values, seed=case.seed + seed, dtype=dtype)

    q = make(case.batch, case.heads, case.q_length, case.head_dim, seed=1)
    k = make(case.batch, case.kv_length, case.head_dim, seed=2)
    weights = normal(
        case.batch, case.heads, case.q_length, seed=case.seed + 3, dtype=dtype_of(case.weight_dtype)
    )
    arguments = {
        "q": memory.place("q", q, case.q_layout),
        "k": memory.place("k", k, case.k_layout),
        "weights": memory.place("weights", weights, ("order 021",)),
        "softmax_scale": case.softmax_scale,
        "causal": case.causal,
        "q_offset": case.q_offset,
    }
    judge = partial(_judge, case, q.double(), k.double(), weights.double())
    return Prepared(torch.ops.metal_attn.index_scores, arguments, judge, memory)


def _judge(
    case: IndexScores, q: Tensor, k: Tensor, weights: Tensor, actual: Tensor
) -> list[Measure]:
    """By Cauchy-Schwarz the terms of a head's score add up to at most |q| |k|."""
    exact = index_scores(
        *(q, k, weights),
        softmax_scale=case.softmax_scale,
        causal=case.causal,
        q_offset=case.q_offset,
    )
    if actual.shape != exact.shape or actual.dtype != torch.float32:
        raise AssertionError(f"the scores are {actual.dtype} of shape {tuple(actual.shape)}")
    scale = q.shape[-1] ** -0.5 if case.softmax_scale is None else abs(case.softmax_scale)
    norms = [x.norm(dim=-1) for x in (q, k)]
    terms = scale * torch.einsum("bhq,bhq,bk->bqk", weights.abs(), *norms)
    rounding = summing(case.head_dim) + summing(case.heads) + STEPS * ROUNDING[torch.float32]
    return [worst("scores", apart(actual, exact), rounding * terms + math.ulp(0.0))]
