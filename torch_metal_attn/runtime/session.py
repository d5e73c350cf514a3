"""The callback that csrc/runtime/simulator.cpp calls to run a launch in the simulator."""

import ctypes
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch_metal_attn.runtime import extension, recording, shaders
from torch_metal_attn.simulator import engine, runs
from torch_metal_attn.simulator.diagnostics import hides_frames
from torch_metal_attn.simulator.runs import active, simulate

if TYPE_CHECKING:
    from torch_metal_attn.simulator.build import Program
    from torch_metal_attn.simulator.toolchain import Toolchain

__all__ = ["active", "raising", "simulate"]


class _Op(threading.local):
    """check: called before this thread's op runs a kernel. error: the exception of a launch."""

    check: Callable[[], None] | None = None
    error: BaseException | None = None


_op = _Op()

__tracebackhide__ = hides_frames
# MetalAttnSimulated of csrc/runtime/callbacks.h.
_DONE = 0
_RAISED = 1

# Part of the error of a launch whose callback was interrupted before its first line.
_INTERRUPTED = "metal_attn: interrupted before kernel"


class _Texts(ctypes.Structure):
    """SimulatedProgram of csrc/runtime/callbacks.h."""

    _fields_ = (("family", ctypes.c_char_p), ("defines", ctypes.c_char_p))


_Callback = ctypes.CFUNCTYPE(
    None,
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.POINTER(engine.Buffer),
    ctypes.c_uint32,
    ctypes.POINTER(ctypes.c_uint32),
    ctypes.POINTER(ctypes.c_uint32),
    ctypes.POINTER(ctypes.c_int32),
)


@contextmanager
def raising(check: Callable[[], None] | None = None) -> Iterator[None]:
    """A context for an op, which raises the simulator's own exception in place of C++'s."""
    outer = _op.check
    _op.check, _op.error = check, None
    engine.library().metal_attn_track_fresh(1)
    try:
        yield
    except Exception as raised:
        error = _op.error
        if error is None and _INTERRUPTED in str(raised):
            # ctypes drops an exception that is raised on entry of the callback.
            error = KeyboardInterrupt()
        if error is None:
            raise
        raise error from None
    finally:
        _op.check, _op.error = outer, None
        engine.library().metal_attn_track_fresh(0)


@dataclass
class Specialisation:
    """A family and its defines, with compiled programs by (check, count, language)."""

    family: str
    defines: dict[str, str]
    compiled: dict[tuple[bool, bool, str], tuple[str, "Toolchain", "Program"]] = field(
        default_factory=dict
    )

    def program(self, run: runs.Run) -> "Program":
        """The program for `run`. It is compiled again if the shader or the compiler changes."""
        # Imported here, so that importing the package does not load the compiler's modules.
        from torch_metal_attn.simulator import toolchain
        from torch_metal_attn.simulator.build import build

        language = shaders.LANGUAGES.get(self.family, run.language)
        key = run.check, run.count, language
        text, compiler = shaders.source(self.family), toolchain.find()
        compiled = self.compiled.get(key)
        if compiled is None or compiled[0] != text or compiled[1] is not compiler:
            specialised = shaders.with_defines(text, self.defines)
            program = build(specialised, check=run.check, count=run.count, language=language)
            self.compiled[key] = compiled = text, compiler, program
        return compiled[2]


@functools.cache
def _specialisation(address: int) -> Specialisation:
    """The SimulatedProgram at this address, which is valid until the process ends."""
    texts = _Texts.from_address(address)
    defines = dict(line.split("=", 1) for line in texts.defines.decode().splitlines())
    return Specialisation(texts.family.decode(), defines)


def _launch(
    specialisation: Specialisation,
    name: str,
    buffers: list[engine.Buffer],
    threadgroups: tuple[int, ...],
    threads: tuple[int, ...],
) -> None:
    run = runs.current() or _DEFAULT_RUN
    program = specialisation.program(run)
    kernel = program.kernels.get(name)
    if kernel is None:
        known = ", ".join(program.kernels) or "none"
        raise ValueError(f"shader {specialisation.family} has no kernel {name}; it has {known}")
    # The kernel's parameters determine space and access. Other buffers are never accessed.
    parameters = kernel.buffers
    bound = [buffer for buffer in buffers if buffer.index in parameters]
    for buffer in bound:
        parameter = parameters[buffer.index]
        buffer.space = engine.SPACES.index(parameter.space)
        buffer.writable &= parameter.writable
        if run.uninitialised and not buffer.initialised:
            buffer.initialised = run.initialised(buffer.storage or 0)
    grid: Any = tuple(count * size for count, size in zip(threadgroups, threads, strict=True))
    image = program.image(name)
    started = time.perf_counter()
    counters = engine.run(
        image,
        kernel,
        bound,
        threads_per_grid=grid,
        threads_per_threadgroup=threads,
        checked=program.checked,
        counted=program.counted,
        seed=run.seed,
        workers=run.workers,
        step_limit=run.step_limit,
        tensors=run.tensors,
    )
    seconds = time.perf_counter() - started
    launch = runs.LaunchRecord(name, specialisation.defines, grid, threads, seconds)
    runs.record(launch, counters, run.checked)


_DEFAULT_RUN = runs.Run()


@_Callback
def _simulate(
    program: int,
    kernel: bytes,
    buffers: Any,
    count: int,
    threadgroups: Any,
    threads: Any,
    status: Any,
) -> None:
    try:
        if _op.check is not None:
            check, _op.check = _op.check, None
            check()
        specialisation = _specialisation(program)
        name, sizes = sys.intern(kernel.decode()), (tuple(threadgroups[:3]), tuple(threads[:3]))
        launch: tuple[Any, ...] = (name, buffers[:count], *sizes)
        run = runs.current()
        if run is not None and run.record:
            family, defines = specialisation.family, specialisation.defines
            run.recorded.append(recording.recorded(family, defines, *launch))
        else:
            _launch(specialisation, *launch)
        status[0] = _DONE
    except BaseException as error:  # exceptions must not unwind into C++; raising() re-raises it
        _op.error = error
        status[0] = _RAISED


engine.use(extension.load)
engine.library().metal_attn_set_simulator(_simulate)
