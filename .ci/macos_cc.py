"""A compiler and linker for macOS on arm64, for setuptools on Linux: zig and a few stubs.

setuptools passes options for this machine's compiler; only the options about the code are kept. If
this file is run as a program, its first argument is the folder of the stubs.
"""

import runpy
import subprocess
import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

# Loaded by path, because importing the package takes as long as compiling a file.
MACOS = runpy.run_path(str(Path(__file__).parents[1] / "torch_metal_attn/runtime/macos.py"))
TARGET = "aarch64-macos.{}.{}".format(*MACOS["OLDEST"])
SOURCES = (".cpp", ".c")
KEPT = ("-I", "-D", "-std=", "-fvisibility")
KEPT_WITH_A_VALUE = ("-o", "-MF")
COMPILE = [
    "-O3",
    # Without these two, zig's libc++ calls std::__hash_memory, which macOS 14 does not have.
    "-U_LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS",
    "-D_LIBCPP_HAS_VENDOR_AVAILABILITY_ANNOTATIONS=1",
    # No library of torch uses sized operator delete, so the check could not prove macOS has it.
    "-fno-sized-deallocation",
]
LINK = [
    "-dynamiclib",
    # Without these two, zig first spends 15 s on compiling compiler-rt and a runtime for
    # undefined behaviour. The code needs neither: it links without them.
    "-O3",
    "-rtlib=none",
    # Exceptions could not cross between libtorch and the libc++ that zig would link.
    "-nostdlib++",
    "-Wl,-dead_strip",
    # dyld finds torch's loaded libraries by name; the path is for tools that inspect the library.
    "-Wl,-rpath,@loader_path/../torch/lib",
]


def write_stub(folder: Path, install_name: str, symbols: Iterable[str]) -> None:
    """Write a text stub (.tbd), which the linker takes for a library with these symbols."""
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
    """The zig arguments that do what these arguments of a compiler driver ask for."""
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
