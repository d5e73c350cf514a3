"""Metal text compiled for GPUs that clang has a back end for: AMD's, for registers, and NVIDIA's.

The simulator's front end prepares the text (preprocess and rewrite); `bench/gpu_headers` takes the
place of the headers that call the simulator's engine. ziglang's clang has both back ends.

AMD's back end allocates registers for waves of 32 lanes, as Apple's does for SIMD groups. An 8x8
matrix product is one opaque instruction with the registers that Apple's has. It is not Apple's
compiler: its count says what a kernel needs, beside other kernels that are compiled alike.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from torch_metal_attn.runtime import shaders
from torch_metal_attn.simulator import build, toolchain, versions
from torch_metal_attn.simulator.build import PREDEFINED, SHIM, ShaderCompileError
from torch_metal_attn.simulator.constants import ConstantValue
from torch_metal_attn.simulator.kernels import Kernel, arguments
from torch_metal_attn.simulator.rewrite import rewrite

HEADERS = Path(__file__).parent / "gpu_headers"

LANGUAGE = """-x c++ -std=c++17 -nostdinc -nostdinc++ -ffreestanding -fno-exceptions -fno-rtti
    -fno-math-errno -ffp-contract=on -fconvergent-functions -Wno-everything -fno-sanitize=all
    -Xclang -cl-single-precision-constant -Xclang -ffloat16-excess-precision=none
    -Xclang -fbfloat16-excess-precision=none
    -Xclang -fdenormal-fp-math-f32=preserve-sign,preserve-sign""".split()
# Only after the headers are expanded, as they use these words otherwise.
KEYWORDS = [
    *build.KEYWORDS,
    "-D__msl_threadgroup_memory(name,bytes,alignment)=({ static "
    "__attribute__((loader_uninitialized, aligned(alignment))) threadgroup char memory[bytes]; "
    "&memory[0]; })",
]
AMDGPU = ["--target=amdgcn-amd-amdhsa", "-mcpu=gfx1100", "-nogpulib"]
# Without the form of a multiply-add that overwrites its addend, which Apple's has not.
AMDGPU += ["-Xclang", "-target-feature", "-Xclang", "-dl-insts"]
PTX = ["--target=nvptx64-nvidia-cuda", "-march=sm_90", "-nocudalib"]
PTX += ["-Xclang", "-target-feature", "-Xclang", "+ptx80"]

# Of a thread on M1 and M2. The back end allocates in steps of 24, so it uses 120 of them.
REGISTERS = 128
AMD_REGISTERS = 1536  # of a lane, for all waves of a SIMD unit


@dataclass(frozen=True)
class Registers:
    """What the back end made of a kernel.

    Attributes: used: 32-bit vector registers of a thread. spilled: how many values went to memory
    for want of registers. scratch: bytes of private memory of a thread, spilled values included.
    scalar: registers that a SIMD group has once, which are not in `used`.
    """

    used: int
    spilled: int
    scratch: int
    scalar: int

    @property
    def needed(self) -> int:
        """Registers with which nothing would be spilled, roughly."""
        return self.used + self.spilled


@dataclass(frozen=True)
class Ptx:
    """A kernel for NVIDIA's driver.

    Attributes: text: PTX with one entry, `symbol`. buffers: the Metal buffer slots that are its
    parameters, in their order: a 64-bit device address each. Threadgroup memory is static.
    """

    text: str
    symbol: str
    buffers: list[int]


def compile_amdgpu(
    text: str,
    kernel: str,
    threads: int,
    *,
    defines: Mapping[str, object] | None = None,
    constants: Mapping[int | str, ConstantValue] | None = None,
    include_dirs: Sequence[str | Path] = (),
    registers: int = REGISTERS,
) -> Registers:
    """Compile a kernel of a Metal text for AMDGPU with at most `registers` registers a thread.

    text: Metal, as `source_of` gives this project's. kernel: its name (host_name, if it has one).
    threads: of a threadgroup. defines, constants: macros, and values of function constants.
    Raises ShaderCompileError with the compiler's message.
    """
    waves = AMD_REGISTERS // registers
    attributes = f"amdgpu_kernel, flatten, amdgpu_waves_per_eu({waves}, {waves})"
    attributes += f", amdgpu_flat_work_group_size({threads}, {threads})"
    ir, _ = _front_end(text, kernel, attributes, AMDGPU, defines, constants, include_dirs)
    # Threadgroup memory must not decide how many waves there are.
    ir = re.sub(
        r"^(@\S+ = )internal (addrspace\(3\) global) \[\d+ x (.*)\] (undef|poison)",
        r"\1external \2 [0 x \3]",
        ir,
        flags=re.M,
    )
    assembly = _clang([*AMDGPU, "-x", "ir", "-O3", "-S", "-", "-o", "-"], ir)
    end = assembly[assembly.index(".amdhsa_kernel") :]

    def value(pattern: str, of: str) -> int:
        match = re.search(pattern, of)
        assert match, pattern
        return int(match.group(1))

    return Registers(
        used=value(r"NumVgprs: (\d+)", end),
        spilled=value(r"vgpr_spill_count: (\d+)", assembly),
        scratch=value(r"ScratchSize: (\d+)", end),
        scalar=value(r"NumSgprs: (\d+)", end),
    )


def compile_ptx(
    text: str,
    kernel: str,
    threads: int,
    *,
    defines: Mapping[str, object] | None = None,
    constants: Mapping[int | str, ConstantValue] | None = None,
    include_dirs: Sequence[str | Path] = (),
    registers: int | None = None,
    lines: bool = False,
    transform: Callable[[str], str] | None = None,
) -> Ptx:
    """Compile a kernel of a Metal text to PTX for sm_90; other arguments as `compile_amdgpu`.

    registers: the limit of a thread (`.maxnreg`; ptxas ignores its own option beside `.maxntid`).
    lines: with line numbers of the Metal text, for compute-sanitizer. Defines that say how matrix
    products are computed are those of `gpu_headers/__msl_product.h`. transform: changes the
    optimised LLVM IR before code is made of it.
    """
    ir, entry = _front_end(
        text, kernel, "nvptx_kernel, flatten", PTX, defines, constants, include_dirs, lines
    )
    # Buffers in constant memory are passed by address, like the others.
    ir = ir.replace("addrspace(4)", "addrspace(1)")
    if transform is not None:
        ir = transform(_clang([*PTX, "-x", "ir", "-O3", "-S", "-emit-llvm", "-", "-o", "-"], ir))
    ptx = _clang([*PTX, "-x", "ir", "-O3", "-S", "-", "-o", "-"], ir)
    limits = f".maxntid {threads}, 1, 1\n"
    if registers is not None:
        limits += f".maxnreg {registers}\n"
    ptx, found = re.subn(
        rf"(\.entry {entry.symbol}\([^)]*\)\s*(?://[^\n]*\n\s*)?)\{{",
        lambda match: f"{match.group(1)}\n{limits}{{",
        ptx,
    )
    assert found == 1, "the entry of the kernel"
    return Ptx(ptx, entry.symbol, entry.buffers)


def source_of(family: str, specialisation: Mapping[str, object]) -> str:
    """The text that a specialisation of this project's kernels is compiled from."""
    defines = "".join(f"#define {name} {value}\n" for name, value in specialisation.items())
    return defines + shaders.source(family)


@dataclass(frozen=True)
class _Entry:
    symbol: str
    buffers: list[int]
    text: str


def _entry(kernel: Kernel, attributes: str) -> _Entry:
    """The function that a GPU starts, which calls the kernel with its buffers."""
    symbol = "gpu_" + re.sub(r"\W", "_", kernel.name)
    buffers = sorted(p.index for p in kernel.parameters if p.kind == "buffer" and not p.condition)
    given = ", ".join(f"device char* __restrict buffer{slot}" for slot in buffers)
    places = "".join(
        f"launch_state.buffers[{slot}] = (void*)(ulong)buffer{slot}; " for slot in buffers
    )
    text = (
        f'\n# 1 "<entry>" 1 3\nextern "C" __attribute__(({attributes})) void {symbol}({given}) {{ '
        "__msl_launch launch_state; __msl_thread state; __gpu_place(launch_state, state); "
        "const __msl_launch* launch = &launch_state; const __msl_thread* thread_state = &state; "
        f"{places}typedef ::metal::__signature<{kernel.type}> S; "
        f"{kernel.callee}({arguments(kernel)}); }}\n"
    )
    return _Entry(symbol, buffers, text)


def _front_end(
    text: str,
    kernel: str,
    attributes: str,
    target: list[str],
    defines: Mapping[str, object] | None,
    constants: Mapping[int | str, ConstantValue] | None,
    include_dirs: Iterable[str | Path],
    lines: bool = False,
) -> tuple[str, _Entry]:
    """The LLVM IR of one kernel of a Metal text, not optimised yet, and its entry."""
    macros = "".join(f"#define {name} {value}\n" for name, value in (defines or {}).items())
    command = [*target, *LANGUAGE, *PREDEFINED, *versions.flags(versions.DEFAULT)]
    command += ["-isystem", str(HEADERS), "-isystem", str(SHIM), "-include", "metal_stdlib"]
    command += [f"-I{directory}" for directory in include_dirs]
    options = [f"-D{name}={value}" for name, value in (defines or {}).items() if "MSL_" in name]
    expanded = _clang(
        [*command, *options, "-E", "-"], f'{macros}#line 1 "program_source"\n{text}\n'
    )
    rewritten = rewrite(expanded, constants or {})
    named = {one.name: one for one in rewritten.kernels}
    if kernel not in named:
        raise ValueError(f"the text has no kernel {kernel}; it has {', '.join(sorted(named))}")
    entry = _entry(named[kernel], attributes)
    command = [*target, *LANGUAGE, *KEYWORDS, *(["-gline-tables-only"] if lines else [])]
    command += ["-O3", "-Xclang", "-disable-llvm-passes", "-S", "-emit-llvm", "-", "-o", "-"]
    ir = _clang(command, rewritten.text + entry.text)
    # One caller each: what is not the entry is inlined there or dropped.
    ir = re.sub(r"^\$.*= comdat any\n", "", ir, flags=re.M)
    ir = re.sub(r",? comdat(\([^)]*\))?", "", ir)
    ir = re.sub(
        r"^(@.*? = |define )(?:dso_local )?(?:linkonce_odr|weak_odr|weak)( hidden| protected)?",
        r"\1internal",
        ir,
        flags=re.M,
    )
    return ir, entry


def _clang(arguments_: list[str], text: str) -> str:
    done = subprocess.run(
        [*_compiler(), *arguments_],
        input=text.encode(),
        capture_output=True,
        cwd=tempfile.gettempdir(),
    )
    if done.returncode:
        raise ShaderCompileError(done.stderr.decode(errors="replace"))
    return done.stdout.decode()


def _compiler() -> list[str]:
    """ziglang's clang: others seldom have both back ends."""
    spec = find_spec("ziglang")
    if spec is None or not spec.submodule_search_locations:
        raise toolchain.ToolchainError("clang's GPU back ends are ziglang's: pip install ziglang")
    return [str(Path(next(iter(spec.submodule_search_locations))) / "zig"), "clang"]
