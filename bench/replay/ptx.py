"""Metal text to PTX, for NVIDIA's driver."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.front_end import clang, front_end
from torch_metal_attn.simulator.metal.constants import ConstantValue

from . import vector_loads

PTX = ["--target=nvptx64-nvidia-cuda", "-march=sm_90", "-nocudalib"]
PTX += ["-Xclang", "-target-feature", "-Xclang", "+ptx80"]


@dataclass(frozen=True)
class Ptx:
    """A kernel for NVIDIA's driver.

    Attributes: text: PTX with one entry, `symbol`. buffers: the Metal buffer slots that are its
    parameters, in their order: a 64-bit device address each. Threadgroup memory is static.
    """

    text: str
    symbol: str
    buffers: list[int]


@dataclass(frozen=True)
class Source:
    """What a program is compiled from: a kernel of a Metal text; see `front_end`.

    threads: of a threadgroup. defines: those that say how matrix products are computed are of
    `gpu_headers/__msl_product.h`. lines: for compute-sanitizer, with line numbers and every load as
    it is in the text. Otherwise neighbouring loads are joined: see `vector_loads`.
    """

    text: str
    kernel: str
    threads: int
    defines: Mapping[str, object] = field(default_factory=dict)
    constants: Mapping[int | str, ConstantValue] = field(default_factory=dict)
    include_dirs: Sequence[Path] = ()
    lines: bool = False

    @property
    def name(self) -> str:
        """The kernel's name and what tells this source from others."""
        known = (self.text, self.threads, self.defines, self.constants, self.include_dirs)
        digest = hashlib.sha256(repr((known, self.lines)).encode())
        return f"{self.kernel}-{digest.hexdigest()[:10]}"


def compile_ptx(source: Source) -> Ptx:
    """Compile a kernel to PTX for sm_90."""
    ir, entry = front_end(
        source.text,
        source.kernel,
        "nvptx_kernel, flatten",
        PTX,
        source.defines,
        source.constants,
        source.include_dirs,
        source.lines,
    )
    # Buffers in constant memory are passed by address, like the others.
    ir = ir.replace("addrspace(4)", "addrspace(1)")
    if not source.lines:
        ir = clang([*PTX, "-x", "ir", "-O3", "-S", "-emit-llvm", "-", "-o", "-"], ir)
        ir = vector_loads.joined(ir)
    ptx = clang([*PTX, "-x", "ir", "-O3", "-S", "-", "-o", "-"], ir)
    # LLVM writes a modifier that ptxas refuses with this type.
    ptx = re.sub(r"(setp\.\w+)\.ftz(\.bf16)", r"\1\2", ptx)
    ptx, found = re.subn(
        rf"(\.entry {entry.symbol}\([^)]*\)\s*(?://[^\n]*\n\s*)?)\{{",
        lambda match: f"{match.group(1)}\n.maxntid {source.threads}, 1, 1\n{{",
        ptx,
    )
    assert found == 1, "the entry of the kernel"
    return Ptx(ptx, entry.symbol, entry.buffers)
