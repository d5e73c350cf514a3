"""What the kernels do for a shape, by the simulator's counters, when there is no Apple GPU."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from torch_metal_attn.simulator import Counters, simulate
from torch_metal_attn.tools.bench.shapes import WIDTH, Shape
from torch_metal_attn.tools.costs import attention_flops, gradient_flops

# Limit for one shape, so that the simulator takes seconds.
LIMIT = 2e9  # FLOPs
_FLOPS = 2 * 8 * 8 * 8  # of a matrix operation
_BLOCK = 32 * 8  # pairs of a query and a key in a block, as most kernels process them


LEGEND = """\
GFLOP   of matrix operations, and that divided by the least that the shape needs
MB      moved to and from device memory, and that divided by the least
For each 32 keys and 8 queries of a head:
MMA     8x8 matrix operations of a SIMD group
device  a thread's loads from device memory
tg      a thread's loads from threadgroup memory
exps    a thread's exponentials"""
HEADING = (
    f"{'shape':<{WIDTH}} {'GFLOP':>8} {'/least':>6} {'MB':>8} {'/least':>6}  "
    f"{'MMA':>5} {'device':>6} {'tg':>5} {'exps':>5}"
)


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

    def __str__(self) -> str:
        """Operations and bytes, relative to the fewest too, and counts of a block, as in HEADING.

        A shape that is too large shows the smaller one that was counted, and says so.
        """
        if self.error:
            return f"{self.shape!s:<{WIDTH}} {self.error.splitlines()[0]}"
        block = self.per_block()
        line = (
            f"{self.on!s:<{WIDTH}} {self.flops / 1e9:8.3f} {self.flops_share:6.2f} "
            f"{self.device_bytes / 1e6:8.3f} {self.bytes_share:6.2f}  "
            f"{block['matrix operations']:5.0f} {block['device loads']:6.1f} "
            f"{block['threadgroup loads']:5.1f} {block['exps']:5.1f}"
        )
        return line if self.on == self.shape else f"{line}  reduced from {self.shape}"

    def as_dict(self) -> dict[str, Any]:
        """Counters by kernel, also relative to the fewest operations that the shape needs."""
        counts: dict[str, Any] = {
            "shape": asdict(self.shape),
            "counted": asdict(self.on),
            "least": asdict(self.on.cost),
            "error": self.error or None,
        }
        if not self.error:
            counts |= {
                "flops": self.flops,
                "flops_share": self.flops_share,
                "device_bytes": self.device_bytes,
                "bytes_share": self.bytes_share,
                "per_32_keys_and_8_queries": self.per_block(),
                "kernels": {name: c.as_dict() for name, c in self.kernels.items()},
            }
        return counts

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
