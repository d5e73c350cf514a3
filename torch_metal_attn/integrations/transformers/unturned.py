"""Queries on their way to the kernel that will turn them, with the rotary tables they need.

In place of the tensor of a layer whose rotation is fused. It is no tensor, so that no other code
can take it for queries: whatever uses it but `metal_attention` raises.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tables:
    """How a model's cos and sin, (B or 1, L, width), hold the op's, (B or 1, L, R / 2).

    repeats: "halves" (R wide, the second half as the first), "pairs" (R wide, columns 2 i and 2 i +
    1 alike) or "none". interleaved: pairs of neighbouring columns of q turn, else halves.
    """

    repeats: str
    interleaved: bool

    def shortened(self, table: Tensor) -> Tensor:
        if self.repeats == "halves":
            table = table[..., : table.shape[-1] // 2]
        elif self.repeats == "pairs":
            table = table[..., ::2]
        # Some come from a product that has positions innermost.
        return table if table.stride(-1) == 1 else table.contiguous()


class Unturned:
    """q (B, H, L, D) and the tables that turn its first columns: (B or 1, L, R / 2)."""

    def __init__(self, q: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, owner: str) -> None:
        self.q, self.cos, self.sin = q, cos, sin
        self.interleaved, self.owner = interleaved, owner

    def options(self) -> dict[str, Any]:
        return {
            "q_rotary_cos": self.cos,
            "q_rotary_sin": self.sin,
            "rotary_interleaved": self.interleaved,
        }

    def turned(self) -> Tensor:
        """The queries as other attention wants them, written by `metal_attn::rope`."""
        return turn(self.q, self.cos, self.sin, self.interleaved)

    def before(self, rest: Tensor) -> "Unturned":
        """With columns behind its own that do not turn, (B, H, L, D')."""
        q = torch.cat([self.q, rest], dim=-1)
        return Unturned(q, self.cos, self.sin, self.interleaved, self.owner)

    def __getattr__(self, name: str) -> Any:
        raise self._misused(f"reads its {name}")

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = [*args, *(kwargs or {}).values()]
        given += [one for several in given if isinstance(several, list | tuple) for one in several]
        found = next(one for one in given if isinstance(one, cls))
        raise found._misused(f"calls {getattr(func, '__name__', func)} on it")

    def _misused(self, what: str) -> NotImplementedError:
        return NotImplementedError(
            f"{self.owner} was given fuse_rope=True, so its query is turned by metal_attn's kernel "
            f"alone, and the code between {what}: use enable(model) for this model, and before "
            "another attn_implementation"
        )


def turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    turned: Tensor = torch.ops.metal_attn.rope(x, None, cos, sin, interleaved=interleaved)[0]
    return turned
