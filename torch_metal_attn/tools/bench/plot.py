"""PNG plots of a benchmark's JSON data. matplotlib is in the extra `bench`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch_metal_attn.tools.bench.shapes import KINDS, Shape

Point = Callable[[dict[str, Any]], float | None]
# Solid is ours and dashed torch's; colours are series.
_STYLES = {"metal_attn": "-", "torch": "--"}
_PEAKS = {"matrix": "peak matrix FLOP/s", "memory": "peak memory bandwidth"}


class NoPlots(RuntimeError):
    """matplotlib is not installed."""


def plots(data: dict[str, Any], folder: Path, stem: str) -> list[Path]:
    """Write PNG plots of the data in the JSON file; returns their paths.

    Raises NoPlots without matplotlib.
    """
    if not data["results"]:
        return []
    machine = f"{data['machine']['chip']}, torch {data['machine']['torch']}"
    figures = {
        "ratio": _figure(
            data,
            f"Speed relative to PyTorch's attention (above 1: metal_attn is faster)\n{machine}",
            {
                kind: ("PyTorch's time / metal_attn's time", {"": lambda r: r["ratio"]})
                for kind in KINDS
            },
            level=1.0,
        ),
        "ceilings": _figure(
            data,
            f"Share of the measured peak (metal_attn solid, PyTorch dashed)\n{machine}",
            {
                kind: (
                    f"% of the {_PEAKS[bound]}",
                    {name: _share(name, bound) for name in _STYLES},
                )
                for kind, bound in zip(KINDS, ("matrix", "matrix", "memory"), strict=True)
            },
            level=100.0,
        ),
    }
    paths = []
    for name, figure in figures.items():
        path = folder / f"{stem}-{name}.png"
        figure.savefig(path, dpi=120)
        paths.append(path)
    return paths


def _share(name: str, bound: str) -> Point:
    def point(result: dict[str, Any]) -> float | None:
        shares = result[name]["shares"]
        return None if shares is None else 100 * shares[bound]

    return point


def _figure(
    data: dict[str, Any],
    title: str,
    panels: dict[str, tuple[str, dict[str, Point]]],
    level: float,
) -> Any:
    """A panel for each kind that was measured, with a line for shapes that differ only in length.

    panels: for each kind the words of the vertical axis, and its points by the line's name. level:
    a horizontal line to compare with.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
        from matplotlib.ticker import FuncFormatter
    except ImportError as error:
        raise NoPlots(f"{error.name} is not installed") from error
    kinds = [kind for kind in panels if any(r["shape"]["kind"] == kind for r in data["results"])]
    figure = Figure(figsize=(5.6 * len(kinds), 5.2), layout=ConstrainedLayoutEngine(w_pad=0.15))
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots(1, len(kinds), squeeze=False)[0]
    for axis, kind in zip(axes, kinds, strict=True):
        words, lines = panels[kind]
        highest = level
        for index, (series, results) in enumerate(_series(data, kind).items()):
            for name, point in lines.items():
                points = [(_length(result), point(result)) for result in results]
                known = [(x, y) for x, y in points if y is not None]
                highest = max([highest, *(y for _, y in known)])
                axis.plot(
                    *zip(*known, strict=True) if known else ([], []),
                    _STYLES.get(name, "-"),
                    marker="o",
                    markersize=4,
                    color=f"C{index}",
                    label=series if name in ("", "metal_attn") else None,
                )
        axis.axhline(level, color="grey", linewidth=0.8, linestyle=":")
        lengths = sorted({_length(r) for r in data["results"] if r["shape"]["kind"] == kind})
        axis.set_xscale("log", base=2)
        axis.set_xlim(lengths[0] / 1.2, lengths[-1] * 1.2)  # also where no shape has a point
        axis.set_xticks(lengths, minor=False)
        # Without a point there is nothing that a logarithmic axis can take its limits from.
        axis.set_xlim(lengths[0] / 1.2, lengths[-1] * 1.2)
        axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))
        axis.set_ylim(0, 1.08 * highest)
        axis.set_title(kind)
        axis.set_xlabel("keys")
        axis.set_ylabel(words)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    return figure


def _series(data: dict[str, Any], kind: str) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for result in data["results"]:
        if result["shape"]["kind"] == kind:
            found.setdefault(Shape(**result["shape"]).series, []).append(result)
    return {name: sorted(results, key=_length) for name, results in found.items()}


def _length(result: dict[str, Any]) -> int:
    length: int = result["shape"]["kv_length"]
    return length
