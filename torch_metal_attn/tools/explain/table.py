"""The rows of a model's explanation, and their table.

Layers whose paths differ only by numbers share a line.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch_metal_attn.tools.costs import Cost, scaled
from torch_metal_attn.tools.explain.ops import Explanation, Kernel, shown
from torch_metal_attn.tools.text_table import aligned
from torch_metal_attn.wording import count_text

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole part of a module's path
_LEGEND = (
    "FLOP: of matrix products. bytes: of device memory. Both are minimums, for all calls of a line."
)


@dataclass(frozen=True)
class LayerCall:
    """A call of attention or of another op of ours.

    Attributes: layer: the path of the innermost module that made the call. op: the name of our op
        or torch's. shapes: of q and of the keys, (B, Hq, Lq, D) and (B, Hkv, Lk, D), or of the op's
        first tensor. explanation: for an op of ours; its refusal is the error that the call would
        raise. elsewhere: what runs instead of our op, "" for an op of ours. cost: the fewest FLOPs
        and bytes that the call needs, or None if they are not known. copied: tensors that were
        copied for the call because their rows were not contiguous; the cost includes the copies.
        notes: remarks of an integration, such as the bytes that expanded keys would have.
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


def text(model: str, rows: Sequence[LayerCall], stopped: str | None) -> str:
    """The table. Lines have at most 100 columns, unless names are longer."""
    ours = [row for row in rows if not row.elsewhere]
    refused = sum(row.refusal is not None for row in ours)
    backends = sorted({row.explanation.backend for row in ours if row.explanation} - {""})
    where = f" on {', '.join(backends)}" if backends else ""
    lines = [
        f"{model}: {count_text(len(ours), 'call')} of metal_attn{where}, {refused} of them "
        f"refused; {len(rows) - len(ours)} attentions elsewhere"
    ]
    table: list[tuple[str, ...]] = [
        ("layers", "calls", "kernels", "q x keys", "grid", "tg bytes", "FLOP", "bytes")
    ]
    notes: list[list[str]] = [[]]
    for group in _groups(rows):
        cells, note = _line(group)
        table.append(cells)
        notes.append(note)
    if rows:
        total = known_cost(rows)
        blanks = ("", "", "", "")
        table.append(("all", str(len(rows)), *blanks, scaled(total.flops), scaled(total.bytes)))
        notes.append([])
        lines += ["", *aligned(table, notes, numbers=(1, 5, 6, 7), indent=4)]
        lines += ["", _LEGEND]
        if backends == ["reference"]:
            lines.append("CPU tensors run the kernels only inside simulate().")
    if stopped is not None:
        lines.append(f"stopped in {stopped}")
    return "\n".join(lines)


def _groups(rows: Sequence[LayerCall]) -> list[list[LayerCall]]:
    """Rows that run the same kernels, in layers whose paths differ only by numbers, in order."""
    groups: dict[tuple[object, ...], list[LayerCall]] = {}
    for row in rows:
        kernels = tuple(
            (name, tuple(kernel.specialisation.items())) for name, kernel in row.kernels.items()
        )
        call = _NUMBER.sub("#", row.layer), row.op, row.elsewhere, row.refusal
        groups.setdefault((*call, kernels, row.copied, row.notes), []).append(row)
    return list(groups.values())


def _line(group: list[LayerCall]) -> tuple[tuple[str, ...], list[str]]:
    first = group[0]
    cost = known_cost(group)
    known = all(row.cost is not None for row in group)
    kernels = list(first.kernels.values())
    grids = {"+".join("x".join(map(str, k.grid)) for k in row.kernels.values()) for row in group}
    cells = (
        _layers([row.layer for row in group]),
        str(len(group)),
        " + ".join(first.kernels) or ("-" if first.elsewhere else first.op),
        _lengths(group),
        grids.pop() if len(grids) == 1 else "various",
        "+".join(str(kernel.threadgroup_bytes) for kernel in kernels) or "-",
        scaled(cost.flops) if known else "-",
        scaled(cost.bytes) if known else "-",
    )
    notes = [shown(kernel.specialisation) for kernel in kernels]
    notes += [f"in {k.pieces} command buffers" for k in kernels if k.pieces > 1]
    choices = {kernel.choice for kernel in kernels} - {"", "default"}
    notes += [f"tile: {choice}" for choice in sorted(choices)]
    if first.elsewhere:
        notes.append(f"not metal_attn: {first.elsewhere}")
    notes += [f"copied first: {copied}" for copied in first.copied]
    notes += first.notes
    if first.refusal is not None:
        notes.append(f"refused: {first.refusal}")
    return cells, notes


def _layers(paths: list[str]) -> str:
    """One path with ranges of numbers: model.layers.{0-31}.self_attn."""
    numbers = [[int(number) for number in _NUMBER.findall(path)] for path in paths]
    ranges = iter([_ranges(sorted(set(position))) for position in zip(*numbers, strict=True)])
    return _NUMBER.sub(lambda _: next(ranges), paths[0])


def _ranges(numbers: list[int]) -> str:
    """0, 1, 2, 5 becomes {0-2,5}; a single number has no braces."""
    runs = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        values = [number for _, number in run]
        runs.append(str(values[0]) if len(values) == 1 else f"{values[0]}-{values[-1]}")
    return runs[0] if len(numbers) == 1 else "{" + ",".join(runs) + "}"


def _lengths(group: list[LayerCall]) -> str:
    sizes = []
    for row in group:
        if row.elsewhere and len(row.shapes) == 1:  # the shape of scores
            sizes.append(row.shapes[0][-2:])
            continue
        ours = not row.elsewhere  # three dimensions are then (T, H, D)
        sizes.append(tuple(shape[0 if ours and len(shape) == 3 else -2] for shape in row.shapes))
    if len({len(size) for size in sizes}) != 1:
        return "various"
    return " x ".join(
        str(min(column)) if len(set(column)) == 1 else f"{min(column)}-{max(column)}"
        for column in zip(*sizes, strict=True)
    )
