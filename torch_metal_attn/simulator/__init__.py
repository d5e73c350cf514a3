"""Run Metal compute shaders on the CPU: compile them, execute them, and check every access."""

import importlib
from typing import TYPE_CHECKING, Any

from .engine import Counters, SimulatorFault
from .recording import RecordedBuffer, RecordedLaunch
from .runs import simulate

if TYPE_CHECKING:
    from .build import ShaderCompileError
    from .library import compile_shader
    from .replacing import replacing_compile_shader

__all__ = [
    "Counters",
    "RecordedBuffer",
    "RecordedLaunch",
    "ShaderCompileError",
    "SimulatorFault",
    "compile_shader",
    "replacing_compile_shader",
    "simulate",
]

# Names from modules that compile Metal, which are imported at the first use of one.
_MODULES = {
    "ShaderCompileError": "build",
    "compile_shader": "library",
    "replacing_compile_shader": "replacing",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
