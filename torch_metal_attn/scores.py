"""Ready-made score_mods for `flex_attention`.

Kernels read the tensors that you pass, so these must be on the device of the attention. score_mods
can be pickled, and `deepcopy` of a model also copies their tensors. An argument of the wrong type
or shape, or out of range, raises a TypeError or ValueError that names it.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from torch_metal_attn.call.arguments import (
    as_bool,
    as_int_at_least,
    as_positive,
    check_rank,
    check_tensor,
)

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def alibi(slopes: Tensor) -> ScoreMod:
    """Subtracts slopes[h] * |q_idx - kv_idx|. slopes: (H,). Press et al. (2021)."""
    check_rank("slopes", slopes, "(H)")
    return partial(_alibi, slopes)


def relative_bias(bias: Tensor) -> ScoreMod:
    """Adds the bias of the head for the distance kv_idx - q_idx.

    bias: (H, 2 * farthest + 1). The middle column is distance 0. Keys that are more than `farthest`
    away use the first or last column.
    """
    check_tensor("bias", bias)
    if bias.dim() != 2 or bias.shape[1] % 2 == 0:
        raise ValueError(f"bias has shape {tuple(bias.shape)}; it must be (H, 2 * farthest + 1)")
    return partial(_relative_bias, bias, bias.shape[1] // 2)


def soft_cap(cap: float) -> ScoreMod:
    """Replaces the score by cap * tanh(score / cap), as in Gemma 2."""
    return partial(_soft_cap, float(as_positive("cap", cap)))


def t5_buckets(table: Tensor, bidirectional: bool = True, max_distance: int = 128) -> ScoreMod:
    """Adds table[bucket, h], T5's bias: near distances have their own buckets, far distances share.

    table: (buckets, H). Distances of at least max_distance share the last bucket.
    """
    check_rank("table", table, "(buckets, H)")
    bidirectional = as_bool("bidirectional", bidirectional)
    max_distance = as_int_at_least("max_distance", max_distance, 0, 2**20)
    buckets = table.shape[0] // 2 if bidirectional else table.shape[0]
    exact = buckets // 2
    if exact < 1 or max_distance <= exact:
        raise ValueError(
            f"table has shape {tuple(table.shape)} and max_distance is {max_distance}; table must "
            f"be (buckets, heads) with {4 if bidirectional else 2} buckets at least, and "
            f"max_distance more than {exact}"
        )
    # The bucket of each distance, computed as in T5. A kernel's logarithm could round differently.
    distance = torch.arange(max_distance + 1, device="cpu")
    far = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far_bucket = (exact + (far * (buckets - exact)).long()).clamp(max=buckets - 1)
    by_distance = torch.where(distance < exact, distance, far_bucket).int().to(table.device)
    return partial(_t5_buckets, table, by_distance, buckets if bidirectional else 0)


def _alibi(slopes: Tensor, score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return score - slopes[h] * (q - kv).abs()


def _relative_bias(
    bias: Tensor, farthest: int, score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor
) -> Tensor:
    return score + bias[h, (kv - q).clamp(-farthest, farthest) + farthest]


def _soft_cap(cap: float, score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return cap * torch.tanh(score / cap)


def _t5_buckets(
    table: Tensor,
    buckets: Tensor,
    later: int,
    score: Tensor,
    b: Tensor,
    h: Tensor,
    q: Tensor,
    kv: Tensor,
) -> Tensor:
    """buckets: by distance. later: the first bucket of later keys; 0 gives them distance 0."""
    before = q - kv
    distance = before.abs() if later else before.clamp(min=0)
    bucket = buckets[distance.clamp(max=buckets.shape[0] - 1)]
    if later:
        bucket = bucket + torch.where(before < 0, later, 0)
    return score + table[bucket, h]
