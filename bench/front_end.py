"""Compiles Metal to LLVM IR for NVIDIA and SPIR-V, with the simulator's front end and ziglang.

`bench/gpu_headers` replaces the headers that call the simulator's engine.
"""

import hashlib
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from torch_metal_attn.runtime import shaders
from torch_metal_attn.simulator import build, toolchain
from torch_metal_attn.simulator.build import PREDEFINED, SHIM, ShaderCompileError
from torch_metal_attn.simulator.metal import versions
from torch_metal_attn.simulator.metal.kernels import Kernel, arguments
from torch_metal_attn.simulator.metal.rewrite import rewrite

HEADERS = Path(__file__).parent / "gpu_headers"

LANGUAGE = """-x c++ -std=c++17 -nostdinc -nostdinc++ -ffreestanding -fno-exceptions -fno-rtti
    -fno-math-errno -ffp-contract=on -fconvergent-functions -Wno-everything -fno-sanitize=all
    -Xclang -cl-single-precision-constant -Xclang -ffloat16-excess-precision=none
    -Xclang -fbfloat16-excess-precision=none
    -Xclang -fdenormal-fp-math-f32=preserve-sign,preserve-sign""".split()
# Macros that are defined after preprocessing, because the headers use these words differently.
KEYWORDS = [
    *build.KEYWORDS,
    "-D__msl_threadgroup_memory(name,bytes,alignment)=({ static "
    "__attribute__((loader_uninitialized, aligned(alignment))) threadgroup char memory[bytes]; "
    "&memory[0]; })",
]


def source_of(family: str, specialisation: Mapping[str, str]) -> str:
    return shaders.with_defines(shaders.source(family), specialisation)


@dataclass(frozen=True)
class Source:
    """A kernel of a Metal text. lines: keep line numbers and every load, for compute-sanitizer."""

    text: str
    kernel: str
    threads: int
    defines: Mapping[str, object] = field(default_factory=dict)
    lines: bool = False

    @property
    def name(self) -> str:
        digest = hashlib.sha256(repr((self.text, self.threads, self.defines, self.lines)).encode())
        return f"{self.kernel}-{digest.hexdigest()[:10]}"


@dataclass(frozen=True)
class Entry:
    """The function that the GPU runs. buffers: the Metal slots of its parameters, in order."""

    symbol: str
    buffers: list[int]
    text: str


def _entry(kernel: Kernel, attributes: str) -> Entry:
    """The function that the GPU runs: it calls the kernel with the buffers."""
    symbol = "gpu_" + re.sub(r"\W", "_", kernel.name)
    buffers = sorted(p.index for p in kernel.parameters if p.kind == "buffer" and not p.condition)
    device = ", ".join(f"device char* __restrict buffer{slot}" for slot in buffers)
    places = "".join(
        f"launch_state.buffers[{slot}] = (void*)(ulong)buffer{slot}; " for slot in buffers
    )
    text = (
        f'\n# 1 "<entry>" 1 3\nextern "C" __attribute__(({attributes})) void {symbol}({device}) {{ '
        "__msl_launch launch_state; __msl_thread state; __gpu_place(launch_state, state); "
        "const __msl_launch* launch = &launch_state; const __msl_thread* thread_state = &state; "
        f"{places}typedef ::metal::__signature<{kernel.type}> S; "
        f"{kernel.callee}({arguments(kernel)}); }}\n"
    )
    return Entry(symbol, buffers, text)


def front_end(source: Source, attributes: str, target: list[str]) -> tuple[str, Entry]:
    """A kernel's LLVM IR before optimisation, and its entry. Raises ShaderCompileError."""
    kernel, defines = source.kernel, source.defines
    macros = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    command = [*target, *LANGUAGE, *PREDEFINED, *versions.flags(versions.DEFAULT)]
    command += ["-isystem", str(HEADERS), "-isystem", str(SHIM), "-include", "metal_stdlib"]
    options = [f"-D{name}={value}" for name, value in defines.items() if "MSL_" in name]
    text = f'{macros}#line 1 "program_source"\n{source.text}\n'
    rewritten = rewrite(clang([*command, *options, "-E", "-"], text), {})
    named = {each.name: each for each in rewritten.kernels}
    if kernel not in named:
        raise ValueError(f"the text has no kernel {kernel}; it has {', '.join(sorted(named))}")
    entry = _entry(named[kernel], attributes)
    command = [*target, *LANGUAGE, *KEYWORDS, *(["-gline-tables-only"] if source.lines else [])]
    command += ["-O3", "-Xclang", "-disable-llvm-passes", "-S", "-emit-llvm", "-", "-o", "-"]
    ir = clang(command, rewritten.text + entry.text)
    # All other functions are internal, so that they are inlined into the entry or dropped.
    ir = re.sub(r"^\$.*= comdat any\n", "", ir, flags=re.M)
    ir = re.sub(r",? comdat(\([^)]*\))?", "", ir)
    ir = re.sub(
        r"^(@.*? = |define )(?:dso_local )?(?:linkonce_odr|weak_odr|weak)( hidden| protected)?",
        r"\1internal",
        ir,
        flags=re.M,
    )
    return ir, entry


def clang(arguments_: list[str], text: str) -> str:
    done = subprocess.run(
        [*compiler(), *arguments_],
        input=text.encode(),
        capture_output=True,
        cwd=tempfile.gettempdir(),
    )
    if done.returncode:
        raise ShaderCompileError(done.stderr.decode(errors="replace"))
    return done.stdout.decode()


def compiler() -> list[str]:
    """The command of ziglang's clang. Other builds of clang rarely have both back ends."""
    spec = find_spec("ziglang")
    if spec is None or not spec.submodule_search_locations:
        raise toolchain.ToolchainError("ziglang's clang has the GPU back ends: pip install ziglang")
    return [str(Path(next(iter(spec.submodule_search_locations))) / "zig"), "clang"]
