"""`replacing_compile_shader()`: in a block, torch.mps.compile_shader compiles for the simulator."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from . import lint, runs
from .diagnostics import hides_frames
from .library import ShaderLibrary, compile_for_torch
from .metal import versions
from .renaming import Renaming

__tracebackhide__ = hides_frames


@dataclass(eq=False)
class _Block:
    check: bool
    language: str


_lock = threading.Lock()  # guards _open, _process_wide and _renaming
_open = 0  # number of open blocks, of all threads
_process_wide: tuple[_Block, ...] = ()
_renaming: Renaming | None = None
_in_thread: ContextVar[_Block | None] = ContextVar("torch_metal_attn_compile_shader", default=None)


@contextmanager
def replacing_compile_shader(
    check: bool = True, process_wide: bool = False, language: str = versions.DEFAULT
) -> Iterator[None]:
    """Inside a `with` block, `torch.mps.compile_shader` compiles for the simulator.

        with replacing_compile_shader():
            library = torch.mps.compile_shader(source)

    Code that calls the function then runs on CPU tensors, on any machine. The function is replaced
    in every module outside of torch that has imported it. Libraries and kernels raise an error for
    options that torch does not have.

    Args:
        check: build with checks: a kernel that breaks a rule raises SimulatorFault. A source that
            torch would reject on a Mac raises ShaderCompileError, even if clang compiles it.
        process_wide: apply to every thread and not only to this one.
        language: version of Metal, as in `compile_shader`.

    Blocks nest. The thread's innermost block applies. A thread without a block uses the innermost
    process-wide block. Libraries remain usable after the block.
    """
    block = _Block(runs.as_bool("check", check), versions.checked(language))
    global _open, _process_wide, _renaming
    is_thread_only = not runs.as_bool("process_wide", process_wide)
    with _lock:
        if process_wide:
            _process_wide = (*_process_wide, block)
        _open += 1
        if _renaming is None:
            original = torch.mps.compile_shader
            _renaming = Renaming(original, _replacement_of(original), torch.mps)
    token = _in_thread.set(block) if is_thread_only else None
    try:
        yield
    finally:
        if token is not None:
            _in_thread.reset(token)
        with _lock:
            _process_wide = tuple(other for other in _process_wide if other is not block)
            _open -= 1
            if _open == 0 and _renaming is not None:
                _renaming.undo()
                _renaming = None


def _replacement_of(original: Callable[[str], Any]) -> Callable[[str], Any]:
    @functools.wraps(original)
    def replaced(source: str) -> ShaderLibrary | Any:
        block = _in_thread.get() or (_process_wide[-1] if _process_wide else None)
        if block is None:
            return original(source)
        library = compile_for_torch(source, block.check, block.language)
        if block.check:
            lint.refuse(source, block.language)
        return library

    return replaced
