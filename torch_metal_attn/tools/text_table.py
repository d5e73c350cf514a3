"""Tables for a terminal, and in Markdown."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from textwrap import wrap
from typing import Any

WIDTH = 100


def aligned(
    table: Sequence[tuple[str, ...]],
    notes: Sequence[Sequence[str]],
    numbers: Collection[int],
    indent: int,
) -> list[str]:
    """Aligned rows, each followed by its wrapped notes. Columns in `numbers` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for cells, below in zip(table, notes, strict=True):
        padded = [
            cell.rjust(width) if i in numbers else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
        for note in below:
            wrapped = wrap(note, WIDTH - indent, break_on_hyphens=False)
            lines += [" " * indent + line for line in wrapped]
    return lines


def markdown(
    headings: Sequence[str], rows: Iterable[Sequence[Any]], numbers: Collection[int] = ()
) -> Iterator[str]:
    """Yields the lines of a Markdown table, each as soon as `rows` yields its row."""
    yield f"| {' | '.join(headings)} |"
    yield f"| {' | '.join('---:' if i in numbers else '---' for i in range(len(headings)))} |"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"
