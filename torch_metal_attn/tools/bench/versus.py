"""Our attention next to torch's: both calls of a shape, their times and their difference."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as torch_attention

from torch_metal_attn.tools.bench import ceilings
from torch_metal_attn.tools.bench.ceilings import Ceilings
from torch_metal_attn.tools.bench.shapes import DTYPES, WIDTH, Shape
from torch_metal_attn.tools.bench.timing import Timer, Times, interleaved

OURS, TORCHS = "metal_attn", "torch"
# Allowed difference between two results in one dtype whose elements are at most about 1.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


LEGEND = """\
ours, torch  milliseconds a call
ratio        torch's time divided by ours: above 1, ours is faster
matrix       our FLOP/s as a share of what a large matrix product reaches on this machine
memory       our bytes a second as a share of what a large copy reaches on this machine"""
HEADING = (
    f"{'shape':<{WIDTH}} {'ours, ms':>10} {'torch, ms':>10} {'ratio':>6}  "
    f"{'matrix':>6} {'memory':>6}"
)


@dataclass(frozen=True)
class Compared:
    """A shape's times, by OURS and TORCHS.

    Attributes: difference: the largest difference between their outputs; None if one has none.
        ceilings: of the shape's dtype; None if they could not be measured.
    """

    shape: Shape
    times: dict[str, Times]
    difference: float | None
    ceilings: Ceilings | None = None

    @property
    def ratio(self) -> float | None:
        """Torch's median divided by ours; above 1, ours is faster."""
        ours, torchs = self.times[OURS], self.times[TORCHS]
        return None if ours.error or torchs.error else torchs.median / ours.median

    @property
    def agree(self) -> bool:
        """Whether the outputs are close; also True if there is only one."""
        if self.difference is None:
            return True
        return self.difference <= _TOLERANCE[getattr(torch, self.shape.dtype)]

    def shares(self, name: str) -> dict[str, float] | None:
        """The fewest operations and bytes per median time, relative to both ceilings."""
        times, ceilings = self.times[name], self.ceilings
        if times.error or ceilings is None:
            return None
        cost = self.shape.cost
        return {
            "matrix": cost.flops / times.median / ceilings.flops,
            "memory": cost.bytes / times.median / ceilings.bytes,
        }

    def __str__(self) -> str:
        """Medians, torch's divided by ours, and our share of both ceilings, as in HEADING."""
        cells = []
        for times in self.times.values():
            cells.append(f"{'-' if times.error else f'{times.median * 1e3:.3f}':>10}")
        cells.append(f"{'-' if self.ratio is None else f'{self.ratio:.2f}':>6} ")
        shares = self.shares(OURS)
        for name in ("matrix", "memory"):
            cells.append(f"{'-' if shares is None else f'{shares[name]:.0%}':>6}")
        lines = [f"{self.shape!s:<{WIDTH}} " + " ".join(cells)]
        for name, times in self.times.items():
            if times.error:
                lines.append(f"    {name}: {times.error.splitlines()[0]}")
        if not self.agree:
            lines.append(f"    the results differ by {self.difference:.2e}: run `verify --full`")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Raw seconds per call, their median and spread, and shares of ceilings by the median."""
        return {
            "shape": dataclasses.asdict(self.shape),
            "least": dataclasses.asdict(self.shape.cost),
            "ratio": self.ratio,
            "difference": self.difference,
            "agree": self.agree,
            **{
                name: {
                    "seconds": list(times.seconds),
                    "error": times.error or None,
                    "median": None if times.error else times.median,
                    "spread": None if times.error else times.spread,
                    "shares": self.shares(name),
                }
                for name, times in self.times.items()
            },
        }


class Comparison:
    """Compares shapes on a device.

    Attributes: ceilings: by dtype, measured when a shape has it. trouble: why others are missing.
    """

    def __init__(self, device: torch.device, timer: Timer, rounds: int) -> None:
        self.ceilings: dict[str, Ceilings] = {}
        self.trouble: dict[str, str] = {}
        self._device, self._timer, self._rounds = device, timer, rounds

    def __call__(self, shape: Shape) -> Compared:
        """Measure one shape."""
        where = (self._device, self._timer, self._rounds)
        if shape.dtype not in self.ceilings | self.trouble:
            try:
                self.ceilings[shape.dtype] = ceilings.measure(DTYPES[shape.dtype], *where)
            except RuntimeError as error:
                self.trouble[shape.dtype] = str(error)
        found = compare(shape, *where)
        if self._device.type == "mps":  # leave no memory of this shape to the next
            torch.mps.empty_cache()
        return dataclasses.replace(found, ceilings=self.ceilings.get(shape.dtype))


def compare(shape: Shape, device: torch.device, timer: Timer, rounds: int) -> Compared:
    """Measure one shape. If one of the two cannot run it, its times hold the error."""
    try:
        forwards, calls = calls_of(shape, device)
    except RuntimeError as error:
        failed = Times(error=f"the inputs cannot be made: {error}")
        return Compared(shape, {OURS: failed, TORCHS: failed}, None)
    difference = None
    # Around all that is timed, so that no call takes the time of it.
    with shape.on_its_tiles():
        times = interleaved(calls, timer, rounds)
        if not any(found.error for found in times.values()):
            with torch.no_grad():
                apart = forwards[OURS]().float() - forwards[TORCHS]().float()
            difference = apart.abs().nan_to_num(nan=torch.inf).max().item()
    return Compared(shape, times, difference)


def calls_of(
    shape: Shape, device: torch.device
) -> tuple[dict[str, Callable[[], Tensor]], dict[str, Callable[[], Any]]]:
    """The forwards of a shape, and what is timed: these, or in training a whole step.

    Both by OURS and TORCHS. Raises RuntimeError if there is no memory for the operands.
    """
    operands = shape.operands(device)
    forwards: dict[str, Callable[[], Tensor]] = {
        OURS: functools.partial(_ours, shape, operands),
        TORCHS: functools.partial(_torchs, shape, operands),
    }
    if shape.kind != "training":
        return forwards, dict(forwards)
    gradient = torch.randn_like(operands[0])
    steps: dict[str, Callable[[], Any]] = {
        name: functools.partial(_and_backward, call, operands, gradient)
        for name, call in forwards.items()
    }
    return forwards, steps


def _ours(shape: Shape, operands: list[Tensor]) -> Tensor:
    out: Tensor = getattr(torch.ops.metal_attn, shape.op)(*operands, **shape.options)[0]
    return out


def _torchs(shape: Shape, operands: list[Tensor]) -> Tensor:
    q, k, v = operands
    mask, causal = _torch_mask(shape, q.device)
    return torch_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=causal,
        enable_gqa=shape.heads != shape.kv_heads,
    )


@functools.lru_cache(maxsize=1)
def _torch_mask(shape: Shape, device: torch.device) -> tuple[Tensor | None, bool]:
    """Torch's mask and is_causal, whose diagonal begins at the first key; made once per shape."""
    if shape.window < 0:
        if not shape.causal or shape.length == 1:
            return None, False
        if shape.length == shape.kv_length:
            return None, True
    position = torch.arange(shape.length, device=device)[:, None] + shape.kv_length - shape.length
    key = torch.arange(shape.kv_length, device=device)
    visible = torch.ones(shape.length, shape.kv_length, dtype=torch.bool, device=device)
    if shape.causal:
        visible &= key <= position
    if shape.window >= 0:
        visible &= key >= position - shape.window
    return visible, False


def _and_backward(
    forward: Callable[[], Tensor], operands: list[Tensor], gradient: Tensor
) -> tuple[Tensor, ...]:
    return torch.autograd.grad(forward(), operands, gradient)
