"""What `doctor` says at the end."""

from collections import Counter
from textwrap import wrap

import torch

from torch_metal_attn import mps
from torch_metal_attn.doctor.attention import OURS, Attention
from torch_metal_attn.doctor.torch_on_mps import UNFUSED
from torch_metal_attn.explanation.ops import scaled

_WIDTH = 100
_NONE = (
    "No attention was seen. It may run in another process, in a C++ program or a TorchScript, or "
    "in operations that are not known here."
)


def text(name: str, seen: Counter[Attention], compiled: bool) -> str:
    """Lines of at most 100 columns, unless names are longer."""
    here = (
        "" if mps.available() else "; no mps here: CPU tensors ran, and this is what mps would do"
    )
    lines = [f"doctor: attention of {name}, torch {torch.__version__}{here}"]
    if compiled:
        lines.append("torch.compile was off in this run, so that its calls are seen.")
    if not seen:
        return "\n".join([*lines, *wrap(_NONE, _WIDTH)])
    table: list[tuple[str, ...]] = [
        ("calls", "query and key, or scores", "dtype", "goes to", "scores of a call")
    ]
    notes: list[list[str]] = [[]]
    for attention, calls in sorted(seen.items(), key=_largest):
        size = f"{scaled(attention.scores_bytes)}B" if attention.scores_bytes else "none held"
        shapes = " x ".join(map(str, attention.shapes))
        dtype = str(attention.dtype).removeprefix("torch.")
        table.append((str(calls), shapes, dtype, attention.goes_to, size))
        notes.append(_notes(attention))
    lines += ["", *_aligned(table, notes), "", _sum(seen)]
    if any(attention.goes_to == UNFUSED for attention in seen):
        lines += wrap(
            "scores: the memory of one array of them, by its shape. It was not measured, and torch "
            "may hold more than one, or one for a part of the queries at a time.",
            _WIDTH,
        )
    return "\n".join(lines)


def _largest(item: tuple[Attention, int]) -> tuple[bool, int, str]:
    """Those that hold most scores come first, and ours last."""
    attention, _ = item
    return attention.goes_to == OURS, -attention.scores_bytes, attention.place


def _notes(attention: Attention) -> list[str]:
    called = f"called in {attention.place}"
    notes = [f"{attention.options}, {called}" if attention.options else called]
    notes += [f"why: {attention.why}"] if attention.why else []
    notes += [f"to run it on metal_attn: {attention.change}"] if attention.change else []
    return notes


def _sum(seen: Counter[Attention]) -> str:
    calls: Counter[str] = Counter()
    for attention, count in seen.items():
        calls[attention.goes_to] += count
    return f"{seen.total()} calls: " + "; ".join(f"{name}: {n}" for name, n in calls.most_common())


def _aligned(table: list[tuple[str, ...]], notes: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for cells, below in zip(table, notes, strict=True):
        first, *rest = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        lines.append("  ".join([first.strip().rjust(widths[0]), *rest]).rstrip())
        for note in below:
            lines += [f"       {line}" for line in wrap(note, _WIDTH - 7, break_on_hyphens=False)]
    return lines
