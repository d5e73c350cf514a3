"""`python -m torch_metal_attn bench`: our attention next to torch's, on the user's machine.

On mps it measures times, and in the same run the machine's ceilings. Elsewhere the simulator counts
what the kernels do. A shape that runs on tensor tiles is measured on 8x8 tiles too. --out also
writes a JSON file and, if matplotlib is installed, plots.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from torch_metal_attn.runtime import machine
from torch_metal_attn.runtime.device import best_device
from torch_metal_attn.tools.bench import counts, plot, versus
from torch_metal_attn.tools.bench.run import measured
from torch_metal_attn.tools.bench.shapes import (
    IN_THE_SIMULATOR,
    ON_A_GPU,
    BadShape,
    Shape,
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
    shapes: Sequence[Shape], device: torch.device, rounds: int, described: dict[str, str]
) -> tuple[dict[str, Any], bool]:
    print(f"metal_attn and torch's scaled_dot_product_attention on {described['chip']}.")
    print(f"Each time is the median of {rounds} samples; the two take turns.\n")
    print(f"{versus.LEGEND}\n\n{versus.HEADING}", flush=True)
    compare = versus.Comparison(device, timer_of(device), rounds)
    found = measured(shapes, compare)
    print()
    for dtype, ceilings in compare.ceilings.items():
        print(
            f"ceilings in {dtype}: {scaled(ceilings.flops)}FLOP/s, {scaled(ceilings.bytes)}byte/s"
        )
    for dtype, why in compare.trouble.items():
        print(f"no ceilings in {dtype}: {why}")
    good = all(one.agree and not one.times[versus.OURS].error for one in found.rows)
    data = found.as_dict(
        "times",
        described,
        rounds=rounds,
        ceilings={dtype: asdict(ceilings) for dtype, ceilings in compare.ceilings.items()},
        ceilings_missing=compare.trouble,
    )
    return data, good


def _counts(shapes: Sequence[Shape], described: dict[str, str]) -> tuple[dict[str, Any], bool]:
    print("No Apple GPU here, so nothing is timed: the simulator counts what the kernels do.")
    print(f"A shape of more than {scaled(counts.LIMIT)}FLOP is reduced first, and its row says so.")
    print(f"\n{counts.LEGEND}\n\n{counts.HEADING}", flush=True)
    found = measured(shapes, counts.count)
    print()
    return found.as_dict("counts", described), not any(one.error for one in found.rows)


def _write(data: dict[str, Any], folder: Path) -> None:
    path = folder / f"{_STEM}.json"
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")
    try:
        for picture in plot.plots(data, folder, _STEM):
            print(f"wrote {picture}")
    except plot.NoPlots as error:
        print(f"no plots: {error}; pip install 'torch_metal_attn[bench]'")
