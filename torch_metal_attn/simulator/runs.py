"""`simulate()`: runs ops on CPU tensors through the shaders and records the launches."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch

from .diagnostics import hides_frames
from .engine import Counters
from .metal import versions
from .recording import RecordedLaunch
from .tensors import DEFAULT_MODEL, TensorModel, tensor_model
from .wording import type_text, value_text

__tracebackhide__ = hides_frames
BACKEND = "TORCH_METAL_ATTN_BACKEND"
MOST_WORKERS = 1024


@dataclass(frozen=True, slots=True)
class LaunchRecord:
    """One kernel that ran. Launches of the same program share `defines`."""

    kernel: str
    defines: dict[str, str]
    grid: tuple[int, ...]  # threads
    group_size: tuple[int, ...]
    seconds: float


# Options without an effect if no kernel runs.
_KERNEL_OPTIONS = ("count", "check", "seed", "workers", "step_limit", "language", "tensors")


@dataclass
class Run:
    """The options of a `simulate()` block, and the kernels that ran in it."""

    check: bool = False
    count: bool = False
    seed: int = 0
    workers: int = 0
    uninitialised: Sequence[torch.Tensor] = ()
    step_limit: int = 0
    record: bool = False
    language: str = versions.DEFAULT
    tensors: TensorModel = DEFAULT_MODEL
    recorded: list[RecordedLaunch] = field(default_factory=list)
    launches: list[LaunchRecord] = field(default_factory=list)
    _counters: dict[str, Counters] = field(default_factory=dict)
    _initialised: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.uninitialised and not self.checked:
            raise ValueError("uninitialised needs check=True, which reports such reads; add it")
        for name in _KERNEL_OPTIONS if self.record else ():
            if getattr(self, name) != getattr(Run, name):
                option = name if name != "tensors" else "lane_map or relaxed_precision"
                raise ValueError(
                    f"record=True runs no kernel, so {option} has no effect; leave it out"
                )
        for index, tensor in enumerate(self.uninitialised):
            _mark_unwritten(f"uninitialised[{index}]", tensor, self._initialised)

    def initialised(self, storage: int) -> int:
        """The address of a storage's map, which has a 0 for each unwritten byte; 0 for no map."""
        known = self._initialised.get(storage)
        return 0 if known is None else known.data_ptr()

    @property
    def checked(self) -> bool:
        """True if kernels are built with checks or counts. Both fill `counters`."""
        return self.check or self.count

    @property
    def counters(self) -> dict[str, Counters]:
        """Counters by kernel name. Raises RuntimeError if the run does not count."""
        if not self.checked:
            if self.record:
                raise RuntimeError("this run does not count: with record=True no kernel runs")
            raise RuntimeError("this run does not count: use simulate(count=True) or check=True")
        return self._counters


_current: ContextVar[Run | None] = ContextVar("torch_metal_attn_run", default=None)


@contextmanager
def simulate(
    check: bool = False,
    count: bool = False,
    seed: int | None = None,
    workers: int | None = None,
    uninitialised: Sequence[torch.Tensor] = (),
    step_limit: int | None = None,
    record: bool = False,
    language: str = versions.DEFAULT,
    lane_map: str | int | None = None,
    relaxed_precision: str | None = None,
) -> Iterator[Run]:
    """Run ops on CPU tensors through the shaders in the simulator, in this thread and block.

    Args:
        check: verify every access, barrier and SIMD operation. A broken rule raises SimulatorFault.
        count: check, and also count the operations that `check` alone does not count: see
            `Counters`.
        seed: shuffles the order in which threadgroups and SIMD groups run.
        workers: number of host threads, at most 1024; one per core by default.
        uninitialised: tensors that are unwritten when the block begins, such as those of
            torch.empty. A kernel that reads an element which no kernel of the block has written
            raises SimulatorFault. Needs check=True. Only writes by kernels are noticed, so do not
            fill these tensors in the block. Tensors that an op of this package allocates are always
            treated as uninitialised.
        step_limit: how many loop iterations the threads of a threadgroup may run in total, in a
            build with checks; 2**28 by default.
        record: run no kernel. Each launch of an op becomes a `RecordedLaunch` in the run's
            `recorded` instead. Outputs stay uninitialised, and tensors from torch.empty can be of
            any size. Operations of torch between the kernels do run. The block cannot be nested
            with other simulate() blocks. In it, kernels of compile_shader raise RuntimeError.
        language: version of Metal that the shaders of ops are compiled for: "3.1", "3.2" or "4.0".
        lane_map: which lane holds which element of a cooperative tensor: "apple10" (M5, A19; the
            default), "apple9" (and all earlier families), or the seed of a random map.
        relaxed_precision: whether tensor operations of relaxed precision "truncate" (the default)
            or "round" float operands.

    Yields the run: `counters` (by kernel name), `launches` (kernel, defines, grid, seconds) and
    `recorded`. Blocks nest. The options of the innermost block apply, and it records the launches.
    TORCH_METAL_ATTN_BACKEND=simulator turns the simulator on everywhere, without checks.
    """
    if not isinstance(uninitialised, (list, tuple)):
        raise TypeError(
            f"uninitialised is {type_text(uninitialised)}; it must be a list of tensors"
        )
    run = Run(
        check=as_bool("check", check),
        count=as_bool("count", count),
        seed=as_int("seed", seed, 2**32 - 1),
        workers=as_int("workers", workers, MOST_WORKERS, minimum=1),
        uninitialised=uninitialised,
        step_limit=as_int("step_limit", step_limit, 2**63 - 1, minimum=1),
        record=as_bool("record", record),
        language=versions.checked(language),
        tensors=tensor_model(lane_map, relaxed_precision),
    )
    outer = _current.get()
    if outer is not None and (outer.record or run.record):
        outside, inside = (f"simulate({'record=True' if r.record else ''})" for r in (outer, run))
        raise RuntimeError(
            f"{inside} inside a block of {outside}: a block with record=True cannot be nested, "
            "because its launches do not run; leave the outer block first"
        )
    token = _current.set(run)
    try:
        yield run
    finally:
        _current.reset(token)


def _mark_unwritten(name: str, tensor: torch.Tensor, initialised: dict[int, torch.Tensor]) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is {type_text(tensor)}; it must be a tensor")
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise ValueError(
            f"{name} is on {tensor.device} and {tensor.layout}; it must be a dense CPU tensor"
        )
    storage = tensor.untyped_storage()
    known = initialised.setdefault(
        storage.data_ptr(), torch.ones(storage.nbytes(), dtype=torch.uint8, device="cpu")
    )
    size = tensor.element_size()
    shape = [
        1 if stride == 0 else n for n, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    strides = [stride * size for stride in tensor.stride()]
    known.as_strided((*shape, size), (*strides, 1), tensor.storage_offset() * size).zero_()


def as_int(name: str, value: int | None, maximum: int, minimum: int = 0) -> int:
    """An optional int, 0 for None. Raises ValueError outside of `minimum` to `maximum`."""
    if value is None:
        return 0
    if not isinstance(value, int) or not minimum <= value <= maximum:
        last = maximum if maximum <= MOST_WORKERS else f"2**{maximum.bit_length()} - 1"
        wanted = f"an int from {minimum} to {last}"
        raise ValueError(f"{name} is {value_text(value)}; it must be {wanted}")
    return value


def as_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value_text(value)}; it must be a bool")
    return value


def current() -> Run | None:
    return _current.get()


def active() -> bool:
    """True if ops on CPU tensors use the shaders. Raises ValueError for an unknown backend."""
    if _current.get() is not None:
        return True
    backend = os.environ.get(BACKEND, "")
    if backend not in ("", "simulator", "reference", "mps"):
        raise ValueError(
            f"{BACKEND} is {value_text(backend)}; it must be simulator, reference or mps"
        )
    return backend == "simulator"


def record(launch: LaunchRecord, counters: Counters, checked: bool) -> None:
    """Add a launch to the innermost run, if there is one."""
    run = _current.get()
    if run is None:
        return
    run.launches.append(launch)
    if checked and run.checked:
        known = run._counters.get(launch.kernel)
        run._counters[launch.kernel] = counters if known is None else known + counters
