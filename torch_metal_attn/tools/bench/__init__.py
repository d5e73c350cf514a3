"""`python -m torch_metal_attn bench`: our attention next to torch's, on the user's machine.

On mps it measures times, and in the same run the machine's ceilings. Elsewhere the simulator counts
what the kernels do. A shape that runs on tensor tiles is measured on 8x8 tiles too. --out also
writes a JSON file and, if matplotlib is installed, plots.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from torch_metal_attn.runtime import machine
from torch_metal_attn.runtime.device import best_device
from torch_metal_attn.tools.bench import plot, report
from torch_metal_attn.tools.bench.counts import LIMIT
from torch_metal_attn.tools.bench.run import (
    HEADING_OF_COUNTS,
    HEADING_OF_TIMES,
    LEGEND_OF_COUNTS,
    LEGEND_OF_TIMES,
    count_shapes,
    time_shapes,
)
from torch_metal_attn.tools.bench.shapes import (
    IN_THE_SIMULATOR,
    ON_A_GPU,
    BadShape,
    add_arguments,
    chosen,
    with_8x8_tiles,
)
from torch_metal_attn.tools.bench.timing import timer_of
from torch_metal_attn.tools.costs import scaled

__all__ = ["BadShape", "add_options", "bench"]

_ROUNDS = 15
_STEM = "torch_metal_attn-bench"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_arguments(parser)
    parser.add_argument(
        "--rounds",
        type=int,
        default=_ROUNDS,
        metavar="N",
        help=f"samples of each time (default: {_ROUNDS})",
    )
    parser.add_argument(
        "--out",
        "--output",
        dest="folder",
        type=Path,
        metavar="FOLDER",
        help=f"write {_STEM}.json and plots to FOLDER (default: write no files)",
    )


def bench(options: argparse.Namespace) -> bool:
    """Measure the chosen shapes, or a few typical ones; True if all ran and agreed with torch.

    Raises BadShape, OSError if --out cannot be made, or KeyboardInterrupt after it has written what
    was measured before.
    """
    shapes = chosen(options)
    if options.rounds < 1:
        raise BadShape(f"--rounds is {options.rounds}; it must be above 0")
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    with best_device() as device:
        described = machine.describe(device)
        if device.type == "mps":
            shapes = with_8x8_tiles(shapes or ON_A_GPU)
            data, good = _times(shapes, device, options.rounds, described)
        else:
            data, good = _counts(with_8x8_tiles(shapes or IN_THE_SIMULATOR), described)
    if data["interrupted"]:
        print(f"interrupted after {len(data['results'])} shapes")
    if options.folder is not None:
        _write(data, options.folder)
    if data["interrupted"]:
        raise KeyboardInterrupt
    return good


def _times(
    shapes: Any, device: torch.device, rounds: int, described: dict[str, str]
) -> tuple[dict[str, Any], bool]:
    print(f"metal_attn and torch's scaled_dot_product_attention on {described['chip']}.")
    print(f"Each time is the median of {rounds} samples; the two take turns.\n")
    print(f"{LEGEND_OF_TIMES}\n")
    print(HEADING_OF_TIMES, flush=True)
    timed = time_shapes(shapes, device, timer_of(device), rounds, _say)
    print()
    for dtype, found in timed.ceilings.items():
        print(f"ceilings in {dtype}: {scaled(found.flops)}FLOP/s, {scaled(found.bytes)}byte/s")
    for dtype, why in timed.trouble.items():
        print(f"no ceilings in {dtype}: {why}")
    good = all(one.agree and not one.times["metal_attn"].error for one in timed.compared)
    return report.of_times(timed, described), good and not timed.interrupted


def _counts(shapes: Any, described: dict[str, str]) -> tuple[dict[str, Any], bool]:
    print("No Apple GPU here, so nothing is timed: the simulator counts what the kernels do.")
    print(f"A shape of more than {scaled(LIMIT)}FLOP is reduced first, and its row says so.\n")
    print(f"{LEGEND_OF_COUNTS}\n")
    print(HEADING_OF_COUNTS, flush=True)
    found = count_shapes(shapes, _say)
    print()
    good = not any(one.error for one in found.counted)
    return report.of_counts(found, described), good and not found.interrupted


def _write(data: dict[str, Any], folder: Path) -> None:
    path = folder / f"{_STEM}.json"
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")
    try:
        for picture in plot.plots(data, folder, _STEM):
            print(f"wrote {picture}")
    except plot.NoPlots as error:
        print(f"no plots: {error}; pip install 'torch_metal_attn[bench]'")


def _say(line: str) -> None:
    print(line, flush=True)
