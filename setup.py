"""Builds torch_metal_attn._C and ships the flattened shaders; metadata is in pyproject.toml."""

import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_py import build_py

if int(setuptools.__version__.split(".")[0]) < 77:
    # Older versions reject pyproject.toml with an error that does not name the needed version.
    raise SystemExit(
        f"error: the build needs setuptools 77 or later, and found {setuptools.__version__}: "
        "pip install 'setuptools>=77'"
    )

try:
    import torch
    from torch.utils import cpp_extension
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ModuleNotFoundError as error:
    # For a SystemExit pip shows this line and no traceback.
    raise SystemExit(
        f"error: the build needs {error.name}, which is not installed: "
        "pip install 'torch>=2.10' 'setuptools>=77' ninja"
    ) from None

ROOT = Path(__file__).parent
TORCH_2_10 = "0x020a000000000000"
# Most files include these headers, and parsing them takes two thirds of a file's compile time.
PRECOMPILED = "".join(f"#include <torch/csrc/stable/{x}.h>\n" for x in ("library", "ops", "tensor"))


def load(name: str) -> ModuleType:
    """Load a module of torch_metal_attn/runtime by path: importing the package needs _C."""
    path = ROOT / f"torch_metal_attn/runtime/{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def max_jobs() -> int:
    """How many compilers may run at once: each needs about 1 GB for torch's headers."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 2
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):  # limits of a container
        with suppress(OSError, ValueError):
            memory = min(memory, int(Path("/sys/fs/cgroup", limit).read_text()))
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    # The system and other programs keep 2 GB.
    return max(1, min(cores, memory // 2**30 - 2))


# Python's flags may also ask for x86_64, as in python.org's builds. torch has no Intel wheels.
FOR_ARM64 = (sys.platform, platform.machine()) == ("darwin", "arm64")
ONLY_ARM64 = FOR_ARM64 and "ARCHFLAGS" not in os.environ

os.environ.setdefault("MAX_JOBS", str(max_jobs()))
if FOR_ARM64:
    # The oldest macOS that this Python supports may lack std::filesystem.
    oldest = os.environ.get("MACOSX_DEPLOYMENT_TARGET") or "{}.{}".format(*load("macos").OLDEST)
    os.environ["MACOSX_DEPLOYMENT_TARGET"] = oldest
    if ONLY_ARM64:  # the wheel's name must say so too
        os.environ.setdefault("_PYTHON_HOST_PLATFORM", f"macosx-{oldest}-arm64")


class BuildPy(build_py):
    """Also writes each family's flattened text to _shaders/. Editable installs read shaders/."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        shaders = load("shaders")
        self.mkpath(os.path.join(self.build_lib, "torch_metal_attn", "_shaders"))
        for path in sorted(ROOT.glob("shaders/*.metal")):
            self._flattened(path).write_text(shaders.flatten(path), encoding="ascii")

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs: list[str] = super().get_outputs(include_bytecode)
        if not self.editable_mode:
            outputs += [str(self._flattened(path)) for path in ROOT.glob("shaders/*.metal")]
        return outputs

    def _flattened(self, path: Path) -> Path:
        return Path(self.build_lib, "torch_metal_attn", "_shaders", path.name)


class BuildExt(BuildExtension):
    """Keeps the objects of an editable install, so that later builds compile only changes."""

    def run(self) -> None:
        if self.editable_mode:
            self.build_temp = "build/editable"
        super().run()

    def build_extensions(self) -> None:
        for name in self.compiler.executables if ONLY_ARM64 else ():
            command = shlex.join(getattr(self.compiler, name, None) or [])
            if "-arch x86_64" in command:
                self.compiler.set_executable(name, command.replace("-arch x86_64", ""))
        compiler = cpp_extension.get_cxx_compiler()
        if precompiles(compiler):
            for extension in self.extensions:
                extension.extra_compile_args += ["-include", self._precompiled(compiler, extension)]
        super().build_extensions()

    def _precompiled(self, compiler: str, extension: Extension) -> str:
        """The path of a header, precompiled again if the compiler's command has changed."""
        header = Path(self.build_temp).absolute() / "torch.h"
        command = [compiler, *self.compiler.compiler_so[1:]]
        command += [f"-D{name}={value}" for name, value in extension.define_macros]
        folders = [*extension.include_dirs, sysconfig.get_path("include")]
        command += [f"-I{folder}" for folder in folders]
        command += [*extension.extra_compile_args, "-x", "c++-header", str(header)]
        text = f"// torch {torch.__version__}: {' '.join(command)}\n{PRECOMPILED}"
        compiled_header = header.with_suffix(".h.gch")
        if not compiled_header.exists() or header.read_text(encoding="utf-8") != text:
            header.parent.mkdir(parents=True, exist_ok=True)
            header.write_text(text, encoding="utf-8")
            subprocess.run([*command, "-o", str(compiled_header)], check=True)
        return str(header)


def precompiles(compiler: str) -> bool:
    """True for GCC without ccache, which does not cache files with a precompiled header."""
    path = shutil.which(compiler)
    if path is None or shutil.which("ccache"):
        return False
    shown = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    return "Free Software Foundation" in shown


def repository() -> str:
    """The repository's URL from pyproject.toml; "" and a warning until it is filled in."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    match = re.search(r'^repository = "(.*)"$', text, re.MULTILINE)
    url = match[1].rstrip("/") if match else ""
    if not url:
        print(
            "warning: pyproject.toml has no URL in [tool.torch_metal_attn] repository: the "
            "package has no links to its source and issues, and README.md's links stay relative",
            file=sys.stderr,
        )
    return url


REPOSITORY = repository()
URLS = {"Repository": "", "Issues": "/issues", "Changelog": "/blob/main/CHANGELOG.md"}


def description() -> str:
    """README.md, with absolute links if the repository has a URL."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    if not REPOSITORY:
        return readme

    def absolute(match: re.Match[str]) -> str:
        return f"{match[0]}{REPOSITORY}/{'raw' if match[0][0] == '!' else 'blob'}/main/"

    return re.sub(r"(!\[[^]]*\]\(|\]\()(?!https?://|#)", absolute, readme)


def under_root(pattern: str) -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern))


setup(
    long_description=description(),
    long_description_content_type="text/markdown",
    project_urls={name: f"{REPOSITORY}{path}" for name, path in URLS.items() if REPOSITORY},
    ext_modules=[
        CppExtension(
            "torch_metal_attn._C",
            under_root("csrc/**/*.cpp"),
            include_dirs=[str(ROOT)],
            depends=[
                *under_root("csrc/**/*.h"),
                *under_root("torch_metal_attn/simulator/shim/**/*.h"),
                *under_root("shaders/params/*.h"),
            ],
            py_limited_api=True,
            define_macros=[("TORCH_TARGET_VERSION", TORCH_2_10)],
            # Python's flags have -g -O3, which take a third more time and add 20 MB of symbols.
            extra_compile_args=["-std=c++20", "-fvisibility=hidden", "-O2", "-g0"],
        )
    ],
    cmdclass={"build_ext": BuildExt, "build_py": BuildPy},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
