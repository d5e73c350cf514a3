"""Metal text to PTX, for NVIDIA's driver."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.front_end import clang, front_end
from torch_metal_attn.simulator.constants import ConstantValue

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
    """Compile a kernel of a Metal text to PTX for sm_90.

    threads: of a threadgroup. registers: the limit of a thread (`.maxnreg`; ptxas ignores its own
    option beside `.maxntid`). lines: with line numbers of the Metal text, for compute-sanitizer.
    Defines that say how matrix products are computed are those of
    `gpu_headers/__msl_product.h`. Other arguments are those of `front_end`. transform: changes the
    optimised LLVM IR before code is made of it.
    """
    ir, entry = front_end(
        text, kernel, "nvptx_kernel, flatten", PTX, defines, constants, include_dirs, lines
    )
    # Buffers in constant memory are passed by address, like the others.
    ir = ir.replace("addrspace(4)", "addrspace(1)")
    if transform is not None:
        ir = transform(clang([*PTX, "-x", "ir", "-O3", "-S", "-emit-llvm", "-", "-o", "-"], ir))
    ptx = clang([*PTX, "-x", "ir", "-O3", "-S", "-", "-o", "-"], ir)
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
