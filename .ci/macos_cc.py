"""A compiler and linker for macOS on arm64, for setuptools on Linux: zig and a few stubs.

What it gets are the options of this machine's Python for this machine's compiler; it keeps those
that say something about the code. As a program its first argument is the folder of the stubs.
"""

import runpy
import subprocess
import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

# Without the package, whose import takes as long as compiling a file.
MACOS = runpy.run_path(str(Path(__file__).parents[1] / "torch_metal_attn/runtime/macos.py"))
TARGET = "aarch64-macos.{}.{}".format(*MACOS["OLDEST"])
SOURCES = (".cpp", ".c")
KEPT = ("-I", "-D", "-std=", "-fvisibility")
KEPT_WITH_A_VALUE = ("-o", "-MF")
COMPILE = [
    "-O3",
    # Without it zig's libc++ calls std::__hash_memory, which macOS 14 does not have.
    "-U_LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS",
    "-D_LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS=1",
    # torch takes no operator delete with a size from macOS: nothing would prove that it is there.
    "-fno-sized-deallocation",
]
LINK = [
    "-dynamiclib",
    # Without these zig compiles its own checks of undefined behaviour and compiler-rt first, in
    # 15 s, for code that uses neither: what lacks a symbol of theirs does not link.
    "-O3",
    "-rtlib=none",
    # zig would link a libc++ of its own: exceptions could not cross into libtorch.
    "-nostdlib++",
    "-Wl,-dead_strip",
    # torch is loaded before, so dyld knows its libraries by name; this is for who inspects us.
    "-Wl,-rpath,@loader_path/../torch/lib",
]


def write_stub(folder: Path, install_name: str, symbols: Iterable[str]) -> None:
    """A text stub (.tbd): for the linker a library with that name and those symbols."""
    quoted = ", ".join(f"'{symbol}'" for symbol in sorted(symbols))
    text = f"""--- !tapi-tbd
tbd-version: 4
targets: [ arm64-macos ]
install-name: '{install_name}'
exports:
  - targets: [ arm64-macos ]
    symbols: [ {quoted} ]
...
"""
    (folder / Path(install_name).with_suffix(".tbd").name).write_text(text)


def translated(arguments: list[str], stubs: Path) -> list[str]:
    """zig's arguments for those of a compiler driver, for compiling or for linking."""
    kept = [argument for argument in arguments if argument.startswith(KEPT)]
    for option, value in pairwise(arguments):
        if option in KEPT_WITH_A_VALUE:
            kept += [option, value]
    if "-c" in arguments:
        sources = [argument for argument in arguments if argument.endswith(SOURCES)]
        dependencies = ["-MMD"] if "-MMD" in arguments else []
        return ["-target", TARGET, "-c", *sources, *kept, *dependencies, *COMPILE]
    objects = [argument for argument in arguments if argument.endswith(".o")]
    output = Path(arguments[arguments.index("-o") + 1])
    libraries = [str(path) for path in sorted(stubs.glob("*.tbd"))]
    name = ["-install_name", f"@rpath/{output.name}"]
    return ["-target", TARGET, *objects, "-o", str(output), *libraries, *LINK, *name]


def run(arguments: list[str], stubs: Path) -> int:
    command = [sys.executable, "-m", "ziglang", "c++", *translated(arguments, stubs)]
    return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(run(sys.argv[2:], Path(sys.argv[1])))
