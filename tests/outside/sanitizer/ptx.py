"""Metal text to PTX, for NVIDIA's driver."""

import re

from bench.front_end import Source, clang, front_end

from .packed import Program

PTX = ["--target=nvptx64-nvidia-cuda", "-march=sm_90", "-nocudalib"]
PTX += ["-Xclang", "-target-feature", "-Xclang", "+ptx80"]


def compile_ptx(source: Source) -> Program:
    """Compile a kernel to PTX for sm_90: one entry, with a 64-bit device address for each buffer.

    Threadgroup memory is static.
    """
    ir, entry = front_end(source, "nvptx_kernel, flatten", PTX)
    # Buffers in constant memory are passed by address, like other buffers.
    ir = ir.replace("addrspace(4)", "addrspace(1)")
    ptx = clang([*PTX, "-x", "ir", "-O3", "-S", "-", "-o", "-"], ir)
    # LLVM writes a modifier that ptxas refuses with this type.
    ptx = re.sub(r"(setp\.\w+)\.ftz(\.bf16)", r"\1\2", ptx)
    ptx, count = re.subn(
        rf"(\.entry {entry.symbol}\([^)]*\)\s*(?://[^\n]*\n\s*)?)\{{",
        lambda match: f"{match.group(1)}\n.maxntid {source.threads}, 1, 1\n{{",
        ptx,
    )
    assert count == 1, "the PTX has not exactly one entry of the kernel"
    return Program(ptx, entry.symbol, entry.buffers)
