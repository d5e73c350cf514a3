"""Compares our attention with torch's on a shape: times, and the difference of the results."""

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as torch_attention

from torch_metal_attn.tools.bench.shapes import WIDTH, Shape
from torch_metal_attn.tools.bench.timing import Timer, Times, interleaved

OURS, TORCHS = "metal_attn", "torch"
# Allowed difference between two results whose elements are at most about 1, by dtype.
_TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}

LEGEND = """\
ours, torch  milliseconds a call
ratio        torch's time divided by ours: above 1, ours is faster"""
HEADING = f"{'shape':<{WIDTH}} {'ours, ms':>10} {'torch, ms':>10} {'ratio':>6}"


@dataclass(frozen=True)
class Compared:
    """A shape's times, by OURS and TORCHS, and the largest difference between their outputs."""

    shape: Shape
    times: dict[str, Times]
    difference: float | None

    @property
    def ratio(self) -> float | None:
        """Torch's median divided by ours."""
        ours, torchs = self.times[OURS], self.times[TORCHS]
        return None if ours.error or torchs.error else torchs.median / ours.median

    @property
    def agree(self) -> bool:
        """True if the outputs are close, or if a call failed, so that there is no second output."""
        return self.difference is None or self.difference <= _TOLERANCE[self.shape.dtype]

    def __str__(self) -> str:
        cells = [
            f"{'-' if times.error else f'{times.median * 1e3:.3f}':>10}"
            for times in self.times.values()
        ]
        cells.append(f"{'-' if self.ratio is None else f'{self.ratio:.2f}':>6}")
        lines = [f"{self.shape!s:<{WIDTH}} " + " ".join(cells)]
        for name, times in self.times.items():
            if times.error:
                lines.append(f"    {name}: {times.error.splitlines()[0]}")
        if not self.agree:
            lines.append(f"    the results differ by {self.difference:.2e}: run `verify --full`")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        return {
            "shape": asdict(self.shape),
            "ratio": self.ratio,
            "difference": self.difference,
            **{name: asdict(times) for name, times in self.times.items()},
        }


def compare(shape: Shape, device: torch.device, timer: Timer, rounds: int) -> Compared:
    """Measure one shape. If a call fails, its times hold the error."""
    try:
        forwards, calls = calls_of(shape, device)
    except RuntimeError as error:
        failed = Times(error=f"the inputs cannot be allocated: {error}")
        return Compared(shape, {OURS: failed, TORCHS: failed}, None)
    difference = None
    times = interleaved(calls, timer, rounds)
    if not any(one.error for one in times.values()):
        with torch.no_grad():
            differences = forwards[OURS]().float() - forwards[TORCHS]().float()
        difference = differences.abs().nan_to_num(nan=torch.inf).max().item()
    return Compared(shape, times, difference)


def calls_of(
    shape: Shape, device: torch.device
) -> tuple[dict[str, Callable[[], Tensor]], dict[str, Callable[[], Any]]]:
    """The forwards of a shape, and the calls to time: the forwards, or whole training steps."""
    operands = shape.operands(device)
    forwards: dict[str, Callable[[], Tensor]] = {
        OURS: functools.partial(_ours, shape, operands),
        TORCHS: functools.partial(_torchs, shape, operands),
    }
    if shape.kind != "training":
        return forwards, dict(forwards)
    gradient = torch.randn_like(operands[0])
    steps: dict[str, Callable[[], Any]] = {
        name: functools.partial(_with_backward, call, operands, gradient)
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
        q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=shape.heads != shape.kv_heads
    )


@functools.lru_cache(maxsize=1)
def _torch_mask(shape: Shape, device: torch.device) -> tuple[Tensor | None, bool]:
    """attn_mask and is_causal for torch, whose causal diagonal begins at the first key."""
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


def _with_backward(
    forward: Callable[[], Tensor], operands: list[Tensor], gradient: Tensor
) -> tuple[Tensor, ...]:
    return torch.autograd.grad(forward(), operands, gradient)
