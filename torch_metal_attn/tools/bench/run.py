"""Measures shapes one after another. An interrupt keeps what was measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch_metal_attn.tools.bench.shapes import Shape
from torch_metal_attn.tools.progress import Progress

FORMAT = 1  # of the JSON file; a reader can refuse those that it does not know


class Row(Protocol):
    """What was measured of a shape: the lines that are printed, and plain data."""

    def __str__(self) -> str: ...

    def as_dict(self) -> dict[str, Any]: ...


@dataclass
class Results:
    """The rows of the shapes that were measured. interrupted: whether some are missing."""

    rows: list[Any] = field(default_factory=list)
    interrupted: bool = False

    def as_dict(self, what: str, machine: dict[str, str], **about: Any) -> dict[str, Any]:
        """Plain data for a JSON file. what: "times" or "counts"."""
        return {
            "format": FORMAT,
            "what": what,
            "machine": machine,
            **about,
            "interrupted": self.interrupted,
            "results": [row.as_dict() for row in self.rows],
        }


def measured(shapes: Sequence[Shape], measure: Callable[[Shape], Row]) -> Results:
    """Measure each shape, and print its row when it is there."""
    found = Results()
    progress = Progress(len(shapes))
    try:
        for shape in shapes:
            progress.step("", str(shape))
            found.rows.append(measure(shape))
            progress.end()
            print(found.rows[-1], flush=True)
    except KeyboardInterrupt:
        found.interrupted = True
    progress.end()
    return found
