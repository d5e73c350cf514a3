"""Measures shapes one after another. An interrupt keeps what was measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from torch_metal_attn.tools.bench import ceilings
from torch_metal_attn.tools.bench.ceilings import Ceilings
from torch_metal_attn.tools.bench.counts import Counted, count
from torch_metal_attn.tools.bench.shapes import DTYPES, Shape
from torch_metal_attn.tools.bench.timing import Timer
from torch_metal_attn.tools.bench.versus import Compared, compare
from torch_metal_attn.tools.progress import Progress


@dataclass
class Timed:
    """Times on a device.

    Attributes: ceilings: by dtype, those that could be measured. trouble: why others could not.
        interrupted: whether shapes are missing.
    """

    rounds: int
    compared: list[Compared] = field(default_factory=list)
    ceilings: dict[str, Ceilings] = field(default_factory=dict)
    trouble: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False


@dataclass
class CountedShapes:
    """Counts from the simulator. interrupted: whether shapes are missing."""

    counted: list[Counted] = field(default_factory=list)
    interrupted: bool = False


def time_shapes(
    shapes: Sequence[Shape],
    device: torch.device,
    timer: Timer,
    rounds: int,
    say: Callable[[str], None],
    measure_ceilings: Callable[..., Ceilings] | None = None,
) -> Timed:
    """Measure the ceilings of the dtypes, then time each shape; `say` prints its line."""
    measure_ceilings = measure_ceilings or ceilings.measure
    timed = Timed(rounds)
    dtypes = list(dict.fromkeys(shape.dtype for shape in shapes))
    progress = Progress(len(dtypes) + len(shapes))
    try:
        for dtype in dtypes:
            progress.step("measuring the ceilings", dtype)
            try:
                found = measure_ceilings(DTYPES[dtype], device, timer, rounds)
            except RuntimeError as error:
                timed.trouble[dtype] = str(error)
            else:
                timed.ceilings[dtype] = found
        for shape in shapes:
            progress.step("", str(shape))
            timed.compared.append(compare(shape, device, timer, rounds))
            progress.end()
            say(line_of_times(timed.compared[-1], timed.ceilings.get(shape.dtype)))
            if device.type == "mps":  # leave no memory of this shape to the next
                torch.mps.empty_cache()
    except KeyboardInterrupt:
        timed.interrupted = True
    progress.end()
    return timed


def count_shapes(shapes: Sequence[Shape], say: Callable[[str], None]) -> CountedShapes:
    """Count each shape; `say` prints its line."""
    found = CountedShapes()
    progress = Progress(len(shapes))
    try:
        for shape in shapes:
            progress.step("", str(shape))
            found.counted.append(count(shape))
            progress.end()
            say(line_of_counts(found.counted[-1]))
    except KeyboardInterrupt:
        found.interrupted = True
    progress.end()
    return found


_WIDTH = 56  # of a shape
LEGEND_OF_TIMES = """\
ours, torch  milliseconds a call
ratio        torch's time divided by ours: above 1, ours is faster
matrix       our FLOP/s as a share of what a large matrix product reaches on this machine
memory       our bytes a second as a share of what a large copy reaches on this machine"""
LEGEND_OF_COUNTS = """\
GFLOP   of matrix operations, and that divided by the least that the shape needs
MB      moved to and from device memory, and that divided by the least
For each 32 keys and 8 queries of a head:
MMA     8x8 matrix operations of a SIMD group
device  a thread's loads from device memory
tg      a thread's loads from threadgroup memory
exps    a thread's exponentials"""
HEADING_OF_TIMES = (
    f"{'shape':<{_WIDTH}} {'ours, ms':>10} {'torch, ms':>10} {'ratio':>6}  "
    f"{'matrix':>6} {'memory':>6}"
)
HEADING_OF_COUNTS = (
    f"{'shape':<{_WIDTH}} {'GFLOP':>8} {'/least':>6} {'MB':>8} {'/least':>6}  "
    f"{'MMA':>5} {'device':>6} {'tg':>5} {'exps':>5}"
)


def line_of_times(found: Compared, ceilings: Ceilings | None) -> str:
    """Medians, torch's divided by ours, and our share of both ceilings."""
    cells = []
    for times in found.times.values():
        cells.append(f"{'-' if times.error else f'{times.median * 1e3:.3f}':>10}")
    cells.append(f"{'-' if found.ratio is None else f'{found.ratio:.2f}':>6} ")
    shares = None if ceilings is None else found.shares("metal_attn", ceilings)
    for name in ("matrix", "memory"):
        cells.append(f"{'-' if shares is None else f'{shares[name]:.0%}':>6}")
    lines = [f"{found.shape!s:<{_WIDTH}} " + " ".join(cells)]
    for name, times in found.times.items():
        if times.error:
            lines.append(f"    {name}: {times.error.splitlines()[0]}")
    if not found.agree:
        lines.append(f"    the results differ by {found.difference:.2e}: run `verify --full`")
    return "\n".join(lines)


def line_of_counts(found: Counted) -> str:
    """Operations and bytes, each also relative to the fewest, and the counts of a block.

    A shape that is too large for the simulator shows the smaller one that was counted, and says so.
    """
    if found.error:
        return f"{found.shape!s:<{_WIDTH}} {found.error.splitlines()[0]}"
    block = found.per_block()
    line = (
        f"{found.on!s:<{_WIDTH}} {found.flops / 1e9:8.3f} {found.flops_share:6.2f} "
        f"{found.device_bytes / 1e6:8.3f} {found.bytes_share:6.2f}  "
        f"{block['matrix operations']:5.0f} {block['device loads']:6.1f} "
        f"{block['threadgroup loads']:5.1f} {block['exps']:5.1f}"
    )
    if found.on != found.shape:
        line += f"  reduced from {found.shape}"
    return line
