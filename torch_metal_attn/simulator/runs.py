"""`simulate()`: whether and how CPU tensors use the shaders, and a record of what ran."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from .engine import Counters

BACKEND = "TORCH_METAL_ATTN_BACKEND"


@dataclass(frozen=True)
class LaunchRecord:
    """One kernel that ran."""

    kernel: str
    defines: dict[str, str]
    grid: tuple[int, ...]  # threads
    group_size: tuple[int, ...]
    seconds: float


@dataclass
class Run:
    """How kernels run inside a `simulate()` block, and what ran."""

    check: bool = False
    count: bool = False
    seed: int = 0
    workers: int = 0
    step_limit: int = 0
    launches: list[LaunchRecord] = field(default_factory=list)
    _counters: dict[str, Counters] = field(default_factory=dict)

    @property
    def checked(self) -> bool:
        """Whether kernels are built with checks, which also count."""
        return self.check or self.count

    @property
    def counters(self) -> dict[str, Counters]:
        """Counters by kernel name; raises RuntimeError if the run does not count."""
        if not self.checked:
            raise RuntimeError("this run does not count: use simulate(count=True) or check=True")
        return self._counters


_current: ContextVar[Run | None] = ContextVar("torch_metal_attn_run", default=None)


@contextmanager
def simulate(
    check: bool = False,
    count: bool = False,
    seed: int | None = None,
    workers: int | None = None,
    step_limit: int | None = None,
) -> Iterator[Run]:
    """Run CPU tensors through the shaders, in the simulator, in this thread and block.

    Args:
        check: verify every access, barrier and SIMD operation; a broken rule raises SimulatorFault.
        count: checks too, and counts operations, which `check` alone does not: see `Counters`.
        seed: shuffles the order in which threadgroups and SIMD groups run.
        workers: number of host threads; one per core if not given.
        step_limit: how many rounds the loops of a threadgroup may go, all threads together, in a
            build with checks; 2**28 if not given.

    Yields the run: `counters` (by kernel name), `launches` (kernel, defines, grid, seconds). Blocks
    nest: the innermost one decides and records. TORCH_METAL_ATTN_BACKEND=simulator turns the
    simulator on everywhere, without checks.
    """
    run = Run(
        check=bool(check),
        count=bool(count),
        seed=whole("seed", seed, 32),
        workers=whole("workers", workers, 32),
        step_limit=whole("step_limit", step_limit, 63),
    )
    token = _current.set(run)
    try:
        yield run
    finally:
        _current.reset(token)


def whole(name: str, value: int | None, bits: int) -> int:
    """An optional count, 0 if not given; raises ValueError if it does not fit in `bits` bits."""
    if value is None:
        return 0
    if not isinstance(value, int) or not 0 <= value < 2**bits:
        raise ValueError(f"{name} is {value!r}; it must be an int from 0 to 2**{bits} - 1")
    return value


def current() -> Run | None:
    """The innermost run of this thread, or None."""
    return _current.get()


def active() -> bool:
    """Whether CPU tensors use the shaders now. Raises ValueError for an unknown backend."""
    if _current.get() is not None:
        return True
    backend = os.environ.get(BACKEND, "")
    if backend not in ("", "simulator", "reference", "mps"):
        raise ValueError(f"{BACKEND} is {backend!r}; it can be simulator, reference or mps")
    return backend == "simulator"


def record(
    kernel: str,
    defines: Mapping[str, str],
    grid: Sequence[int],
    group_size: Sequence[int],
    seconds: float,
    counters: Counters,
    checked: bool,
) -> None:
    """Add a kernel that ran to the innermost run, if there is one."""
    run = _current.get()
    if run is None:
        return
    run.launches.append(
        LaunchRecord(kernel, dict(defines), tuple(grid), tuple(group_size), seconds)
    )
    if checked and run.checked:
        run._counters[kernel] = run._counters.get(kernel, Counters()) + counters
