"""The callback that csrc/runtime/simulator.cpp calls to run a launch in the simulator."""

import ctypes
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch_metal_attn.runtime import extension, recording, shaders
from torch_metal_attn.simulator import engine, runs
from torch_metal_attn.simulator.diagnostics import hides_frames
from torch_metal_attn.simulator.runs import active, simulate

__all__ = ["active", "raising", "simulate"]


class _Pending(threading.local):
    """The exception that a launch of this thread raised, while it passes through C++."""

    error: BaseException | None = None


_pending = _Pending()

__tracebackhide__ = hides_frames
# MetalAttnSimulated of csrc/runtime/callbacks.h.
_DONE = 0
_RAISED = 1

# In the message of a launch whose callback was interrupted before its first line.
_NOT_BEGUN = "metal_attn: interrupted before kernel"

_Callback = ctypes.CFUNCTYPE(
    None,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.POINTER(engine.Buffer),
    ctypes.c_uint32,
    ctypes.POINTER(ctypes.c_uint32),
    ctypes.POINTER(ctypes.c_uint32),
    ctypes.POINTER(ctypes.c_int32),
)


@contextmanager
def raising() -> Iterator[None]:
    """A context for an op: an exception of the simulator is raised as itself, not as C++'s."""
    _pending.error = None
    engine.library().metal_attn_track_fresh(1)
    try:
        yield
    except Exception as raised:
        error = _pending.error
        if error is None and _NOT_BEGUN in str(raised):
            # ctypes cannot pass on an exception that was raised as the callback was entered.
            error = KeyboardInterrupt()
        if error is None:
            raise
        raise error from None
    finally:
        _pending.error = None
        engine.library().metal_attn_track_fresh(0)


def _launch(
    family: str,
    kernel_name: str,
    defines: dict[str, str],
    buffers: Sequence[engine.Buffer],
    threadgroups: tuple[int, ...],
    threads: tuple[int, ...],
) -> None:
    # Not at the top: importing the package must not wait for the compiler's side.
    from torch_metal_attn.simulator.build import build

    run = runs.current() or runs.Run()
    program = build(
        shaders.with_defines(shaders.source(family), defines),
        check=run.check,
        count=run.count,
        language=shaders.LANGUAGES.get(family, run.language),
    )
    kernel = program.kernels.get(kernel_name)
    if kernel is None:
        known = ", ".join(program.kernels) or "none"
        raise ValueError(f"shader {family} has no kernel {kernel_name}; it has {known}")
    image = program.image(kernel_name)
    # What the kernel declares counts. A buffer that no parameter names is never accessed.
    declared = {p.index: p for p in kernel.parameters if p.kind == "buffer"}
    buffers = [
        engine.Buffer(
            index=b.index,
            space=engine.SPACES.index(p.space),
            writable=b.writable and p.writable,
            storage=b.storage,
            bytes=b.bytes,
            offset=b.offset,
            initialised=b.initialised or run.initialised(b.storage or 0),
        )
        for b in buffers
        if (p := declared.get(b.index)) is not None
    ]
    grid = tuple(n * size for n, size in zip(threadgroups, threads, strict=True))
    started = time.perf_counter()
    counters = engine.run(
        image,
        kernel,
        buffers,
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
    launch = runs.LaunchRecord(kernel_name, dict(defines), grid, threads, seconds)
    runs.record(launch, counters, run.checked)


@_Callback
def _simulate(
    family: bytes,
    kernel: bytes,
    defines: bytes,
    buffers: Any,
    count: int,
    threadgroups: Any,
    threads: Any,
    status: Any,
) -> None:
    try:
        pairs = [line.split("=", 1) for line in defines.decode().split("\n") if line]
        launch = (
            family.decode(),
            kernel.decode(),
            dict(pairs),
            buffers[:count],
            tuple(threadgroups[:3]),
            tuple(threads[:3]),
        )
        run = runs.current()
        if run is not None and run.record:
            run.recorded.append(recording.recorded(*launch))
        else:
            _launch(*launch)
        status[0] = _DONE
    except BaseException as error:  # nothing may unwind into C++; raising() re-raises it
        _pending.error = error
        status[0] = _RAISED


engine.use(extension.load)
engine.library().metal_attn_set_simulator(_simulate)
