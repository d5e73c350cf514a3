"""From Metal text to a loaded image: preprocess, rewrite, compile, link, and cache on disk."""

import ctypes
import functools
import gc
import json
import os
import re
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path

from . import cache, diagnostics, toolchain
from .engine import MAX_THREADS
from .llvm.batches import batch_products
from .llvm.instrument import Frame, Site, instrument, with_padded_variables
from .llvm.ir import with_bool_elements
from .metal import reserved, versions
from .metal.constants import ConstantValue, FunctionConstant
from .metal.kernels import Kernel, Parameter, entries
from .metal.lexer import END_OF_SHIM, MetalSourceError, TokenList, lex
from .metal.rewrite import rewrite
from .parameter_types import ParameterType

__tracebackhide__ = diagnostics.hides_frames
HERE = Path(__file__).parent
SHIM = HERE / "shim"
IN_TEXTS = "/<metal>/"  # the shim's folder in preprocessed texts; clang makes other names absolute
SOURCE_NAME = "program_source"  # the name that Metal's own compiler gives a source without a file
TEXT = "program.cpp"
PRECOMPILED = "shim.pch"
# A GPU's compiler inlines all functions too. LLVM's own choice would take longer to compile.
INLINED = (
    "#pragma clang attribute push(__attribute__((always_inline)), apply_to = function)\n",
    "\n#pragma clang attribute pop\n",
)
MAX_COMPILED_AT_ONCE = 8  # the kernels of a text that has more are compiled one by one

# -fconvergent-functions: calls of the engine go through a table, so LLVM would not recognise a
# barrier and might duplicate it into branches. -fno-delete-null-pointer-checks: LLVM must not
# remove code because it uses a null pointer.
LANGUAGE = """-x c++ -std=c++17 -nostdinc -nostdinc++ -fno-exceptions -fno-rtti -fno-math-errno
    -ffp-contract=on -Xclang -cl-single-precision-constant
    -Xclang -ffloat16-excess-precision=none -Xclang -fbfloat16-excess-precision=none
    -fno-threadsafe-statics -fvisibility=hidden -fno-stack-protector -fno-finite-loops
    -fdebug-compilation-dir=/metal -Xclang -fconvergent-functions
    -fno-delete-null-pointer-checks""".split()
PREDEFINED = [
    *("-D__METAL__", "-D__HAVE_BFLOAT__=1"),
    *(f"-D{name}_H=((half){name}_F)" for name in reserved.MATH_CONSTANTS),
    *(f"-D{name}_BF=((bfloat){name}_F)" for name in reserved.MATH_CONSTANTS),
]
KEYWORDS = [
    "-Ddevice=__attribute__((opencl_global))",
    "-Dthreadgroup=__attribute__((opencl_local))",
    "-Dconstant=const __attribute__((opencl_constant))",
    "-Dthread=",
    "-Dhalf=_Float16",
    "-Dcoherent(scope)=",  # here all memory is coherent
]
# A thread's stack is small, as on a GPU. A function that needs more is an error, not an overflow.
DIAGNOSTICS = """-Wno-everything -Werror=vla-extension -Wframe-larger-than=200000
    -Werror=frame-larger-than -fno-caret-diagnostics -fno-color-diagnostics
    -Werror=return-stack-address -ferror-limit=200
    -fno-diagnostics-show-note-include-stack -fno-elide-type
    -ftemplate-backtrace-limit=0""".split()
# The flags stop a function that ends without a return, trap an access outside of a private
# variable, and call the engine at the start of each function, which finds endless recursion.
PLAIN = """-O2 -fsanitize=return,local-bounds -fno-sanitize-recover=return
    -fsanitize-trap=local-bounds -finstrument-function-entry-bare""".split()
CHECKED = """-O1 -gline-tables-only -gno-column-info -fno-vectorize -fno-slp-vectorize
    -fsanitize=thread -mllvm -tsan-instrument-func-entry-exit=0
    -mllvm -tsan-instrument-read-before-write=1 -mllvm -disable-vector-combine""".split()
# llvm/undefined.py turns the sanitizer's calls into calls to the engine. Builds that only count
# omit these flags, because the checks would be counted.
UNDEFINED = """-DMSL_UNDEFINED -fsanitize=array-bounds,integer-divide-by-zero,float-cast-overflow
    -fsanitize=shift-exponent,return,unreachable
    -fno-sanitize-recover=array-bounds,integer-divide-by-zero,float-cast-overflow,shift-exponent
    -ftrivial-auto-var-init=pattern""".split()
# Builds that count do unroll loops, because a GPU's compiler does. Other checked builds do not:
# their kernels seldom run long, and half the code compiles in three quarters of the time.
ROLLED = """-mllvm -unroll-threshold=0 -mllvm -pragma-unroll-threshold=0
    -mllvm -unroll-allow-partial=0""".split()
# -fms-extensions lets `clang -E` expand macros in pragmas, as clang does when it compiles.
EXPAND = "-E -fms-extensions -U_MSC_EXTENSIONS".split()
TO_IR = "-S -emit-llvm - -o -".split()
UNOPTIMISED = "-Xclang -disable-llvm-passes".split()
# Clang emits invalid IR for elements of its vectors of bool (`ir.with_bool_elements`). Only LLVM's
# verifier reports this. Without the verifier, LLVM's passes would turn the IR into other code.
VERIFIED = "-fverify-intermediate-code -fno-crash-diagnostics".split()
# The messages of Linux's and macOS's loaders for a function that is not defined.
MISSING = re.compile(r"(?:undefined symbol: |symbol not found[^']*'_)([^\s']+)")
BROKEN = "Broken module found"
# The IR is already optimised. Better machine code costs more time than a test's few launches save.
BACK_END = "-x ir -O0 -Xclang -disable-llvm-passes".split()
PLAIN_BACK_END = "-x ir -O2 -Xclang -disable-llvm-passes".split()


class ShaderCompileError(diagnostics.KernelError, SyntaxError):
    """Metal text that does not compile. torch raises RuntimeError or SyntaxError; this is both."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.msg = message


@dataclass(frozen=True, eq=False)
class Image:
    """Compiled kernels, loaded into this process."""

    sites: list[Site]
    library: ctypes.CDLL

    @functools.cache  # noqa: B019  images are never freed
    def address(self, symbol: str) -> int:
        return ctypes.cast(getattr(self.library, symbol), ctypes.c_void_p).value or 0

    @functools.cache  # noqa: B019
    def most_threads(self, symbol: str) -> int:
        """The maximum threads per threadgroup of the kernel with this `most_threads_symbol`."""
        limit = ctypes.c_uint.in_dll(self.library, symbol).value
        return min(limit or MAX_THREADS, MAX_THREADS)

    def types(self, kernel: Kernel) -> list[ParameterType]:
        array = ParameterType * len(kernel.parameters)
        return list(array.in_dll(self.library, kernel.types_symbol))


@dataclass(frozen=True)
class Program:
    """A rewritten Metal text, whose kernels are compiled when they are needed."""

    key: str
    text: str  # rewritten
    kernels: dict[str, Kernel]
    constants: list[FunctionConstant]
    check: bool
    counted: bool
    images: dict[str, Image] = field(default_factory=dict)  # by kernel

    @property
    def checked(self) -> bool:
        """True if each access is checked, as it is in builds that count."""
        return self.check or self.counted

    @property
    def compiles_at_once(self) -> bool:
        """True if all kernels share one image."""
        return len(self.kernels) <= MAX_COMPILED_AT_ONCE

    def image(self, name: str = "") -> Image:
        """The image that holds the kernel `name`, or all kernels."""
        return self.images.get(name) or self._image(name)

    def _image(self, name: str) -> Image:
        with _lock:
            if name not in self.images:
                whole = not name or self.compiles_at_once
                names = list(self.kernels) if whole else [name]
                group = [self.kernels[each] for each in names]
                image = _load_image(self._compiled(self.text + entries(group)))
                self.images.update(dict.fromkeys([name, *names], image))
            return self.images[name]

    def intermediate(self) -> str:
        """The LLVM IR of all kernels, as a plain build optimises it."""
        text = self.text + entries(list(self.kernels.values()))
        return _front_end([*host_command(), *PLAIN], text)

    def _compiled(self, text: str) -> Path:
        """The image's cache entry. The key is from the text, which some defines do not change."""
        kind = _kind(self.check, self.counted)
        key = cache.digest([own_digest(), toolchain.find().identity, text, kind])
        return cache.lookup(key) or cache.store(key, _compile(text, self.check, self.counted))


@lru_cache
def own_digest(*more: str) -> str:
    """A digest that changes whenever the pipeline, the shim or a module of `more` folders does."""
    folders = (".", "metal", "llvm", *more)
    python = (path for folder in folders for path in HERE.glob(f"{folder}/*.py"))
    ours = sorted([*python, *SHIM.rglob("*")])
    return cache.digest(part for p in ours if p.is_file() for part in (p.name, p.read_bytes()))


def _kind(checked: bool, counted: bool) -> str:
    return " and ".join(["checked"] * checked + ["counted"] * counted) or "plain"


_programs: dict[str, Program] = {}
_lock = threading.RLock()
_collector_is_paused = False


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector, which took half of the rewriter's time."""
    global _collector_is_paused
    if not gc.isenabled():
        yield
        return
    gc.disable()
    _collector_is_paused = True
    try:
        yield
    finally:
        _collector_is_paused = False
        gc.enable()


def _renew_lock() -> None:
    global _lock, _collector_is_paused
    _lock = threading.RLock()
    if _collector_is_paused:
        _collector_is_paused = False
        gc.enable()


# A thread that held the lock at the fork does not exist in the child, so nothing would release it.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def build(
    source: str,
    *,
    include_dirs: Sequence[str] = (),
    defines: Mapping[str, str] | None = None,
    constants: Mapping[int | str, ConstantValue] | None = None,
    check: bool = False,
    count: bool = False,
    language: str = versions.DEFAULT,
) -> Program:
    """Preprocess and rewrite a Metal text, or load the result of an earlier build."""
    request = [
        own_digest(),
        toolchain.find().identity,
        source,
        json.dumps(list((defines or {}).items())),
        repr(sorted((constants or {}).items(), key=repr)),
        _kind(check, count),
        language,
    ]

    def preprocessed() -> str:
        return preprocess(source, include_dirs, defines or {}, check, count, language)

    try:
        # Headers may change, so the key includes their text.
        text = preprocessed() if include_dirs else ""
        key = cache.digest([*request, text])
        with _lock:
            if key not in _programs:
                entry = cache.lookup(key)
                if entry is None:
                    files = _rewrite(text or preprocessed(), constants or {}, language, check)
                    entry = cache.store(key, files)
                _programs[key] = _load_program(key, entry, check, count)
            return _programs[key]
    except MetalSourceError as error:
        raise ShaderCompileError(f"the Metal source does not compile:\n{error}") from error


def preprocess(
    source: str,
    include_dirs: Iterable[str],
    defines: Mapping[str, str],
    check: bool,
    count: bool = False,
    language: str = versions.DEFAULT,
) -> str:
    """The text with its headers and macros expanded; raises for reserved words as macros."""
    command = [*toolchain.find().compile_command, *LANGUAGE, *PREDEFINED, *DIAGNOSTICS, *EXPAND]
    command += versions.flags(language)
    command += ["-isystem", str(SHIM)]
    command += [f"-I{os.path.abspath(directory)}" for directory in include_dirs]
    if check or count:
        command.append("-DMSL_CHECKED")
    if check:
        command.append("-DMSL_UNDEFINED")
    # The macros follow the shim, because a macro called T would break it.
    macros = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    text = f'{macros}#line 1 "{SOURCE_NAME}"\n{source}\n'
    # -imacros takes only the macros of the shim. Its text would be written and read each time.
    command_of_text = [*command, "-imacros", "metal_stdlib", "-"]
    if include_dirs or reserved.may_define(text):
        reserved.check_directives(_run([*command_of_text, "-dD"], text).partition(END_OF_SHIM)[2])
    if reserved.may_name_a_macro(text):
        unexpanded = _run(command_of_text, reserved.UNEXPANDED + text)
        tokens = TokenList(lex(unexpanded.partition(END_OF_SHIM)[2]))
        reserved.refuse_names(tokens, reserved.MACROS)
    preprocessed = _run(command_of_text, text)
    return _shim(tuple(command)) + _with_shared_names(preprocessed.partition(END_OF_SHIM)[2])


@lru_cache(maxsize=16)
def _shim(command: tuple[str, ...]) -> str:
    """The shim's text, which is the same for all kernels that `command` preprocesses."""
    text = _with_shared_names(_run([*command, "-include", "metal_stdlib", "-"], ""))
    return text[: text.index(END_OF_SHIM)] + END_OF_SHIM


def _with_shared_names(preprocessed: str) -> str:
    """The text with the shim's folder as IN_TEXTS, so that installations can share a cache."""
    return preprocessed.replace(str(SHIM) + os.sep, IN_TEXTS)


def _rewrite(
    preprocessed: str, constants: Mapping[int | str, ConstantValue], language: str, check: bool
) -> dict[str, bytes]:
    with _collector_paused():
        rewritten = rewrite(preprocessed, constants, language, check)
    about = {
        "kernels": [asdict(kernel) for kernel in rewritten.kernels],
        "constants": [asdict(constant) for constant in rewritten.constants],
    }
    return {TEXT: rewritten.text.encode(), "program.json": json.dumps(about).encode()}


def _load_program(key: str, entry: Path, check: bool, count: bool) -> Program:
    about = json.loads((entry / "program.json").read_text())
    kernels = {}
    for fields in about["kernels"]:
        parameters = [Parameter(**parameter) for parameter in fields.pop("parameters")]
        kernels[fields["name"]] = Kernel(parameters=parameters, **fields)
    constants = [FunctionConstant(**fields) for fields in about["constants"]]
    return Program(key, (entry / TEXT).read_text(), kernels, constants, check, count)


def _compile(text: str, check: bool, count: bool) -> dict[str, bytes]:
    tool = toolchain.find()
    command, back_end = host_command(), PLAIN_BACK_END
    sites: list[Site] = []
    if check or count:
        command += ["-DMSL_CHECKED", *CHECKED]
        command += [*(UNDEFINED if check else []), *([] if count else ROLLED)]
        # Without INLINED, LLVM optimises functions before it inlines them. Counting comes later.
        ir = _front_end(command, text, ("", "") if count else INLINED)
        with _collector_paused():
            ir, sites = instrument(ir, in_shim, count)
        back_end = BACK_END
    else:
        ir = batch_products(with_padded_variables(_front_end([*command, *PLAIN], text)))
    compiler = [*tool.compile_command, *tool.compiler_flags(), *back_end, *DIAGNOSTICS]
    with tempfile.TemporaryDirectory(prefix="torch_metal_attn-") as scratch:
        compiled, linked = f"{scratch}/image.o", f"{scratch}/image.so"
        _run([*compiler, "-c", "-", "-o", compiled], ir)
        _run([*tool.link_command, compiled, "-o", linked], "")
        image = Path(linked).read_bytes()
    table = [[vars(frame) for frame in site] for site in sites]
    return {"image.so": image, "sites.json": json.dumps(table).encode()}


def host_command() -> list[str]:
    """The compiler, for rewritten text."""
    tool = toolchain.find()
    compiler = [*tool.compile_command, *tool.compiler_flags()]
    return [*compiler, *LANGUAGE, *KEYWORDS, *DIAGNOSTICS]


def _front_end(command: list[str], text: str, around: tuple[str, str] = INLINED) -> str:
    """The optimised LLVM IR of a text that begins with the shim, with vectors of bool repaired."""
    try:
        return _ir_of(command, VERIFIED, text, around)
    except ShaderCompileError as error:
        if BROKEN not in str(error):
            raise
    ir = with_bool_elements(_ir_of(command, UNOPTIMISED, text, around))
    return _run([*command, *VERIFIED, "-x", "ir", *TO_IR], ir)


def _ir_of(command: list[str], more: list[str], text: str, around: tuple[str, str]) -> str:
    """The LLVM IR of a text. Errors have the message of a compilation without precompiled shim."""
    shim, marker, rest = text.partition(END_OF_SHIM)
    if marker:
        try:
            included = [*command, *more, "-include-pch", str(precompiled(command, shim))]
            return _run([*included, *TO_IR], rest.join(around))
        except ShaderCompileError as error:
            if BROKEN in str(error):
                raise
    return _run([*command, *more, *TO_IR], text)


def precompiled(command: list[str], shim: str) -> Path:
    """The shim as a precompiled header, in the cache, for compilations by the same command."""
    key = cache.digest([toolchain.find().identity, *command, shim])
    entry = cache.lookup(key)
    if entry is None:
        with tempfile.TemporaryDirectory(prefix="torch_metal_attn-") as scratch:
            header = Path(scratch, PRECOMPILED)
            _run([*command, "-x", "c++-header", "-", "-o", str(header)], shim)
            entry = cache.store(key, {PRECOMPILED: header.read_bytes()})
    return entry / PRECOMPILED


def _load_image(entry: Path) -> Image:
    table = json.loads((entry / "sites.json").read_text())
    path = entry / "image.so"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        if undefined := MISSING.search(str(error)):
            raise ShaderCompileError(
                f"the Metal source calls `{undefined[1]}`, which is only declared: define it. The "
                "simulator has none of Apple's own functions, such as those of `air.*`"
            ) from None
        raise RuntimeError(f"a compiled kernel does not load: {error}") from error
    return Image([tuple(Frame(**frame) for frame in site) for site in table], library)


def in_shim(file: str) -> bool:
    """True if a file belongs to the simulator and not to the Metal text."""
    return file.startswith((IN_TEXTS, "<"))


def _run(command: list[str], text: str) -> str:
    done = subprocess.run(
        command, input=text.encode(), capture_output=True, cwd=tempfile.gettempdir()
    )
    if done.returncode:
        messages = _with_shared_names(done.stderr.decode(errors="replace")).replace(
            IN_TEXTS, IN_TEXTS[1:]
        )
        readable = diagnostics.readable(messages, in_shim)
        raise ShaderCompileError(f"the Metal source does not compile:\n{readable}")
    return done.stdout.decode()
