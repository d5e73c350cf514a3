"""`compile_shader`: like torch.mps.compile_shader, for CPU tensors."""

import math
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from . import engine, parameter_types, runs
from .build import Program, ShaderCompileError, build
from .diagnostics import hides_frames
from .engine import Buffer, Counters
from .metal import reserved, versions
from .metal.constants import ConstantValue
from .metal.kernels import Kernel, Parameter
from .parameter_types import CASTS, ParameterType
from .tensors import DEFAULT_MODEL, tensor_model
from .threadgroup_memory import LIMIT, threadgroup_bytes
from .wording import count_text, type_text, value_text

__tracebackhide__ = hides_frames
SIMD_WIDTH = 32
USE_OURS = "compile with torch_metal_attn.simulator.compile_shader, which has"

# Keyword arguments of a kernel that torch's kernels do not have.
OPTIONS = "seed workers step_limit threadgroup_bytes lane_map relaxed_precision".split()

ArgCasts = str | Mapping[int, str] | None

MACRO = re.compile(r"[A-Za-z_]\w*(\([\w\s,.]*\))?", re.ASCII)


def compile_shader(
    source: str,
    *,
    include_dirs: Iterable[str | os.PathLike[str]] = (),
    defines: Mapping[str, str | int | bool] | None = None,
    constants: Mapping[int | str, ConstantValue] | None = None,
    check: bool = False,
    count: bool = False,
    language: str = versions.DEFAULT,
    strict_simd: bool = False,
) -> "ShaderLibrary":
    """Compile Metal source for the CPU. The kernels are attributes of the library that it returns.

    Args:
        source: Metal text. Headers of torch (`c10/metal/...`) are always found.
        include_dirs: where `#include` looks.
        defines: macros by name. True becomes 1, and False becomes 0.
        constants: function constants, by index or by name.
        check: build with checks: a kernel that breaks a rule raises SimulatorFault.
        count: build with checks, and also count operations: see `Counters`.
        language: version of Metal, "3.1", "3.2" or "4.0". It sets `__METAL_VERSION__`. Constructs
            of a later version do not compile.
        strict_simd: with `check`, a SIMD operation that only some lanes of a SIMD group reach is a
            fault, although Metal defines it over the active lanes.

    Raises ShaderCompileError (a RuntimeError and a SyntaxError) if the text does not compile or has
    no kernel; ValueError for unknown constants, for constants out of their type's range, for
    invalid names or values of defines and for an unknown language; FileNotFoundError for
    include_dirs that are not directories; TypeError for arguments of another type.

    Example:
        >>> lib = compile_shader('''kernel void scale(device float* x, constant float& by,
        ...                         uint i [[thread_position_in_grid]]) { x[i] *= by; }''')
        >>> x = torch.ones(3)
        >>> lib.scale(x, 2.0)
        >>> x
        tensor([2., 2., 2.])
    """
    folders, macros = folders_and_macros(source, include_dirs, defines)
    _check_mapping("constants", constants)
    program = build(
        source,
        include_dirs=folders,
        defines=macros,
        constants=constants,
        check=runs.as_bool("check", check),
        count=runs.as_bool("count", count),
        language=versions.checked(language),
    )
    if not program.kernels:
        raise ShaderCompileError(_no_kernel(source))
    if program.compiles_at_once:
        program.image(next(iter(program.kernels)))
    return ShaderLibrary(program, runs.as_bool("strict_simd", strict_simd))


def _no_kernel(source: str) -> str:
    if "\n" not in source and re.fullmatch(r"\s*\S+\.(metal|msl|h|txt)\s*", source):
        return (
            f"source is {source!r}, a path; it must be Metal text: pass "
            f"Path({source.strip()!r}).read_text()"
        )
    if re.search(r"\b__global__\b", source):
        return "the source has no kernel: it is CUDA, whose __global__ is `kernel` in Metal"
    if not source.strip():
        return "the source is empty; it must be Metal text with a function declared `kernel`"
    return "the source has no kernel: declare a function `kernel void`, or instantiate a template"


def folders_and_macros(
    source: str,
    include_dirs: Iterable[str | os.PathLike[str]],
    defines: Mapping[str, str | int | bool] | None,
) -> tuple[list[str], dict[str, str]]:
    """The include folders and macros of a text. Checks all three arguments."""
    if not isinstance(source, str):
        raise TypeError(f"source is {type_text(source)}; it must be a str")
    try:
        source.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"source cannot be encoded as UTF-8: {error}") from None
    folders = _folders(include_dirs)
    if "c10/metal/" in source:  # headers of torch
        folders.append(str(Path(torch.__file__).parent / "include"))
    _check_mapping("defines", defines)
    return folders, {name: _macro(name, value) for name, value in (defines or {}).items()}


def _check_mapping(name: str, value: object) -> None:
    if value is not None and not isinstance(value, Mapping):
        raise TypeError(f"{name} is {type_text(value)}; it must be a dict")


def _folders(include_dirs: Iterable[str | os.PathLike[str]]) -> list[str]:
    is_one = isinstance(include_dirs, str | bytes | os.PathLike | torch.Tensor)
    if is_one or not isinstance(include_dirs, Iterable):
        raise TypeError(
            f"include_dirs is {value_text(include_dirs)}; it must be a list of directories"
        )
    folders = []
    for directory in include_dirs:
        if not isinstance(directory, (str, os.PathLike)):
            raise TypeError(f"include_dirs has {value_text(directory)}; each item must be a path")
        if not os.path.isdir(directory):
            raise FileNotFoundError(f"include_dirs: {directory} is not a directory")
        folders.append(os.fspath(directory))
    return folders


def _macro(name: str, value: str | int | bool) -> str:
    if not isinstance(name, str) or not MACRO.fullmatch(name):
        raise ValueError(f"defines has {value_text(name)}, which is not the name of a macro")
    word = name.partition("(")[0]
    if word in reserved.NO_MACROS:
        raise ValueError(f"defines: {reserved.message(word)}")
    if not isinstance(value, (str, int, float)):
        raise TypeError(
            f"defines[{name!r}] is {type_text(value)}; it must be a str, an int or a bool"
        )
    text = str(int(value)) if isinstance(value, bool) else str(value)
    if "\n" in text or "\r" in text or text.endswith("\\"):
        raise ValueError(f"defines[{name!r}] is {value_text(text)}; it must be one line")
    return text


class ShaderLibrary:
    """The kernels of a Metal text, as attributes; `dir()` lists them."""

    def __init__(self, program: Program, strict_simd: bool = False) -> None:
        self._program = program
        self._strict_simd = strict_simd
        self._as_torch = False
        self._last_counters: Counters | None = None

    @property
    def last_counters(self) -> Counters | None:
        """Counts of the last kernel that ran. `Counters` lists which counts need which build."""
        if self._as_torch:
            raise AttributeError  # Python then calls `__getattr__`, which adds the message
        return self._last_counters

    @cached_property
    def _threadgroup_bytes(self) -> dict[str, int]:
        return threadgroup_bytes(self._program)

    def __dir__(self) -> list[str]:
        return list(self._program.kernels)

    def __getattr__(self, name: str) -> "ShaderKernel":
        kernel = self._program.kernels.get(name) if not name.startswith("_") else None
        if name == "last_counters" and kernel is None:
            raise AttributeError(f"torch's libraries have no last_counters; {USE_OURS} them")
        if kernel is None:
            known = ", ".join(self._program.kernels) or "none"
            raise AttributeError(f"the library has no kernel {name!r}; it has {known}")
        return ShaderKernel(self, kernel)


class ShaderKernel:
    """One kernel. Call it with the tensors and numbers of its buffers."""

    thread_execution_width = SIMD_WIDTH

    def __init__(self, library: ShaderLibrary, kernel: Kernel) -> None:
        self._library = library
        self._kernel = kernel

    @property
    def max_threads_per_threadgroup(self) -> int:
        """1024, or the kernel's max_total_threads_per_threadgroup. The first access compiles it."""
        return self._library._program.image(self._kernel.name).most_threads(
            self._kernel.most_threads_symbol
        )

    @property
    def static_thread_group_memory_length(self) -> int:
        """Bytes of the kernel's threadgroup variables. The first access compiles the library."""
        return self._library._threadgroup_bytes[self._kernel.name]

    def __repr__(self) -> str:
        parameters = (f"{p.type} {p.name}" for p in self._kernel.parameters)
        return f"<kernel {self._kernel.name}({', '.join(parameters)})>"

    def __call__(
        self,
        *args: Any,
        threads: int | Sequence[int] | None = None,
        group_size: int | Sequence[int] | None = None,
        arg_casts: ArgCasts = None,
        seed: int | None = None,
        workers: int | None = None,
        step_limit: int | None = None,
        threadgroup_bytes: Mapping[int, int] | None = None,
        lane_map: str | int | None = None,
        relaxed_precision: str | None = None,
    ) -> None:
        """Run the kernel.

        Args:
            args: argument i is for [[buffer(i)]]: a CPU tensor, an int (as int64), a float (as
                float32), a bool (as int64), or a list or tuple of numbers; None for no buffer.
            threads: threads of the grid, 1 to 3 dimensions; by default the first tensor's numel.
            group_size: threads of a threadgroup, with as many dimensions as `threads`. At most 1024
                in all, or the kernel's max_total_threads_per_threadgroup; by default as many as fit
                in the first dimension.
            arg_casts: the types of scalars, as one name for all or a dict by argument index: fp16,
                bf16, int32, int16, int8 or uint8. As in torch, values are cast without a check.
            seed: shuffles the order of threadgroups and SIMD groups. If the library checks, the
                seed also switches threads at atomics and lets weak exchanges fail.
            workers: host threads to use, at most 1024; one per core by default.
            step_limit: how many loop iterations the threads of a threadgroup may run in total. If
                the library checks, more is a fault. The default, 2**28, takes two seconds or more.
            threadgroup_bytes: length of each [[threadgroup(i)]] argument.
            lane_map: which lane holds which element of a cooperative tensor: "apple10", "apple9"
                or the seed of a random map. The default is that of the `simulate` block, or
                "apple10".
            relaxed_precision: whether tensor operations of relaxed precision "truncate" or "round"
                float operands. The default is that of the `simulate` block, or "truncate".

        Kernels see a tensor's storage from the tensor's first element on. Strides are ignored. The
        dtype must match the parameter's elements, but an integer may differ in sign. Tensors of
        uint8 and parameters of char and uchar match any type. A number must have the type that the
        kernel declares, except that an int fits any integer type that is wide enough. For
        autograd, a tensor that a kernel may write counts as modified in place.

        Raises SimulatorFault if the library checks and the kernel breaks a rule; TypeError and
        ValueError for missing or extra arguments, and for arguments of another type or out of
        range.
        """
        name, program = self._kernel.name, self._library._program
        if self._library._as_torch:
            options = (seed, workers, step_limit, threadgroup_bytes, lane_map, relaxed_precision)
            _as_torch(self._kernel, dict(zip(OPTIONS, options, strict=True)))
        run = runs.current()
        if run is not None and run.record:
            raise RuntimeError(
                f"kernel {name} of compile_shader is called in simulate(record=True), which only "
                "records the launches of ops; call the kernel outside of the block"
            )
        if self._kernel.missing:
            raise ValueError(
                f"kernel {name} needs a value for function constants "
                f"{', '.join(self._kernel.missing)}: pass constants= to compile_shader"
            )
        image = program.image(name)
        pairs = zip(self._kernel.parameters, image.types(self._kernel), strict=True)
        types = [(parameter, type) for parameter, type in pairs if type.exists]
        parameters = [parameter for parameter, _ in types]
        tensors = _tensors(name, args, arg_casts)
        buffers = _bind(self._kernel, parameters, tensors, program.checked)
        _check_types(name, args, tensors, types)
        most = image.most_threads(self._kernel.most_threads_symbol)
        grid, group = _grid(name, args, threads, group_size, most)
        memory = _threadgroup_memory(name, parameters, threadgroup_bytes)
        if 0 in grid:
            return
        started = time.perf_counter()
        counters = engine.run(
            image,
            self._kernel,
            buffers,
            threads_per_grid=grid,
            threads_per_threadgroup=group,
            checked=program.checked,
            counted=program.counted,
            threadgroup_bytes=memory,
            seed=runs.as_int("seed", seed, 2**63 - 1),
            workers=runs.as_int("workers", workers, runs.MOST_WORKERS, minimum=1),
            step_limit=runs.as_int("step_limit", step_limit, 2**63 - 1, minimum=1),
            tensors=tensor_model(
                lane_map, relaxed_precision, run.tensors if run else DEFAULT_MODEL
            ),
            strict_simd=self._library._strict_simd,
        )
        self._library._last_counters = counters
        written = {p.index for p in parameters if p.kind == "buffer" and p.space != "constant"}
        for index, tensor in enumerate(tensors):
            if tensor is not None and index in written and not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
        launch = runs.LaunchRecord(name, {}, grid, group, time.perf_counter() - started)
        runs.record(launch, counters, program.checked)


def compile_for_torch(source: str, check: bool, language: str = versions.DEFAULT) -> ShaderLibrary:
    """A library with exactly the interface of those that torch.mps.compile_shader returns."""
    library = compile_shader(source, check=check, language=language)
    library._as_torch = True
    return library


def _as_torch(kernel: Kernel, options: Mapping[str, Any]) -> None:
    name = kernel.name
    for option, value in options.items():
        if value is not None:
            raise TypeError(f"{name}: torch's kernels take no {option}; {USE_OURS} it")
    if kernel.missing:
        raise ValueError(
            f"{name} needs a value for function constants {', '.join(kernel.missing)}: "
            "torch.mps.compile_shader sets none; make them macros or template arguments, or "
            f"{USE_OURS} constants"
        )
    for parameter in kernel.parameters:
        if parameter.kind == "threadgroup":
            raise ValueError(
                f"{name}: {parameter.name} is [[threadgroup({parameter.index})]], whose length "
                "torch.mps.compile_shader cannot set; declare an array in the kernel, such as "
                f"`threadgroup float {parameter.name}[256];`, or {USE_OURS} threadgroup_bytes"
            )


def _tensors(kernel: str, args: Sequence[Any], casts: ArgCasts) -> list[torch.Tensor | None]:
    """Each argument as a tensor. Scalars become tensors of the type that the kernel gets."""
    if casts is not None and not isinstance(casts, (str, Mapping)):
        raise TypeError(f"arg_casts is {type_text(casts)}; it must be a str or a dict")
    names = list(casts.values()) if isinstance(casts, Mapping) else [casts] if casts else []
    for name in names:
        if name not in list(CASTS):
            raise ValueError(f"arg_casts has {value_text(name)}; expected {', '.join(CASTS)}")
    for index in casts if isinstance(casts, Mapping) else ():
        if index not in range(len(args)) or args[index] is None:
            raise ValueError(f"{kernel}: arg_casts[{index!r}]: there is no argument {index!r}")
        if isinstance(args[index], torch.Tensor):
            raise ValueError(
                f"{kernel}: arg_casts[{index!r}]: argument {index!r} is a tensor; "
                "only scalars are cast"
            )
    tensors: list[torch.Tensor | None] = []
    for index, arg in enumerate(args):
        if arg is None:
            tensors.append(None)
        elif isinstance(arg, torch.Tensor):
            _check_tensor(f"{kernel}: argument {index}", arg)
            tensors.append(arg)
        else:
            cast = casts.get(index) if isinstance(casts, Mapping) else casts
            tensors.append(_scalars(kernel, index, arg, cast))
    return tensors


def _check_tensor(what: str, tensor: torch.Tensor) -> None:
    unsupported = {
        f"on {tensor.device}": tensor.device.type != "cpu",
        f"of layout {tensor.layout}": tensor.layout != torch.strided,
        "nested": tensor.is_nested,
        "quantized": tensor.is_quantized,
        "negated by a flag (call .resolve_neg() first)": tensor.is_neg(),
        "conjugated by a flag (call .resolve_conj() first)": tensor.is_conj(),
        "without memory of its own": not _has_memory(tensor),
    }
    for kind, applies in unsupported.items():
        if applies:
            raise ValueError(f"{what} is a tensor {kind}; the simulator takes dense CPU tensors")
    if 0 in tensor.shape:
        return
    last = tensor.storage_offset() + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    stored = tensor.untyped_storage().nbytes()
    if (last + 1) * tensor.element_size() > stored:
        raise ValueError(
            f"{what} has shape {tuple(tensor.shape)} and a storage of {stored} bytes, "
            "which is too small: the storage has been resized"
        )


def _has_memory(tensor: torch.Tensor) -> bool:
    """False for tensors without data: fake tensors, efficient zeros and functorch's wrappers."""
    if tensor.is_nested or tensor.layout != torch.strided:
        return False
    try:
        storage = tensor.untyped_storage()
        return storage.device.type == "cpu" and storage.data_ptr() >= 0
    except RuntimeError:
        return False


def _scalars(kernel: str, index: int, arg: Any, cast: str | None) -> torch.Tensor:
    values = list(arg) if isinstance(arg, (list, tuple)) else [arg]
    if not values:
        raise ValueError(f"{kernel}: argument {index} is empty")
    if all(isinstance(value, int) for value in values):
        dtype = torch.int64
        if not all(-(2**63) <= value < 2**63 for value in values):
            raise OverflowError(f"{kernel}: argument {index} does not fit an int64")
    elif isinstance(values[0], float) and all(isinstance(v, (int, float)) for v in values):
        dtype = torch.float32
    else:
        wrong = next((v for v in values if not isinstance(v, (int, float))), values[-1])
        raise TypeError(
            f"{kernel}: argument {index} is or holds {type_text(wrong)}; "
            "it must be a tensor, an int, a float, or a list of one kind of number"
        )
    wide = torch.float64 if dtype is torch.float32 else dtype
    tensor = torch.tensor(values, dtype=wide, device="cpu").to(dtype)
    return tensor.to(CASTS[cast]) if cast else tensor


def _bind(
    kernel: Kernel,
    parameters: Sequence[Parameter],
    tensors: Sequence[torch.Tensor | None],
    checked: bool,
) -> list[Buffer]:
    expected: dict[int, Parameter] = {}
    for parameter in (p for p in parameters if p.kind == "buffer"):
        other = expected.setdefault(parameter.index, parameter)
        if other is not parameter:
            both = f"{other.name} and {parameter.name}"
            raise ValueError(f"{kernel.name}: {both} are both buffer({parameter.index})")
    run = runs.current() or runs.Run()
    absent = {p.index for p in kernel.parameters if p.kind == "buffer"} - set(expected)
    buffers: list[Buffer] = []
    for index, tensor in enumerate(tensors):
        if tensor is None or index in absent:
            continue
        if index not in expected:
            last = max(expected, default=-1)
            raise TypeError(
                f"{kernel.name}: argument {index} has no parameter: there is no buffer({index}); "
                f"the last is buffer({last})" + (f" {expected[last].name}" if expected else "")
            )
        storage = tensor.untyped_storage()
        initialised = run.initialised(storage.data_ptr())
        if initialised and not checked:
            raise ValueError(
                f"{kernel.name}: argument {index} is in simulate's uninitialised, but the library "
                "does not check; pass check=True to compile_shader"
            )
        buffers.append(
            Buffer(
                index=index,
                space=engine.SPACES.index(expected[index].space),
                writable=expected[index].writable,
                storage=storage.data_ptr(),
                bytes=storage.nbytes(),
                offset=int(tensor.storage_offset()) * tensor.element_size(),
                initialised=initialised,
            )
        )
    bound = {buffer.index for buffer in buffers}
    for index, parameter in sorted(expected.items()):
        if index not in bound:
            raise TypeError(
                f"{kernel.name}: no argument for {parameter.declared}; the call has "
                f"{count_text(len(tensors), 'argument')}"
            )
    return buffers


def _check_types(
    kernel: str,
    args: Sequence[Any],
    tensors: Sequence[torch.Tensor | None],
    types: Sequence[tuple[Parameter, ParameterType]],
) -> None:
    for parameter, expected in types:
        if parameter.kind != "buffer":
            continue
        arg, tensor = args[parameter.index], tensors[parameter.index]
        assert tensor is not None  # see _bind
        if isinstance(arg, torch.Tensor):
            parameter_types.check_tensor(kernel, tensor, parameter, expected)
        else:
            parameter_types.check_numbers(kernel, arg, tensor, parameter, expected)


def _grid(
    kernel: str,
    args: Sequence[Any],
    threads: int | Sequence[int] | None,
    group_size: int | Sequence[int] | None,
    most: int,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if threads is None:
        first = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
        if first is None:
            raise ValueError(f"{kernel}: no argument is a tensor, so pass threads=")
        threads = first.numel()
    grid = _dimensions(kernel, "threads", threads)
    if group_size is None:
        group = [max(min(grid[0], most), 1) if len(grid) == 1 else most]
    else:
        group = _dimensions(kernel, "group_size", group_size)
        if len(group) != len(grid):
            raise ValueError(
                f"{kernel}: group_size has {count_text(len(group), 'dimension')} and threads has "
                f"{len(grid)}; they must be equal"
            )
        if not 1 <= (total := math.prod(group)) <= most:
            raise ValueError(
                f"{kernel}: group_size {tuple(group)} is {total} threads; 1 to {most} fit"
            )
    return tuple([*grid, 1, 1][:3]), tuple([*group, 1, 1][:3])


def _dimensions(kernel: str, what: str, value: int | Sequence[int]) -> list[int]:
    is_one = isinstance(value, int | bytes) or not isinstance(value, Sequence)
    sizes: list[Any] = [value] if is_one else list(value)  # type: ignore[arg-type]
    if not 1 <= len(sizes) <= 3 or not all(isinstance(size, int) for size in sizes):
        raise TypeError(
            f"{kernel}: {what} is {value_text(value)}; it must be an int or 1 to 3 ints"
        )
    if any(not 0 <= size < 2**32 for size in sizes):
        raise ValueError(f"{kernel}: {what} is {value_text(value)}; a size must be 0 to 2**32 - 1")
    return sizes


def _threadgroup_memory(
    kernel: str, parameters: Sequence[Parameter], lengths: Mapping[int, int] | None
) -> list[tuple[int, int]]:
    lengths = {} if lengths is None else lengths
    if not isinstance(lengths, Mapping):
        raise TypeError(f"{kernel}: threadgroup_bytes is {type_text(lengths)}; it must be a dict")
    expected = {p.index: p.name for p in parameters if p.kind == "threadgroup"}
    for index in lengths:
        if index not in expected:
            raise ValueError(
                f"{kernel}: threadgroup_bytes[{index!r}]: there is no threadgroup({index!r})"
            )
    for index, name in expected.items():
        size = lengths.get(index, 0)
        if not isinstance(size, int) or not 0 < size < 2**63:
            raise TypeError(
                f"{kernel}: threadgroup_bytes[{index}] is {value_text(lengths.get(index))}; it is "
                f"the length of threadgroup({index}) {name} and must be an int of at least 1"
            )
        if size > LIMIT:
            raise ValueError(
                f"{kernel}: threadgroup_bytes[{index}] is {size}; a threadgroup has at most "
                f"{LIMIT} bytes"
            )
    return sorted(lengths.items())
