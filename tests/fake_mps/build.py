"""Compiles csrc/runtime/mps.cpp and the ops against the fake shim, for tests/test_launch.py."""

import ctypes
import fcntl
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

ROOT = Path(__file__).parent.parent.parent
FOLDER = Path(__file__).parent

# How params reach the kernel, by what the shim has: torch 2.14, torch 2.10 to 2.13, neither.
VARIANTS = {"bytes": ["-DFAKE_SET_BYTES"], "member": ["-DFAKE_MEMBER"], "tensor": []}

SourceCallback = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)


class FakeMps:
    """One variant of the shim with the launch layer linked to it: its ops, and its record."""

    def __init__(self, variant: str, library: Path) -> None:
        self.variant = variant
        torch.ops.load_library(str(library))
        self.ops = getattr(torch.ops, f"fake_mps_{variant}")
        self.library = ctypes.CDLL(str(library))
        self.library.fake_mps_log.restype = ctypes.c_char_p
        self.library.fake_mps_last_text.restype = ctypes.c_char_p
        self.library.fake_mps_overlapped.restype = ctypes.c_bool
        self._texts: dict[str, ctypes.Array[ctypes.c_char]] = {}
        self._callback = SourceCallback(self._source)
        self.serve_families()

    def _source(self, family: bytes) -> int | None:
        text = self._texts.get(family.decode())
        return None if text is None else ctypes.addressof(text)

    def serve_families(self) -> None:
        """Makes `add_family` what the launches compile."""
        self.library.metal_attn_set_shader_source(self._callback)

    def add_family(self, family: str, text: str) -> None:
        self._texts[family] = ctypes.create_string_buffer(text.encode())

    def clear(self) -> None:
        self.library.fake_mps_clear()
        self.fail("")

    def fail(self, shim: str) -> None:
        """Makes the shim of this name fail until further notice; "" makes none fail."""
        self.library.fake_mps_fail(shim.encode())

    def log(self) -> list[str]:
        return self.library.fake_mps_log().decode().splitlines()

    def last_text(self) -> str:
        """What was last given to be compiled, compiled or not; any byte is one character."""
        return self.library.fake_mps_last_text().decode("latin-1")

    def overlapped(self) -> bool:
        """Whether two command blocks ever ran at once."""
        return self.library.fake_mps_overlapped()


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "c++"))


def build(folder: Path) -> dict[str, Path]:
    """The library of each variant, built in `folder` by whichever process comes first."""
    folder.mkdir(parents=True, exist_ok=True)
    libraries = {variant: folder / f"libfake_mps_{variant}.so" for variant in VARIANTS}
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not all(library.exists() for library in libraries.values()):
            _compile_and_link(folder, libraries)
    return libraries


def _compile_and_link(folder: Path, libraries: dict[str, Path]) -> None:
    shared = [
        *ROOT.glob("csrc/ops/*.cpp"),
        *(ROOT / "csrc/runtime" / f"{n}.cpp" for n in ("mps", "callbacks")),
    ]
    jobs = {
        folder / f"{source.stem}.o": (source, ["-DTORCH_METAL_ATTN_FAKE_MPS"]) for source in shared
    }
    for variant, defines in VARIANTS.items():
        jobs[folder / f"fake_{variant}.o"] = (FOLDER / "fake_mps.cpp", defines)
        jobs[folder / f"driver_{variant}.o"] = (
            FOLDER / "driver.cpp",
            [f"-DFAKE_NAMESPACE=fake_mps_{variant}"],
        )

    flags = [
        "-std=c++20",
        "-O0",
        "-fPIC",
        "-fvisibility=hidden",
        "-Wall",
        "-Werror=return-type",
        "-DTORCH_TARGET_VERSION=0x020a000000000000",
        f"-I{ROOT}",
        *(f"-isystem{path}" for path in include_paths()),
    ]

    def compile_one(output: Path) -> None:
        source, defines = jobs[output]
        _run([compiler(), *flags, *defines, "-c", source, "-o", output])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_one, jobs))

    objects = [folder / f"{source.stem}.o" for source in shared]
    torch_libraries = [
        *(f"-L{path}" for path in library_paths()),
        "-ltorch",
        "-ltorch_cpu",
        "-lc10",
    ]
    for variant, library in libraries.items():
        own = [folder / f"fake_{variant}.o", folder / f"driver_{variant}.o"]
        unfinished = library.with_suffix(".tmp")
        _run([compiler(), "-shared", "-o", unfinished, *objects, *own, *torch_libraries])
        unfinished.rename(library)


def _run(command: list[object]) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stderr}")
