"""Computes the memory of training steps, ours and torch's, from shapes, and plots it."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log2, log10

import torch

from torch_metal_attn.tools.bench.shapes import BadShape, Shape
from torch_metal_attn.tools.costs import scaled
from torch_metal_attn.tools.explain.command import explained

# A layer of 32 heads of 128 columns.
DEFAULT_SHAPES = [
    Shape("training", kv_heads=32, length=n, kv_length=n, dtype="bfloat16", causal=True)
    for n in (1024, 2048, 4096, 8192, 16384, 32768)
]
LEGEND = (
    "Bytes of one training step of attention: q, k, v, out, their gradients and intermediate "
    "tensors.\nmetal_attn: everything that explain lists. torch: one array of all scores, the "
    "least that its\nattention with gradients holds on mps. Computed, not measured."
)
_WIDTH, _HEIGHT = 720, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 560, 64, 330
_OURS, _TORCH = "#1a73e8", "#d93025"


@dataclass(frozen=True)
class Bytes:
    """The peak memory of a training step with our attention, and a lower bound with torch's."""

    shape: Shape
    ours: int
    torch: int


def memory(shape: Shape) -> Bytes:
    """The memory of a shape. Raises BadShape for decoding, and for shapes without a backward."""
    if shape.kind == "decode":
        raise BadShape("--memory is for training steps: leave out --decode")
    explanation = explained(dataclasses.replace(shape, kind="training"), torch.device("cpu"))
    training = explanation.training
    if training is None:
        raise BadShape(f"{shape}: {explanation.refusal}")
    held = training.inputs | training.allocated
    tensors = sum(held[name] for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv"))
    scores = shape.batch * shape.heads * shape.length * shape.kv_length
    # With gradients torch computes the scores in float32.
    return Bytes(shape, training.total, tensors + scores * torch.float32.itemsize)


def row(one: Bytes) -> tuple[str, ...]:
    sizes = (f"{scaled(size)}B" for size in (one.ours, one.torch))
    return f"{one.shape.length} x {one.shape.kv_length}", *sizes


def plots(members: Sequence[Bytes]) -> list[str]:
    """SVG plots over the number of queries, which is also that of keys unless keys are fixed."""
    series: dict[tuple[str, int], list[Bytes]] = {}
    for one in sorted(members, key=lambda one: one.shape.length):
        shape = one.shape
        keys = 0 if shape.kv_length == shape.length else shape.kv_length  # 0: as many as queries
        series.setdefault((shape.series, keys), []).append(one)
    return [_plot(members) for members in series.values()]


def _words(shape: Shape) -> str:
    shared = f" on {shape.kv_heads} KV heads" if shape.kv_heads != shape.heads else ""
    seen = f", {shape.kv_length} keys" if shape.kv_length != shape.length else ""
    seen += ", causal" if shape.causal else ""
    seen += f", window {shape.window}" if shape.window >= 0 else ""
    heads = f"{shape.heads} heads{shared} of {shape.head_dim} columns"
    return f"One layer, batch {shape.batch}, {heads}, {shape.dtype}{seen}"


def _plot(members: Sequence[Bytes]) -> str:
    title = _words(members[0].shape)
    lengths = [one.shape.length for one in members]
    sizes = [size for one in members for size in (one.ours, one.torch)]
    low = floor(log10(min(sizes)))
    high = max(low + 1, ceil(log10(max(sizes))))

    def x(length: int) -> float:
        span = log2(max(lengths) / min(lengths)) or 1.0
        return _LEFT + (_RIGHT - _LEFT) * log2(length / min(lengths)) / span

    def y(size: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * (log10(size) - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" font-family="Helvetica, Arial, sans-serif" '
        'font-size="13" fill="#333">',
        f"<title>Memory of one training step of attention: {title}</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        '<text x="20" y="26" font-size="16" font-weight="bold">Memory of one training step of '
        "attention, by sequence length</text>",
        f'<text x="20" y="46" fill="#666">{title}. Computed, not measured.</text>',
    ]
    for power in range(low, high + 1):
        at = f"{y(10.0**power):.1f}"
        parts.append(f'<path d="M{_LEFT} {at}H{_RIGHT}" stroke="#ddd"/>')
        label = f"{scaled(10.0**power)}B"
        parts.append(f'<text x="{_LEFT - 8}" y="{at}" dy="4" text-anchor="end">{label}</text>')
    for length in lengths:
        at = f"{x(length):.1f}"
        parts.append(f'<text x="{at}" y="{_BOTTOM + 22}" text-anchor="middle">{length}</text>')
    middle = (_LEFT + _RIGHT) // 2
    parts.append(f'<text x="{middle}" y="{_BOTTOM + 42}" text-anchor="middle">tokens</text>')
    lines = (
        ("PyTorch on mps", "at least ", _TORCH, [one.torch for one in members]),
        ("torch_metal_attn", "", _OURS, [one.ours for one in members]),
    )
    for name, bound, colour, values in lines:
        points = [(f"{x(n):.1f}", f"{y(v):.1f}") for n, v in zip(lengths, values, strict=True)]
        path = "L".join(" ".join(point) for point in points)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        parts += [f'<circle cx="{a}" cy="{b}" r="3.5" fill="{colour}"/>' for a, b in points]
        a, b = points[-1]
        text = f'<text x="{float(a) + 12:.1f}" y="{b}" fill="{colour}"'
        parts.append(f'{text} font-weight="bold">{name}</text>')
        parts.append(f'{text} dy="18">{bound}{scaled(values[-1])}B</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
