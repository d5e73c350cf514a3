"""`python -m torch_metal_attn bench`: times of our attention and torch's, or memory of training."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from torch_metal_attn.runtime import machine, mps
from torch_metal_attn.tools.bench import memory, versus
from torch_metal_attn.tools.bench import shapes as shape_options
from torch_metal_attn.tools.bench.shapes import BadShape, Shape, chosen
from torch_metal_attn.tools.bench.timing import add_rounds, timer_of
from torch_metal_attn.tools.progress import Progress
from torch_metal_attn.tools.text_table import markdown

__all__ = ["BadShape", "add_options", "bench"]

DEVICE = torch.device("mps")
_FORMAT = 3  # version of the JSON file's format
_STEM = "torch_metal_attn-bench"


def add_options(parser: argparse.ArgumentParser) -> None:
    shape_options.add_arguments(parser)
    add_rounds(parser)
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
        help=f"write {_STEM}.json, or the plots of --memory, to FOLDER (default: write no files)",
    )


def bench(options: argparse.Namespace) -> bool:
    """Time the chosen or the typical shapes. True if all ran on a GPU and agreed with torch."""
    typical = memory.DEFAULT_SHAPES if options.memory else shape_options.DEFAULT_SHAPES
    shapes = chosen(options) or typical
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
    described = machine.describe(DEVICE)
    print(f"metal_attn and torch's scaled_dot_product_attention on {described['chip']}.")
    print(f"Each time is the median of {options.rounds} samples; samples of the two alternate.\n")
    print(f"{versus.LEGEND}\n\n{versus.HEADING}", flush=True)
    results: list[versus.Compared] = []
    try:
        with Progress(len(shapes)) as progress:
            for shape in shapes:
                progress.step("", str(shape))
                results.append(versus.compare(shape, DEVICE, timer_of(DEVICE), options.rounds))
                torch.mps.empty_cache()  # before the next shape
                progress.say(str(results[-1]))
    finally:
        if options.folder is not None:
            data = {
                "format": _FORMAT,
                "machine": described,
                "rounds": options.rounds,
                "interrupted": len(results) < len(shapes),
                "results": [one.as_dict() for one in results],
            }
            path = options.folder / f"{_STEM}.json"
            path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
            print(f"wrote {path}")
    return all(one.agree and not one.times[versus.OURS].error for one in results)


def _memory(shapes: Sequence[Shape], folder: Path | None) -> bool:
    sizes = [memory.memory(shape) for shape in shapes]
    print(f"{memory.LEGEND}\n")
    for line in markdown(("length", "metal_attn", "torch, at least"), map(memory.row, sizes)):
        print(line)
    for number, picture in enumerate(memory.plots(sizes) if folder else ()):
        assert folder is not None
        path = folder / f"{_STEM}-memory{number or ''}.svg"
        path.write_text(picture, encoding="utf-8")
        print(f"wrote {path}")
    return True
