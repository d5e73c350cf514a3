"""Run Metal compute shaders on the CPU: compile them, execute them, and check every access."""

from .build import ShaderCompileError
from .engine import Counters, SimulatorFault
from .library import compile_shader
from .recording import RecordedBuffer, RecordedLaunch
from .replacing import replacing_compile_shader
from .runs import simulate

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
