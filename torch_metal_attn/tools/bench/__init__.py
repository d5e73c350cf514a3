"""`python -m torch_metal_attn bench`: our attention next to torch's, on the user's machine.

It measures times, and in the same run the machine's ceilings. A shape that runs on tensor tiles is
measured on 8x8 tiles too. --out also writes a JSON file and, if matplotlib is installed, plots.
--memory shows the bytes of training steps instead, which needs no GPU.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from torch_metal_attn.runtime import machine, mps
from torch_metal_attn.tools.bench import memory, plot, versus
from torch_metal_attn.tools.bench.shapes import (
    DEFAULT_SHAPES,
    BadShape,
    Shape,
    add_arguments,
    chosen,
    with_8x8_tiles,
)
from torch_metal_attn.tools.bench.timing import timer_of
from torch_metal_attn.tools.costs import scaled
from torch_metal_attn.tools.progress import Progress
from torch_metal_attn.tools.text_table import markdown
from torch_metal_attn.wording import count_text

__all__ = ["BadShape", "add_options", "bench"]

_FORMAT = 2  # of the JSON file; a reader can refuse those that it does not know
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
        "--memory",
        action="store_true",
        help="show the memory of a training step of each shape, ours and torch's, computed without "
        "running it",
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
    """Time the chosen shapes, or a few typical ones; True if all ran and agreed with torch.

    False without a GPU. Raises BadShape, OSError if --out cannot be made, or KeyboardInterrupt
    after it has written what was measured before.
    """
    shapes = chosen(options) or (memory.DEFAULT_SHAPES if options.memory else DEFAULT_SHAPES)
    if options.rounds < 1:
        raise BadShape(f"--rounds is {options.rounds}; it must be above 0")
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    if options.memory:
        return _memory(shapes, options.folder)
    problem = mps.problem()
    if problem:
        print(f"bench times an Apple GPU, and mps cannot be used here: {problem}", file=sys.stderr)
        return False
    device = torch.device("mps")
    described = machine.describe(device)
    print(f"metal_attn and torch's scaled_dot_product_attention on {described['chip']}.")
    print(f"Each time is the median of {options.rounds} samples; the two take turns.\n")
    print(f"{versus.LEGEND}\n\n{versus.HEADING}", flush=True)
    compare = versus.Comparison(device, timer_of(device), options.rounds)
    found, interrupted = measured(with_8x8_tiles(shapes), compare)
    print()
    for dtype, ceilings in compare.ceilings.items():
        print(
            f"ceilings in {dtype}: {scaled(ceilings.flops)}FLOP/s, {scaled(ceilings.bytes)}byte/s"
        )
    for dtype, why in compare.trouble.items():
        print(f"no ceilings in {dtype}: {why}")
    if interrupted:
        print(f"interrupted after {count_text(len(found), 'shape')}")
    if options.folder is not None:
        _write(as_dict(found, compare, described, options.rounds, interrupted), options.folder)
    if interrupted:
        raise KeyboardInterrupt
    return all(one.agree and not one.times[versus.OURS].error for one in found)


def _memory(shapes: Sequence[Shape], folder: Path | None) -> bool:
    """Print the bytes of each shape, and plot them into the folder."""
    found = [memory.memory(shape) for shape in shapes]
    print(f"{memory.LEGEND}\n")
    for line in markdown(("length", "metal_attn", "torch, at least"), map(memory.row, found)):
        print(line)
    for number, picture in enumerate(memory.plots(found) if folder else ()):
        assert folder is not None
        path = folder / f"{_STEM}-memory{number or ''}.svg"
        path.write_text(picture, encoding="utf-8")
        print(f"wrote {path}")
    return True


def measured(
    shapes: Sequence[Shape], compare: Callable[[Shape], versus.Compared]
) -> tuple[list[versus.Compared], bool]:
    """Measure each shape, and print its row when it is there; also whether that was interrupted."""
    found: list[versus.Compared] = []
    try:
        with Progress(len(shapes)) as progress:
            for shape in shapes:
                progress.step("", str(shape))
                found.append(compare(shape))
                progress.say(str(found[-1]))
    except KeyboardInterrupt:
        return found, True
    return found, False


def as_dict(
    found: Sequence[versus.Compared],
    compare: versus.Comparison,
    described: dict[str, str],
    rounds: int,
    interrupted: bool,
) -> dict[str, Any]:
    """Plain data for the JSON file."""
    return {
        "format": _FORMAT,
        "machine": described,
        "rounds": rounds,
        "ceilings": {dtype: asdict(ceilings) for dtype, ceilings in compare.ceilings.items()},
        "ceilings_missing": compare.trouble,
        "interrupted": interrupted,
        "results": [one.as_dict() for one in found],
    }


def _write(data: dict[str, Any], folder: Path) -> None:
    path = folder / f"{_STEM}.json"
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")
    try:
        for picture in plot.plots(data, folder, _STEM):
            print(f"wrote {picture}")
    except plot.NoPlots as error:
        print(f"no plots: {error}; pip install 'torch_metal_attn[bench]'")
