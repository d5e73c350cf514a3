"""Times the tiles of a shape's kernels, and torch's attention in the same run."""

import ctypes
import functools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from torch_metal_attn.testing.case import Case
from torch_metal_attn.testing.features import attention
from torch_metal_attn.testing.running import FAILED, run
from torch_metal_attn.tools.bench.shapes import BadShape, Shape
from torch_metal_attn.tools.bench.timing import Timer, interleaved
from torch_metal_attn.tools.bench.versus import OURS, TORCHS, calls_of
from torch_metal_attn.tools.explain.command import explained
from torch_metal_attn.tools.explain.ops import Kernel
from torch_metal_attn.tools.tune import pipelines
from torch_metal_attn.tuned import tables, tiles
from torch_metal_attn.tuned.tables import TORCH, Row

# A tile of another size than these lengths has edges to get wrong, and several blocks of keys.
_CHECKED = {"q_length": 70, "kv_length": 133}
_CHECKED_DECODE = {"kv_length": 300, "num_splits": 2}
_MOST_QUERIES = 16

_LEAST_ROUNDS = 5  # where a tile is timed again: fewer say nothing of their error
WRONG = "its result is wrong"


def kernels_of(shape: Shape, device: torch.device) -> dict[str, Kernel]:
    """The kernels whose tiles can be chosen, by name. Raises BadShape for a refused shape."""
    found = explained(shape, device)
    if found.refusal is not None:
        raise BadShape(f"no kernel takes the shape {shape}: {found.refusal}")
    every = dict(found.kernels)
    if found.training is not None:
        every |= found.training.kernels
    return {name: kernel for name, kernel in every.items() if kernel.candidates}


def measure(
    shape: Shape, device: torch.device, timer: Timer, rounds: int
) -> Iterator[tuple[str, list[Row]]]:
    """Time the tiles of each kernel of a shape, by its name, then a whole call beside torch's.

    Rows of a kernel begin with the default tile. Raises RuntimeError if there is no memory.
    """
    with tiles.forced({}):
        kernels = kernels_of(shape, device)
    forwards, whole = calls_of(shape, device)
    best: dict[str, str] = {}
    for name, kernel in kernels.items():
        call = _call_of(name, shape, forwards[OURS], device)
        rows: dict[str, Row] = {}
        left_out: dict[str, str] = {}
        for tile in kernel.candidates:
            why, note = _tried(shape, device, name, tile)
            rows[tile] = Row(kernel.key, str(shape), tile, default=not rows, note=note)
            if why:
                left_out[tile] = why
        with tiles.forced({}):
            found = _timed(name, rows, left_out, call, timer, rounds)
        best[name] = tables.fastest(found) or kernel.candidates[0]
        yield name, found
    with tiles.forced(best):
        times = interleaved(whole, timer, rounds)
    row = Row(next(iter(kernels.values())).key, str(shape), TORCH)
    errors = [f"{name}: {one.error.splitlines()[0]}" for name, one in times.items() if one.error]
    if errors:
        row = replace(row, note=", ".join(errors))
    else:
        torchs = times[TORCHS].median
        row = replace(row, seconds=torchs, share=torchs / times[OURS].median)
    yield "whole call", [row]


def _tried(shape: Shape, device: torch.device, kernel: str, tile: str) -> tuple[str, str]:
    """Why a tile is left out that does not compile, cannot run or is wrong; and its pipeline."""
    with tiles.forced({kernel: tile}):
        pipeline = None
        if _compiled_by_metal(device):
            found = kernels_of(shape, device)[kernel]
            pipeline, trouble = pipelines.inspect(kernel, found.specialisation, found.threads[0])
            if trouble:
                return trouble, ""
        result = run(_check_of(shape, kernel), device)
    if result.status == FAILED:
        bad = [m for m in result.measures if not m.ok]
        words = [f"{m.what} is off by {m.error:.1e}, allowed {m.bound:.1e}" for m in bad]
        return f"{WRONG}: {', '.join(words)}", ""
    return result.message.split("\n")[0], str(pipeline or "")


def _compiled_by_metal(device: torch.device) -> bool:
    return device.type == "mps"


def _check_of(shape: Shape, kernel: str) -> Case:
    """The kernel on a small problem with the shape's dtype, head dim and mask."""
    sizes: dict[str, Any] = {"head_dim": shape.head_dim, "kv_heads": 1}
    group = shape.heads // shape.kv_heads
    if kernel == "flash_decode":
        rows = {"q_length": min(shape.length, _MOST_QUERIES)}
        sizes |= {"heads": group, **rows, **_CHECKED_DECODE}
        feature = "causal window" if shape.window >= 0 else "plain"
    else:
        sizes |= {"heads": min(group, 2), **_CHECKED}
        windows = "causal window" if shape.causal else "window"
        feature = windows if shape.window >= 0 else "causal" if shape.causal else "plain"
    backward = kernel.startswith("flash_bwd")
    call = "flash_decode" if kernel == "flash_decode" else "flash_fwd"
    return attention(call=call, dtype=shape.dtype, feature=feature, backward=backward, **sizes)


def _call_of(
    kernel: str, shape: Shape, forward: Callable[[], object], device: torch.device
) -> Callable[[], object]:
    """The op that runs the kernel, on the shape's operands."""
    if not kernel.startswith("flash_bwd"):
        return forward
    q, k, v = (x.detach() for x in shape.operands(device))
    out, lse = torch.ops.metal_attn.flash_fwd(q, k, v, **shape.options)
    dout = torch.randn_like(out)
    return functools.partial(
        torch.ops.metal_attn.flash_bwd,
        *(dout, None, q, k, v, out, lse),
        exact_delta=True,
        **shape.options,
    )


def _timed(
    kernel: str,
    rows: Mapping[str, Row],
    left_out: dict[str, str],
    call: Callable[[], object],
    timer: Timer,
    rounds: int,
) -> list[Row]:
    """The rows, by tile and the default one first, with the times of those not in `left_out`.

    Noise alone makes one of many tiles look fastest. So each tile that looks faster than the
    default, the fastest first, is timed again in turns with it alone, until one is faster again.
    """

    def run_with(table: ctypes.c_void_p | None) -> None:
        tiles.use(table)
        with torch.no_grad():
            call()

    calls = {
        tile: functools.partial(run_with, tiles.make([(kernel, tile, tiles.FORCED)]))
        for tile in rows
    }
    errors: dict[str, float] = {}

    def timed(some: list[str], rounds: int) -> dict[str, tuple[float, ...]]:
        """Those that raised are left out."""
        found = interleaved({tile: calls[tile] for tile in some}, timer, rounds)
        left_out.update({t: one.error.splitlines()[0] for t, one in found.items() if one.error})
        return {tile: one.seconds for tile, one in found.items()}

    found = timed([tile for tile in rows if tile not in left_out], rounds)
    seconds = {t: statistics.median(one) for t, one in found.items() if t not in left_out}
    default = next(iter(rows))
    base = seconds.get(default) or max(seconds.values(), default=1.0)
    shares = {tile: one / base for tile, one in seconds.items()}
    faster = [t for t in shares if default in seconds and shares[t] <= 1 - tables.LEAST_GAIN]
    for tile in sorted(faster, key=shares.__getitem__):
        found = timed([default, tile], max(rounds, _LEAST_ROUNDS))
        if default in left_out:
            break
        if tile in left_out:
            continue
        each = [one / base for one, base in zip(found[tile], found[default], strict=True)]
        shares[tile] = statistics.mean(each)
        errors[tile] = statistics.stdev(each) / math.sqrt(len(each))
        if tables.is_faster(shares[tile], errors[tile]):
            break
    return [
        replace(row, note=left_out[tile])
        if tile in left_out
        else replace(row, seconds=seconds[tile], share=shares[tile], error=errors.get(tile))
        for tile, row in rows.items()
    ]
