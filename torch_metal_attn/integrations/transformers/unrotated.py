"""Queries that the kernel will rotate, with their rotary tables.

A layer whose rotation is fused passes an `Unrotated` instead of the query tensor. An `Unrotated` is
not a tensor, so code other than `metal_attention` that uses it raises.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tables:
    """How to get the op's cos and sin, (B or 1, L, R / 2), from a model's, (B or 1, L, width).

    repeats: "halves" (width R, two equal halves), "pairs" (width R, columns 2 i and 2 i + 1 are
    equal) or "none" (width R / 2). interleaved: columns 2 i and 2 i + 1 of q form a pair; otherwise
    columns i and i + R / 2 do.
    """

    repeats: str
    interleaved: bool

    def shortened(self, table: Tensor) -> Tensor:
        if self.repeats == "halves":
            table = table[..., : table.shape[-1] // 2]
        elif self.repeats == "pairs":
            table = table[..., ::2]
        # Some models compute tables with positions as the innermost dimension.
        return table if table.stride(-1) == 1 else table.contiguous()


class Unrotated:
    """q (B, H, L, D) and the tables that rotate its first columns: (B or 1, L, R / 2)."""

    def __init__(self, q: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, owner: str) -> None:
        self.q, self.cos, self.sin = q, cos, sin
        self.interleaved, self.owner = interleaved, owner

    def options(self) -> dict[str, Any]:
        return {
            "q_rotary_cos": self.cos,
            "q_rotary_sin": self.sin,
            "rotary_interleaved": self.interleaved,
        }

    def rotated(self) -> Tensor:
        """The queries, rotated by `metal_attn::rope`, for attention that cannot rotate them."""
        return rotated(self.q, self.cos, self.sin, self.interleaved)

    def before(self, rest: Tensor) -> "Unrotated":
        """Append columns (B, H, L, D') that are not rotated."""
        q = torch.cat([self.q, rest], dim=-1)
        return Unrotated(q, self.cos, self.sin, self.interleaved, self.owner)

    def __getattr__(self, name: str) -> Any:
        raise self._misuse(f"reads its {name}")

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        values = [*args, *(kwargs or {}).values()]
        values += [x for several in values if isinstance(several, list | tuple) for x in several]
        query = next(x for x in values if isinstance(x, cls))
        raise query._misuse(f"calls {getattr(func, '__name__', func)} on it")

    def _misuse(self, what: str) -> NotImplementedError:
        return NotImplementedError(
            f"{self.owner} was given fuse_rope=True, so only metal_attn's kernel can use its "
            f"query, but other code {what}: call enable(model) to undo this, also before you set "
            "another attn_implementation"
        )


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    result: Tensor = torch.ops.metal_attn.rope(x, None, cos, sin, interleaved=interleaved)[0]
    return result
