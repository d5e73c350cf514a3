"""Compiles csrc/runtime/mps.cpp and the ops against the fake shim, for tests and bench."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils.cpp_extension import include_paths, library_paths

from tests.helpers.shared import locked

ROOT = Path(__file__).parents[3]
FOLDER = Path(__file__).parent

FAKE = "TORCH_METAL_ATTN_FAKE_MPS"  # the define of sources that differ on the fake shim

# Ways to pass params: a function (torch 2.14), a member function (2.10 to 2.13), a tensor. Ways to
# commit a command buffer: torch's stream, its C++ API, none. The last variant keeps no error text
# either, like torch before 2.13.
VARIANTS = {"bytes": ["-DFAKE_SET_BYTES"], "member": ["-DFAKE_MEMBER"], "tensor": []}

# The stages that can refuse a text: front end, pipeline, dispatch.
STAGES = ("text", "pipeline", "dispatch")

EXTENSION = ROOT / "build/editable"


class FakeMps:
    """A variant of the shim that is linked with the launch layer: its ops and its record."""

    def __init__(self, variant: str, library: Path, *, insist: bool = True) -> None:
        """insist: skip the trial of mps, which fails without set_gpu."""
        self.variant = variant
        torch.ops.load_library(str(library))
        self.ops = getattr(torch.ops, f"fake_mps_{variant}")
        self.library = ctypes.CDLL(str(library))
        self.library.fake_mps_overlapped.restype = ctypes.c_bool
        texts = [f"fake_mps_{name}" for name in ("log", "last_text", "allocations")]
        for name in (*texts, "metal_attn_mps_problem", "metal_attn_tensor_tiles_problem"):
            getattr(self.library, name).restype = ctypes.c_char_p
        if insist:
            with mock.patch.dict(os.environ, TORCH_METAL_ATTN_BACKEND="mps"):
                assert self.problem() == ""

    def problem(self) -> str:
        """Why mps cannot be used; decided by the first call or launch of the process."""
        return self.library.metal_attn_mps_problem().decode()

    def add_family(self, family: str, text: str) -> None:
        self.library.metal_attn_set_shader_text(family.encode(), text.encode())

    def clear(self) -> None:
        self.library.fake_mps_clear()
        self.fail("")
        self.refuse("")
        self.set_stream(0)
        self.library.fake_mps_set_compiler(None)

    def fail(self, shim: str, text: str | None = None, *, after: int = 0) -> None:
        """Makes this shim fail with `text` from its call number `after` on; "" makes none fail."""
        text = f"{shim} was told to fail" if text is None else text
        self.library.fake_mps_fail(shim.encode(), text.encode(), after)

    def refuse(self, part: str, stage: str = "text") -> None:
        """Makes texts that contain `part` fail in this stage; "" makes none fail."""
        self.library.fake_mps_refuse(part.encode(), STAGES.index(stage))

    def set_compiler(self, begin: Callable[[str], None]) -> None:
        signature = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
        self._compiler = signature(lambda text: begin(text.decode("latin-1")))
        self.library.fake_mps_set_compiler(self._compiler)

    def set_gpu(self, run: Callable[[str, int], None]) -> None:
        """Makes `run` do each dispatch: the shader's text, and the address of buffer 0."""
        self.set_gpu_of_all(lambda text, addresses: run(text, addresses[0]))

    def set_gpu_of_all(self, run: Callable[[str, list[int]], None]) -> None:
        """`set_gpu` with the addresses of all buffers; 0 for a buffer that was never set."""
        signature = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p))
        self._gpu = signature(lambda text, all_: run(text.decode(), [a or 0 for a in all_[:31]]))
        self.library.fake_mps_set_gpu(self._gpu)

    def set_stream(self, number: int) -> None:
        """Makes this stream the current one. Blocks record its number if it is not 0."""
        self.library.fake_mps_set_stream(number)

    def log(self) -> list[str]:
        return self.library.fake_mps_log().decode().splitlines()

    def last_text(self) -> str:
        """The last text passed to the compiler; each byte is one character."""
        return self.library.fake_mps_last_text().decode("latin-1")

    def allocations(self) -> list[int]:
        """How often each launch allocated before its block; needs count_malloc.cpp preloaded."""
        return [int(line) for line in self.library.fake_mps_allocations().split()]

    def overlapped(self) -> bool:
        return self.library.fake_mps_overlapped()


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "c++"))


def build(folder: Path) -> dict[str, Path]:
    """The library of each variant, built in `folder` by whichever process comes first."""
    libraries = {variant: folder / f"libfake_mps_{variant}.so" for variant in VARIANTS}
    defines = {
        libraries[variant]: [f'-DFAKE_NAMESPACE="fake_mps_{variant}"', *defines]
        for variant, defines in VARIANTS.items()
    }
    _build(folder, defines, [FOLDER / "fake_mps.cpp"], [FOLDER / "driver.cpp"], "-O0")
    return libraries


def build_quiet(folder: Path) -> Path:
    """The installed package's ops on a shim that does nothing, optimised as the extension is."""
    library = folder / "libquiet_mps.so"
    defines = ["-DFAKE_QUIET", '-DFAKE_NAMESPACE="quiet"', *VARIANTS["bytes"]]
    own = [FOLDER / name for name in ("fake_mps.cpp", "quiet_ops.cpp")]
    _build(folder, {library: defines}, own, [], "-O2")
    return library


def check_quiet() -> None:
    """Raise RuntimeError if the source of bench_launch does not compile."""
    _run([*compile_command(), "-fsyntax-only", FOLDER / "quiet_ops.cpp"])


def run_counted(program: str, library: Path) -> Any:
    """The JSON that a program prints, in a process that loads count_malloc.cpp first."""
    folder = library.parent
    counter = folder / "libcount_malloc.so"
    with locked(folder):
        if not counter.exists():
            source = FOLDER / "count_malloc.cpp"
            _run([*compile_command()[:1], "-shared", "-fPIC", "-O1", source, "-o", counter])
    settings = os.environ | {"PYTHONPATH": str(ROOT), "LD_PRELOAD": str(counter)}
    return json.loads(_run([sys.executable, "-c", program, library], env=settings))


def compile_command(root: Path = ROOT, optimisation: str = "-O0") -> list[str]:
    """The compiler and its options for files of the extension below `root`."""
    return [
        compiler() or "c++",
        *("-std=c++20", optimisation, "-fPIC", "-fvisibility=hidden"),
        *("-Wall", "-Werror=return-type", "-DTORCH_TARGET_VERSION=0x020a000000000000"),
        f"-I{root}",
        *(f"-isystem{path}" for path in include_paths()),
        *_precompiled(),
    ]


def link_command(*objects: str | Path) -> list[str | Path]:
    torch_libraries = [*(f"-L{path}" for path in library_paths()), "-ltorch_cpu", "-lc10"]
    return [compiler() or "c++", "-shared", *objects, *torch_libraries]


def of_the_extension(sources: Iterable[Path]) -> dict[Path, Path]:
    """The extension's objects by source, if they are up to date and built against this torch."""
    rules = EXTENSION / "build.ninja"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    ninja = shutil.which("ninja", path=path)
    if ninja is None or not rules.exists():
        return {}
    dry_run = subprocess.run([ninja, "-C", EXTENSION, "-nv"], capture_output=True, text=True)
    text = rules.read_text()
    if dry_run.returncode != 0 or not all(name in text for name in include_paths()):
        return {}
    objects = {s: EXTENSION / s.relative_to(ROOT).with_suffix(".o") for s in sources}
    stale = set(dry_run.stdout.split())
    objects = {s: o for s, o in objects.items() if str(o) in text}  # a moved checkout has none
    return {s: o for s, o in objects.items() if o.exists() and str(o) not in stale}


def _precompiled() -> list[str]:
    """Options that use the extension's precompiled header; they must repeat its macros."""
    header = EXTENSION / "torch.h"
    if not header.exists():
        return []
    macros = ["-DNDEBUG", "-DTORCH_API_INCLUDE_EXTENSION_H", "-DTORCH_EXTENSION_NAME=_C"]
    macros += ["-DPy_LIMITED_API=0x030A0000", "-D__OPTIMIZE__=1", "-U__NO_INLINE__"]
    return [*macros, "-include", str(header)]


def _build(
    folder: Path,
    libraries: dict[Path, list[str]],
    own: list[Path],
    common: list[Path],
    optimisation: str,
) -> None:
    """Builds each library from the launch layer, `common`, and `own` with its defines."""
    with locked(folder):
        if all(library.exists() for library in libraries):
            return
        shared = [*common]
        for name in ("ops", "problem", "tiles", "runtime"):
            shared += ROOT.glob(f"csrc/{name}/**/*.cpp")
        shared = [source for source in shared if source.stem not in ("simulator", "params_text")]
        kept = of_the_extension(source for source in shared if FAKE not in source.read_text())
        jobs = {
            folder / f"{source.parent.name}_{source.stem}.o": (source, [f"-D{FAKE}"])
            for source in shared
            if source not in kept
        }
        linked = [*kept.values(), *jobs]
        for library, defines in libraries.items():
            jobs |= {folder / f"{library.stem}_{s.stem}.o": (s, defines) for s in own}
        compiling = compile_command(optimisation=optimisation)
        with ThreadPoolExecutor(2) as pool:
            commands = [[*compiling, *d, "-c", s, "-o", output] for output, (s, d) in jobs.items()]
            list(pool.map(_run, commands))
        for library in libraries:
            objects = [*linked, *(folder / f"{library.stem}_{source.stem}.o" for source in own)]
            unfinished = library.with_suffix(".tmp")
            _run([*link_command(*objects), "-o", unfinished])
            unfinished.rename(library)


def _run(command: list[str | Path], env: dict[str, str] | None = None) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}\n{done.stderr}")
    return done.stdout
