"""What the kernels do for a shape, by the simulator's counters, when there is no Apple GPU."""

from dataclasses import dataclass, replace

import torch

from torch_metal_attn.simulator import Counters, simulate
from torch_metal_attn.tools.bench.shapes import Shape
from torch_metal_attn.tools.costs import attention_flops, gradient_flops

# Limit for one shape, so that the simulator takes seconds.
LIMIT = 2e9  # FLOPs
_FLOPS = 2 * 8 * 8 * 8  # of a matrix operation
_BLOCK = 32 * 8  # pairs of a query and a key in a block, as most kernels process them


@dataclass(frozen=True)
class Counted:
    """A shape's counters by kernel.

    Attributes: shape: the shape that was requested. on: the shape that was counted, a smaller one
        if the requested one is beyond LIMIT. kernels: by name; empty if there is an error.
    """

    shape: Shape
    on: Shape
    kernels: dict[str, Counters]
    error: str = ""

    @property
    def flops(self) -> int:
        """FLOPs of all matrix and tensor operations."""
        return sum(
            c.matrix_operations * _FLOPS + 2 * c.tensor_multiplications
            for c in self.kernels.values()
        )

    @property
    def device_bytes(self) -> int:
        """Bytes loaded from and stored to device memory, not counting the GPU's caches."""
        return sum(c.load_bytes["device"] + c.store_bytes["device"] for c in self.kernels.values())

    @property
    def flops_share(self) -> float:
        """FLOPs relative to the fewest that the shape needs; more if tiles reach over an edge."""
        return self.flops / self.on.cost.flops

    @property
    def bytes_share(self) -> float:
        """Bytes relative to the fewest that the shape needs; more if keys are read repeatedly."""
        return self.device_bytes / self.on.cost.bytes

    def per_block(self) -> dict[str, float]:
        """Counts for 32 keys and 8 queries of a head, that is for one SIMD group."""
        blocks = self.on.cost.flops / self._flops_a_pair / _BLOCK
        total = sum(self.kernels.values(), Counters())
        return {
            "matrix operations": total.matrix_operations / blocks,
            "device loads": total.loads["device"] / blocks / 32,
            "threadgroup loads": total.loads["threadgroup"] / blocks / 32,
            "threadgroup stores": total.stores["threadgroup"] / blocks / 32,
            "exps": total.exps / blocks / 32,
            "converts": total.converts / blocks / 32,
            "shuffles": total.shuffles / blocks,
        }

    @property
    def _flops_a_pair(self) -> int:
        sizes = (1, self.on.head_dim, self.on.head_dim)
        backward = gradient_flops(*sizes) if self.on.kind == "training" else 0
        return attention_flops(*sizes) + backward


def fitting(shape: Shape) -> Shape:
    """The shape, or a part that the simulator can count: one KV head, then shorter lengths."""
    if shape.cost.flops <= LIMIT:
        return shape
    shape = replace(shape, batch=1, heads=shape.heads // shape.kv_heads, kv_heads=1)
    while shape.cost.flops > LIMIT and max(shape.length, shape.kv_length) > 1:
        shape = replace(
            shape, length=max(shape.length // 2, 1), kv_length=max(shape.kv_length // 2, 1)
        )
    return shape


def count(shape: Shape) -> Counted:
    """Run one shape, reduced by `fitting`, in the simulator."""
    on = fitting(shape)
    operands = on.operands(torch.device("cpu"))
    try:
        with simulate(count=True) as run, on.on_its_tiles():
            out = getattr(torch.ops.metal_attn, on.op)(*operands, **on.options)[0]
            if on.kind == "training":
                torch.autograd.grad(out, operands, torch.ones_like(out))
    except (RuntimeError, ValueError) as error:
        return Counted(shape, on, {}, f"{type(error).__name__}: {error}")
    return Counted(shape, on, dict(run.counters))
