"""One row of a model's explanation: a layer's call of attention or of another op of ours."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch_metal_attn.tools.costs import Cost
from torch_metal_attn.tools.explain.ops import Explanation, Kernel


@dataclass(frozen=True)
class LayerCall:
    """A call of attention or of another op of ours.

    Attributes: layer: the path of the innermost module that made the call. op: the name of our op
        or torch's. shapes: of q and of the keys, (B, Hq, Lq, D) and (B, Hkv, Lk, D), or of the op's
        first tensor. explanation: for an op of ours; its refusal is the error that the call would
        raise. elsewhere: what runs instead of our op, "" for an op of ours. cost: the fewest FLOPs
        and bytes that the call needs, or None if they are not known. copied: tensors that were
        copied for the call because their rows were not contiguous; the cost includes the copies.
        notes: remarks of the caller, such as the bytes of another form.
    """

    layer: str
    op: str
    shapes: tuple[tuple[int, ...], ...]
    explanation: Explanation | None
    elsewhere: str
    cost: Cost | None
    copied: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def kernels(self) -> dict[str, Kernel]:
        return {} if self.explanation is None else self.explanation.kernels

    @property
    def refusal(self) -> str | None:
        return None if self.explanation is None else self.explanation.refusal


def known_cost(rows: Iterable[LayerCall]) -> Cost:
    return sum((row.cost for row in rows if row.cost is not None), Cost(0, 0))
