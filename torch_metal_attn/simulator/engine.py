"""Python's interface to the execution engine (csrc/simulator/engine.h), its faults and counters."""

import ctypes
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .diagnostics import KernelError, hides_frames, in_metal
from .llvm.operations import ALWAYS, COUNTS
from .tensors import DEFAULT_MODEL, LANE_MAPS, TensorModel
from .wording import count_text

if TYPE_CHECKING:
    from .build import Image
    from .llvm.instrument import Site
    from .metal.kernels import Kernel

__tracebackhide__ = hides_frames
MAX_ARGUMENTS = 31
MAX_THREADS = 1024  # in a threadgroup
SPACES = ("device", "threadgroup", "constant", "thread")
LANES = re.compile(r"(?:(?<=lanes )|(?<=; ))([0-9a-f]{8})\b")

FAULT_KINDS = tuple(
    """none out_of_bounds threadgroup_out_of_bounds uninitialised race divergent_barrier
    partial_simd threadgroup_memory constant_write misaligned no_progress private_out_of_bounds
    integer_division float_to_integer shift simd_lane endless_loop stack_overflow missing_return
    tensor clamp""".split()
)


class Buffer(ctypes.Structure):
    """SimulatorBuffer: the memory of one [[buffer(index)]].

    storage, bytes: the tensor's storage, which bounds every access. offset: the byte of the storage
    at which the argument begins. space: an index into SPACES. initialised: the address of a map
    with a byte for each byte of the storage, 0 if it is unwritten; null if all bytes are written.
    tensor: the caller's tensor.
    """

    _fields_ = (
        ("index", ctypes.c_uint32),
        ("space", ctypes.c_uint32),
        ("writable", ctypes.c_uint32),
        ("storage", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("offset", ctypes.c_uint64),
        ("initialised", ctypes.c_void_p),
        ("tensor", ctypes.c_void_p),
    )


class Interpreter(ctypes.Structure):
    """SimulatorInterpreter."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("save", "restore", "check_signals"))


class Dispatch(ctypes.Structure):
    """SimulatorDispatch."""

    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("bind", ctypes.c_void_p),
        ("buffers", ctypes.POINTER(Buffer)),
        ("buffer_count", ctypes.c_uint32),
        ("checked", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("workers", ctypes.c_uint32),
        ("threads_per_threadgroup", ctypes.c_uint32 * 3),
        ("threads_per_grid", ctypes.c_uint64 * 3),
        ("threadgroup_argument_bytes", ctypes.c_uint64 * MAX_ARGUMENTS),
        ("interpreter", ctypes.POINTER(Interpreter)),
        ("step_limit", ctypes.c_uint64),
        ("lane_map", ctypes.c_uint32),
        ("rounds", ctypes.c_uint32),
        ("lane_map_seed", ctypes.c_uint64),
        ("strict_simd", ctypes.c_uint32),
    )


GROUP_COUNTS = """threadgroups matrix_operations tensor_operations tensor_multiplications shuffles
    reductions votes simdgroup_barriers threadgroup_barriers""".split()
MEMORY_COUNTS = "loads load_bytes stores store_bytes".split()


class CounterValues(ctypes.Structure):
    """SimulatorCounters."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in GROUP_COUNTS),
        *((name, ctypes.c_uint64 * len(SPACES)) for name in MEMORY_COUNTS),
        ("operations", ctypes.c_uint64 * len(COUNTS)),
        ("threadgroup_bytes", ctypes.c_uint64),
    )


class FaultReport(ctypes.Structure):
    """SimulatorFaultReport."""

    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("site", ctypes.c_uint32),
        ("other_site", ctypes.c_uint32),
        ("threadgroup", ctypes.c_uint32 * 3),
        ("thread", ctypes.c_uint32 * 3),
        ("message", ctypes.c_char * 320),
    )


def _each_space() -> dict[str, int]:
    return dict.fromkeys(SPACES, 0)


@dataclass
class Counters:
    """The operations of a kernel, summed over its threads.

    Matrix and tensor operations, shuffles, reductions, votes and SIMD-group barriers are counted
    per SIMD group, threadgroup barriers per threadgroup, and all other operations per thread.
    `threadgroup_bytes` is the most threadgroup memory that any threadgroup used.

    tensor_operations: calls of matmul2d's `run`, and reductions of cooperative tensors.
    tensor_multiplications: multiplications of elements in matmul2d. A 16x32x16 product has 8192.
    converts: conversions between floats, and between floats and integers.
    exps: exponentials.
    functions: logarithms, roots, powers and trigonometry.
    float_operations: sums, products, quotients, fused multiply-adds and roundings.
    integer_operations: arithmetic, shifts and bitwise logic.
    addresses: address computations with a variable offset.
    selects: selections, comparisons, minima, maxima and logic of conditions.

    Memory counts, converts and exps need a build that checks or counts; otherwise they are 0.
    float_operations, integer_operations, addresses, selects and functions need a build that counts;
    otherwise they are None. Unlike a GPU's compiler, a build that only checks unrolls no loops.
    """

    launches: int = 0
    threadgroups: int = 0
    matrix_operations: int = 0
    tensor_operations: int = 0
    tensor_multiplications: int = 0
    shuffles: int = 0
    reductions: int = 0
    votes: int = 0
    simdgroup_barriers: int = 0
    threadgroup_barriers: int = 0
    loads: dict[str, int] = field(default_factory=_each_space)
    load_bytes: dict[str, int] = field(default_factory=_each_space)
    stores: dict[str, int] = field(default_factory=_each_space)
    store_bytes: dict[str, int] = field(default_factory=_each_space)
    exps: int = 0
    converts: int = 0
    float_operations: int | None = None
    integer_operations: int | None = None
    addresses: int | None = None
    selects: int | None = None
    functions: int | None = None
    threadgroup_bytes: int = 0

    def __add__(self, other: "Counters") -> "Counters":
        if not isinstance(other, Counters):
            return NotImplemented
        total = Counters()
        for item in fields(Counters):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if isinstance(mine, dict):
                setattr(total, item.name, {key: mine[key] + theirs[key] for key in mine})
            elif item.name == "threadgroup_bytes":
                total.threadgroup_bytes = max(mine, theirs)
            elif mine is None or theirs is None:
                # If either side has launches without this count, the sum is unknown.
                known = [n for side, n in ((self, mine), (other, theirs)) if side.launches]
                setattr(total, item.name, None if not known or None in known else sum(known))
            else:
                setattr(total, item.name, mine + theirs)
        return total

    def as_dict(self) -> dict[str, int | dict[str, int] | None]:
        """Every count by its name. Operations that were not counted are None."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def __repr__(self) -> str:
        shown: list[str] = []
        for name, value in self.as_dict().items():
            text: object = value
            if isinstance(value, dict):
                counts = ", ".join(f"{space} {n}" for space, n in value.items() if n)
                text = f"({counts})" if counts else None
            if text:
                shown.append(f"{name}={text}")
        return f"Counters({', '.join(shown)})"


class SimulatorFault(KernelError):
    """A kernel was about to do something that is undefined on a GPU. The dispatch was stopped.

    Attributes: kind (one of FAULT_KINDS), kernel, file and line (in the Metal source; "" and 0 if
    unknown), threadgroup and thread (three positions each).
    """

    def __init__(
        self,
        kind: str,
        kernel: str,
        detail: str,
        site: "Site" = (),
        other: "Site" = (),
        threadgroup: tuple[int, ...] = (0, 0, 0),
        thread: tuple[int, ...] = (0, 0, 0),
    ) -> None:
        self.kind = kind
        self.kernel = kernel
        self.detail = detail
        self.site = site
        self.other_site = other
        self.file = site[0].file if site else ""
        self.line = site[0].line if site else 0
        self.threadgroup = threadgroup
        self.thread = thread
        where = _place(site) or "at an unknown place"
        text = f"{kind}: {detail}\n  {where}"
        if other:
            text += f"\n  the other access: {_place(other)}"
        text += f"\n  kernel {kernel}, threadgroup {threadgroup}, thread {thread}"
        super().__init__(text)

    def __reduce__(self) -> tuple[Any, ...]:
        """Keeps the attributes when pickled, as in a worker process of a DataLoader."""
        places = (self.site, self.other_site, self.threadgroup, self.thread)
        return type(self), (self.kind, self.kernel, self.detail, *places)


def _place(site: "Site") -> str:
    frames = [
        f"{frame.file}:{frame.line}" + (f" in {in_metal(frame.function)}" if frame.function else "")
        for frame in site
    ]
    return "\n    inlined into ".join(frames)


_load: Callable[[], ctypes.CDLL] | None = None


def use(load: Callable[[], ctypes.CDLL]) -> None:
    """Set the function that loads the shared library with csrc/simulator. It is called once."""
    global _load
    _load = load


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The loaded engine. Raises ImportError if `use` has not been called."""
    if _load is None:
        raise ImportError("the simulator has no engine: pass a function that loads it to use()")
    # Kernels call functions such as exp2f, and libm may not be in the process's global scope.
    if sys.platform == "linux":
        ctypes.CDLL("libm.so.6", mode=ctypes.RTLD_GLOBAL)
    library = _load()
    library.metal_attn_simulator_run.restype = ctypes.c_int
    library.metal_attn_simulator_run.argtypes = (
        ctypes.POINTER(Dispatch),
        ctypes.POINTER(CounterValues),
        ctypes.POINTER(FaultReport),
    )
    return library


@lru_cache(maxsize=1)
def _interruptible() -> tuple[Any, Interpreter]:
    """The engine's run function. The caller holds Python's global lock; the engine releases it."""
    run = ctypes.PyDLL(library()._name).metal_attn_simulator_run
    run.argtypes = library().metal_attn_simulator_run.argtypes
    python = ctypes.pythonapi
    functions = (python.PyEval_SaveThread, python.PyEval_RestoreThread, python.PyErr_CheckSignals)
    return run, Interpreter(*(ctypes.cast(f, ctypes.c_void_p).value for f in functions))


def run(
    image: "Image",
    kernel: "Kernel",
    buffers: Sequence[Buffer],
    *,
    threads_per_grid: Sequence[int],
    threads_per_threadgroup: Sequence[int],
    checked: bool,
    counted: bool = False,
    threadgroup_bytes: Sequence[tuple[int, int]] = (),
    seed: int = 0,
    workers: int = 0,
    step_limit: int = 0,
    tensors: TensorModel = DEFAULT_MODEL,
    strict_simd: bool = True,
) -> Counters:
    """Run one dispatch. Raises SimulatorFault, or ValueError for invalid arguments."""
    most = image.most_threads(kernel.most_threads_symbol)
    threads = math.prod(threads_per_threadgroup)
    if most < threads <= MAX_THREADS:
        raise ValueError(
            f"{kernel.name}: a threadgroup of {count_text(threads, 'thread')}; "
            f"its max_total_threads_per_threadgroup is {most}"
        )
    engine_run, interpreter = _interruptible()
    dispatch = Dispatch(
        entry=image.address(kernel.symbol),
        bind=image.address("__msl_bind"),
        buffers=(Buffer * max(len(buffers), 1))(*buffers),
        buffer_count=len(buffers),
        checked=checked,
        seed=seed,
        workers=workers,
        threads_per_threadgroup=tuple(threads_per_threadgroup),
        threads_per_grid=tuple(threads_per_grid),
        interpreter=ctypes.pointer(interpreter),
        step_limit=step_limit,
        lane_map=LANE_MAPS.index(tensors.lane_map),
        rounds=tensors.rounds,
        lane_map_seed=tensors.seed,
        strict_simd=strict_simd,
    )
    for index, size in threadgroup_bytes:
        dispatch.threadgroup_argument_bytes[index] = size
    counters, report = CounterValues(), FaultReport()
    status = engine_run(ctypes.byref(dispatch), ctypes.byref(counters), ctypes.byref(report))
    if status == 2:
        raise ValueError(f"{kernel.name}: {report.message.decode(errors='replace')}")
    if status != 0:
        raise _fault(image, kernel, report)
    return _counters(counters, counted)


def _fault(image: "Image", kernel: "Kernel", report: FaultReport) -> SimulatorFault:
    def site(index: int) -> "Site":
        return image.sites[index] if index < len(image.sites) else ()

    kind = FAULT_KINDS[report.kind] if report.kind < len(FAULT_KINDS) else f"fault {report.kind}"
    return SimulatorFault(
        kind,
        kernel.name,
        in_metal(_lanes_in_words(report.message.decode(errors="replace"))),
        site(report.site),
        site(report.other_site),
        tuple(report.threadgroup),
        tuple(report.thread),
    )


def _lanes_in_words(message: str) -> str:
    """The engine's message with lane ranges, such as 0-3, instead of hexadecimal masks."""

    def ranges(match: re.Match[str]) -> str:
        mask = int(match[1], 16)
        first = [i for i in range(32) if (mask & ~(mask << 1)) >> i & 1]
        last = [i for i in range(32) if (mask & ~(mask >> 1)) >> i & 1]
        shown = (f"{i}" if i == j else f"{i}-{j}" for i, j in zip(first, last, strict=True))
        noun = "lanes " if message[match.start() - 2] == ";" else ""
        return f"{noun}{', '.join(shown)}" if mask else "none"

    return LANES.sub(ranges, message)


def _counters(raw: CounterValues, counted: bool) -> Counters:
    counters: dict[str, Any] = {name: getattr(raw, name) for name in GROUP_COUNTS}
    for name, number in zip(COUNTS, raw.operations, strict=True):
        if counted or name in ALWAYS:
            counters[name] = number
    for name in MEMORY_COUNTS:
        counters[name] = dict(zip(SPACES, getattr(raw, name), strict=True))
    return Counters(launches=1, threadgroup_bytes=raw.threadgroup_bytes, **counters)
