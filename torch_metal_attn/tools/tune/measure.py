"""Times the tiles of a shape's kernels, and torch's attention in the same run."""

import ctypes
import functools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_metal_attn.testing.case import Case
from torch_metal_attn.testing.features import attention
from torch_metal_attn.testing.running import FAILED, Outcome, run
from torch_metal_attn.tools.bench.shapes import BadShape, Shape
from torch_metal_attn.tools.bench.timing import Timer, Times, interleaved
from torch_metal_attn.tools.bench.versus import OURS, TORCHS, calls_of
from torch_metal_attn.tools.explain.command import explained
from torch_metal_attn.tools.explain.ops import Kernel
from torch_metal_attn.tools.tune import pipelines
from torch_metal_attn.tools.tune.pipelines import Pipeline
from torch_metal_attn.tuned import tables, tiles

# A tile of another size than these lengths has edges to get wrong, and several blocks of keys.
_CHECKED = {"q_length": 70, "kv_length": 133}
_CHECKED_DECODE = {"kv_length": 300, "num_splits": 2}
_MOST_QUERIES = 16

_LEAST_ROUNDS = 5  # where a tile is timed again: fewer say nothing of their error


@dataclass
class Trial:
    """One tile of a kernel for a shape.

    Attributes: seconds: the median of a call; None if it was left out. again: timed a second time.
        left_out: why. wrong: whether that is a wrong result.
    """

    tile: str
    seconds: float | None = None
    again: tables.Again | None = None
    left_out: str = ""
    wrong: bool = False
    pipeline: Pipeline | None = None


@dataclass
class Tried:
    """A kernel's tiles for a shape, the default one first."""

    shape: Shape
    kernel: str
    key: str
    trials: list[Trial]

    @property
    def timed(self) -> tables.Timed | None:
        """What a table keeps; None if no tile ran."""
        seconds = {t.tile: t.seconds for t in self.trials if t.seconds is not None}
        left_out = {t.tile: t.left_out for t in self.trials if t.left_out}
        again = {t.tile: t.again for t in self.trials if t.again is not None}
        if not seconds:
            return None
        return tables.Timed(str(self.shape), self.trials[0].tile, seconds, left_out, again)

    @property
    def best(self) -> str:
        """The tile that this shape alone would choose."""
        return tables.fastest([self.timed]) if self.timed else self.trials[0].tile


@dataclass
class Beside:
    """Our best tiles and torch's attention, in one run of a shape. key: of the forward kernel."""

    shape: Shape
    key: str
    times: dict[str, Times] = field(default_factory=dict)

    @property
    def compared(self) -> tables.Compared | None:
        """What a table keeps; None if one of the two has no times."""
        ours, torchs = self.times[OURS], self.times[TORCHS]
        if ours.error or torchs.error:
            return None
        return tables.Compared(str(self.shape), self.shape.kind, ours.median, torchs.median)


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
) -> Iterator[Tried | Beside]:
    """Time the tiles of each kernel of a shape, then a whole call beside torch's.

    Raises RuntimeError if there is no memory for the shape.
    """
    with tiles.forced({}):
        kernels = kernels_of(shape, device)
    forwards, whole = calls_of(shape, device)
    best: dict[str, str] = {}
    for name, kernel in kernels.items():
        trials = [_prepared(shape, device, name, tile) for tile in kernel.candidates]
        call = _call_of(name, shape, forwards[OURS], device)
        with tiles.forced({}):
            _time(name, trials, call, timer, rounds)
        tried = Tried(shape, name, kernel.key, trials)
        best[name] = tried.best
        yield tried
    with tiles.forced(best):
        times = interleaved(whole, timer, rounds)
    yield Beside(shape, next(iter(kernels.values())).key, times)


def _prepared(shape: Shape, device: torch.device, kernel: str, tile: str) -> Trial:
    """A tile that compiles, can be launched and is right, or why it is left out."""
    with tiles.forced({kernel: tile}):
        trial = Trial(tile)
        if _compiled_by_metal(device):
            found = kernels_of(shape, device)[kernel]
            threads = found.threads[0]
            trial.pipeline, trial.left_out = pipelines.inspect(
                kernel, found.specialisation, threads
            )
        if not trial.left_out:
            result = run(_check_of(shape, kernel), device)
            trial.wrong = result.status == FAILED
            trial.left_out = _trouble(result)
    return trial


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


def _trouble(result: Outcome) -> str:
    """Why a tile with this result is left out; "" if it is right."""
    if result.status == FAILED:
        bad = [m for m in result.measures if not m.ok]
        words = [f"{m.what} is off by {m.error:.1e}, allowed {m.bound:.1e}" for m in bad]
        return f"its result is wrong: {', '.join(words)}"
    return result.message.split("\n")[0]


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


def _time(
    kernel: str, trials: list[Trial], call: Callable[[], object], timer: Timer, rounds: int
) -> None:
    """Time the trials that are not left out, taking turns.

    Noise alone makes one of many tiles look fastest. So each tile that looks faster than the
    default, the fastest first, is timed again in turns with it alone, until one is faster again.
    """

    def run_with(table: ctypes.c_void_p | None) -> None:
        tiles.use(table)
        with torch.no_grad():
            call()

    calls = {
        trial.tile: functools.partial(run_with, tiles.make([(kernel, trial.tile, "forced")]))
        for trial in trials
    }

    def timed(some: list[Trial], rounds: int) -> dict[str, Times]:
        """Those that raised are left out."""
        found = interleaved({trial.tile: calls[trial.tile] for trial in some}, timer, rounds)
        for trial in some:
            if error := found[trial.tile].error:
                trial.seconds, trial.left_out = None, error.splitlines()[0]
        return found

    found = timed([trial for trial in trials if not trial.left_out], rounds)
    for trial in trials:
        if not trial.left_out:
            trial.seconds = found[trial.tile].median
    default, *others = trials
    if default.seconds is None:
        return
    most = (1 - tables.LEAST_GAIN) * default.seconds
    faster = [t for t in others if t.seconds is not None and t.seconds <= most]
    for trial in sorted(faster, key=lambda t: t.seconds or 0.0):
        found = timed([default, trial], max(rounds, _LEAST_ROUNDS))
        if default.left_out:
            return
        if trial.left_out:
            continue
        pairs = zip(found[trial.tile].seconds, found[default.tile].seconds, strict=True)
        shares = [one / base for one, base in pairs]
        error = statistics.stdev(shares) / math.sqrt(len(shares))
        trial.again = tables.Again(statistics.mean(shares), error)
        if trial.again.faster:
            return
