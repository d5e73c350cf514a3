"""`python -m torch_metal_attn tune`: times tiles on this machine and stores the fastest."""

import argparse
import ctypes
import functools
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from torch_metal_attn.runtime import mps
from torch_metal_attn.runtime.version import open_an_issue
from torch_metal_attn.testing.case import Case
from torch_metal_attn.testing.features import attention
from torch_metal_attn.testing.running import FAILED, run
from torch_metal_attn.tools.bench.shapes import DTYPES, BadShape, Shape, from_file, of_model
from torch_metal_attn.tools.bench.timing import Timer, add_rounds, interleaved, timer_of
from torch_metal_attn.tools.bench.versus import OURS, TORCHS, calls_of
from torch_metal_attn.tools.explain.command import explained
from torch_metal_attn.tools.explain.ops import Kernel
from torch_metal_attn.tools.progress import Progress
from torch_metal_attn.tuned import loading, tiles
from torch_metal_attn.tuned.loading import LEAST_GAIN, BadTable, Machine, Row, Table
from torch_metal_attn.wording import count_text

DEVICE = torch.device("mps")
_LEAST_ROUNDS = 5  # of a second timing: fewer samples give no estimate of its error
_LENGTHS = (512, 2048, 8192)
_CACHES = (2048, 8192, 32768)
_TEXT_TOKENS = 77  # keys in the cross attention of image models


def _square(length: int, heads: int, head_dim: int, dtype: str, **options: Any) -> Shape:
    return Shape("forward", 1, heads, heads, length, length, head_dim, dtype, **options)


def _language(dtype: str, training: Iterable[int] = (), **heads: Any) -> list[Shape]:
    causal = {"causal": True, "dtype": dtype, **heads}
    return [
        *(Shape("forward", length=n, kv_length=n, **causal) for n in _LENGTHS),
        *(Shape("decode", length=1, kv_length=n, dtype=dtype, **heads) for n in _CACHES),
        *(Shape("training", length=n, kv_length=n, **causal) for n in training),
    ]


# The most common models come first, because an interrupt keeps what was measured.
COMMON = (
    *_language("bfloat16", heads=32, kv_heads=8, head_dim=128),  # Llama 3, Mistral, Qwen 3
    *_language("float16", heads=32, kv_heads=8, head_dim=128),
    _square(4096, 8, 40, "float16"),  # Stable Diffusion 1.5
    _square(4096, 10, 64, "float16"),  # Stable Diffusion XL
    _square(4608, 24, 128, "float16"),  # Flux
    replace(_square(4096, 8, 40, "float16"), kv_length=_TEXT_TOKENS),
    replace(_square(4096, 10, 64, "float16"), kv_length=_TEXT_TOKENS),
    _square(512, 12, 64, "float32"),  # BERT, ViT
    _square(512, 12, 32, "float32"),  # MiniLM
    _square(1500, 20, 64, "float32"),  # Whisper
    *_language("bfloat16", heads=14, kv_heads=2, head_dim=64),  # Qwen 2.5 0.5B, Llama 3.2 1B
    *_language("bfloat16", heads=8, kv_heads=4, head_dim=256),  # Gemma 2 and 3
    *_language("bfloat16", heads=32, kv_heads=32, head_dim=96),  # Phi 3 mini
    *(
        Shape("training", 1, 12, 12, n, n, 64, dtype, causal=True)  # GPT-2
        for dtype in ("bfloat16", "float32")
        for n in _LENGTHS[:2]
    ),
    Shape("training", 1, 32, 8, 2048, 2048, 128, "bfloat16", causal=True),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--model",
        type=Path,
        metavar="CONFIG",
        help="measure the shapes of a model: a transformers config.json, or a folder with one",
    )
    group.add_argument(
        "--shapes",
        type=Path,
        metavar="FILE",
        help="measure the shapes in a JSON file, as for `bench`",
    )
    parser.add_argument(
        "--dtype",
        choices=list(DTYPES),
        help="with --model: the dtype that it runs in (default: bfloat16)",
    )
    add_rounds(parser)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the table there (default: where every later process finds it)",
    )


def _shapes_of(options: argparse.Namespace) -> list[Shape]:
    if options.dtype is not None and options.model is None:
        raise BadShape("--dtype is for --model: a file of --shapes has the dtypes")
    if options.model is not None:
        dtype = options.dtype or "bfloat16"
        return _language(dtype, training=_LENGTHS[1:2], **of_model(options.model))
    return [*COMMON] if options.shapes is None else from_file(options.shapes)


def tune(options: argparse.Namespace) -> bool:
    """Write a table of the fastest tiles. False without a GPU, or if a tile's result was wrong."""
    if options.rounds < 1:
        raise BadShape(f"--rounds is {options.rounds}; it must be above 0")
    shapes = _shapes_of(options)
    problem = mps.problem()
    if problem:
        print(
            f"tune measures an Apple GPU, and mps cannot be used here: {problem}", file=sys.stderr
        )
        return False
    with tiles.forced({}):
        for shape in shapes:
            kernels_of(shape, DEVICE)  # raises before anything is measured
    machine = loading.this_machine()
    path = options.out or loading.path_of(machine)
    run = _Run(path, _table_at(path, machine), timer_of(DEVICE), options.rounds)
    run.table.write(path)  # raises now if the path is wrong, not after an hour
    print(f"Tiles on {machine.gpu}, {count_text(len(shapes), 'shape')}", flush=True)
    try:
        with Progress(len(shapes)) as progress:
            for shape in shapes:
                progress.step("", str(shape))
                progress.say("\n".join(run.measure(shape)))
                if DEVICE.type == "mps":
                    torch.mps.empty_cache()  # before the next shape
    finally:
        if run.wrong:
            print(
                f"\nA tile gave a wrong result and was left out. Please {open_an_issue()} with the "
                "lines above and the report of `python -m torch_metal_attn verify --full`."
            )
        print(f"\n{count_text(len(run.table.rows), 'tile')} in {path}", flush=True)
        loading.install()
    return not run.wrong


def _table_at(path: Path, machine: Machine) -> Table:
    try:
        return loading.read(path, machine)
    except FileNotFoundError:
        pass
    except BadTable as error:
        print(f"{path} is replaced: {error}", file=sys.stderr)
    return Table(machine)


def kernels_of(shape: Shape, device: torch.device) -> dict[str, Kernel]:
    """The kernels whose tiles can be chosen, by name. Raises BadShape for a refused shape."""
    explanation = explained(shape, device)
    if explanation.refusal is not None:
        raise BadShape(f"no kernel takes the shape {shape}: {explanation.refusal}")
    kernels = dict(explanation.kernels)
    if explanation.training is not None:
        kernels |= explanation.training.kernels
    return {name: kernel for name, kernel in kernels.items() if kernel.candidates}


class _Run:
    """One run of the command. wrong: True if the result of a tile was wrong."""

    def __init__(self, path: Path, table: Table, timer: Timer, rounds: int) -> None:
        self.table, self.wrong = table, False
        self._path, self._timer, self._rounds = path, timer, rounds
        self._measured: set[str] = set()

    def measure(self, shape: Shape) -> Iterator[str]:
        """Measure a shape. Yields a line for each tile that was measured, and one for torch."""
        yield f"\n{shape}"
        try:
            yield from self._measure(shape)
        except RuntimeError as error:
            yield f"  not measured: {str(error).splitlines()[0]}"

    def _measure(self, shape: Shape) -> Iterator[str]:
        """Time the tiles of kernels with a new key, then a whole call of ours and of torch."""
        with tiles.forced({}):
            kernels = kernels_of(shape, DEVICE)
        forwards, calls = calls_of(shape, DEVICE)
        best: dict[str, str] = {}
        for name, kernel in kernels.items():
            if kernel.key not in self._measured:
                yield f"  {name}"
                call = _call_of(name, shape, forwards[OURS], DEVICE)
                fastest, notes = self._fastest(shape, name, kernel.candidates, call)
                yield from notes
                if fastest is None:
                    self.table.rows.pop(kernel.key, None)
                else:
                    self.table.rows[kernel.key] = Row(fastest)
                self._measured.add(kernel.key)
                self.table.write(self._path)
            if kernel.key in self.table.rows:
                best[name] = self.table.rows[kernel.key].tile
        with tiles.forced(best):
            times = interleaved(calls, self._timer, self._rounds)
        errors = [
            f"{name}: {one.error.splitlines()[0]}" for name, one in times.items() if one.error
        ]
        if errors:
            yield f"  whole call: {', '.join(errors)}"
            return
        ratio = times[TORCHS].median / times[OURS].median
        yield f"  whole call: torch takes {ratio:.2f} of our time"
        row = self.table.rows.get(next(iter(kernels.values())).key)
        if row is not None:
            row.torch.setdefault(shape.kind, ratio)
            self.table.write(self._path)

    def _fastest(
        self, shape: Shape, kernel: str, candidates: tuple[str, ...], call: Callable[[], object]
    ) -> tuple[str | None, list[str]]:
        """The fastest tile or None, and a line for each tile."""
        notes: dict[str, str] = {}
        calls: dict[str, Callable[[], object]] = {}
        for tile in candidates:
            with tiles.forced({kernel: tile}):
                result = run(_check_of(shape, kernel), DEVICE)
            if result.status == FAILED:
                self.wrong = True
                errors = (
                    f"{m.what} is off by {m.error:.1e}, allowed {m.bound:.1e}"
                    for m in result.measures
                    if not m.ok
                )
                notes[tile] = f"left out: its result is wrong: {', '.join(errors)}"
            elif result.message:  # the kernel does not compile or cannot be launched
                notes[tile] = f"left out: {result.message.splitlines()[0]}"
            else:
                table = tiles.make([(kernel, tile, tiles.FORCED)])
                calls[tile] = functools.partial(_run_with, table, call)
        with tiles.forced({}):
            fastest = choose(calls, candidates[0], self._timer, self._rounds, notes)
        notes[candidates[0]] += ", default"
        if fastest is not None:
            notes[fastest] += ", chosen"
        return fastest, [f"    {tile:<78} {notes[tile]}" for tile in candidates]


def _run_with(table: ctypes.c_void_p | None, call: Callable[[], object]) -> None:
    tiles.use(table)
    with torch.no_grad():
        call()


def choose(
    calls: Mapping[str, Callable[[], object]],
    default: str,
    timer: Timer,
    rounds: int,
    notes: dict[str, str],
) -> str | None:
    """The tile whose call is fastest, or None if none runs. Adds a note on each tile.

    Among many tiles noise makes one look fastest. So tiles that look faster than the default are
    timed again, each alternately with the default, the fastest first. The first one whose second
    gain is at least LEAST_GAIN and above two standard errors is chosen.
    """
    times = interleaved(calls, timer, rounds)
    for tile, one in times.items():
        left_out = f"left out: {one.error.splitlines()[0]}" if one.error else ""
        notes[tile] = left_out or f"{one.median * 1e3:.3f} ms"
    medians = {tile: one.median for tile, one in times.items() if not one.error}
    fastest_first = sorted(medians, key=medians.__getitem__)
    if default not in medians:
        return next(iter(fastest_first), None)
    for tile in fastest_first:
        if medians[tile] > medians[default] * (1 - LEAST_GAIN):
            break
        pair = {default: calls[default], tile: calls[tile]}
        again = interleaved(pair, timer, max(rounds, _LEAST_ROUNDS))
        for name, one in again.items():
            if one.error:
                notes[name] = f"left out: {one.error.splitlines()[0]}"
        if again[tile].error:
            continue
        if again[default].error:
            return tile
        seconds = zip(again[tile].seconds, again[default].seconds, strict=True)
        shares = [ours / base for ours, base in seconds]
        share, error = statistics.mean(shares), statistics.stdev(shares) / math.sqrt(len(shares))
        notes[tile] += f", again {share:.3f} +- {error:.3f} of the default tile's time"
        if share <= 1 - LEAST_GAIN and 1 - share > 2 * error:
            return tile
    return default


def _check_of(shape: Shape, kernel: str) -> Case:
    """A small problem with several blocks of keys, and with lengths that no tile divides."""
    make = functools.partial(attention, dtype=shape.dtype, head_dim=shape.head_dim, kv_heads=1)
    group, windowed = shape.heads // shape.kv_heads, shape.window >= 0
    sizes: dict[str, Any]
    if kernel == "flash_decode":
        sizes = {"heads": group, "q_length": min(shape.length, 16), "kv_length": 300}
        feature = "causal window" if windowed else "plain"
        return make(call="flash_decode", feature=feature, num_splits=2, **sizes)
    sizes = {"heads": min(group, 2), "q_length": 70, "kv_length": 133}
    feature = " ".join(["causal"] * shape.causal + ["window"] * windowed) or "plain"
    backward = kernel.startswith("flash_bwd")
    return make(call="flash_fwd", feature=feature, backward=backward, **sizes)


def _call_of(
    kernel: str, shape: Shape, forward: Callable[[], object], device: torch.device
) -> Callable[[], object]:
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
