"""`python -m torch_metal_attn.simulator run`: one kernel of a file, on arguments as described."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ..build import ShaderCompileError
from ..engine import Counters
from ..library import ShaderKernel, ShaderLibrary
from ..metal.kernels import Parameter
from ..parameter_types import ParameterType
from ..tensors import FAMILIES, RELAXED
from . import source, values
from .values import BadRequest

DESCRIPTION = f"""Runs one kernel of a Metal file on the CPU, with every access checked, and
prints what it wrote. What Apple's compiler would reject is not run. The exit
status is 1 if the kernel has a fault, does not compile or would be rejected,
and 2 if the command cannot be run as it is given.

{values.SYNTAX}
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    source.add_options(parser)
    parser.add_argument("kernel", metavar="KERNEL", help="its name in FILE")
    source.repeated(
        parser,
        "--arg",
        metavar="[NAME=]VALUE",
        help="an argument of the kernel, by the name or index of its buffer; without, in order",
    )
    source.repeated(
        parser,
        "--threadgroup-bytes",
        metavar="NAME=BYTES",
        help="the length of a [[threadgroup(i)]] argument, by its name or index",
    )
    source.repeated(
        parser,
        "--save",
        metavar="NAME=FILE",
        help="save an argument after the run to a .npy or .pt file instead of printing it",
    )
    parser.add_argument(
        "--threads",
        metavar="SIZES",
        help="threads of the grid, such as 640 or 5x128; default: as many as the first pointer's "
        "argument has elements",
    )
    parser.add_argument(
        "--group-size", metavar="SIZES", help="threads of a threadgroup; default: as torch chooses"
    )
    parser.add_argument("--no-check", action="store_true", help="run without checks, but faster")
    parser.add_argument("--count", action="store_true", help="print what the kernel did")
    parser.add_argument(
        "--seed",
        type=int,
        help="seed of random arguments (default: 0); it also shuffles the order of threadgroups "
        "and SIMD groups",
    )
    parser.add_argument(
        "--lane-map",
        metavar="MAP",
        help="which lane keeps which element of a cooperative tensor: "
        f"{', '.join(FAMILIES)} or the seed of a random map (default: apple10)",
    )
    parser.add_argument(
        "--relaxed-precision",
        metavar="HOW",
        help="what tensor operations of relaxed precision do to float operands: "
        f"{' or '.join(RELAXED)} (default: truncate)",
    )


@dataclass(frozen=True)
class _Slot:
    """A parameter of the kernel that exists, given the function constants."""

    parameter: Parameter
    type: ParameterType

    @property
    def is_output(self) -> bool:
        return self.parameter.space == "device" and not self.type.is_const


def run(options: argparse.Namespace) -> None:
    """Run the kernel and print what it wrote.

    Raises BadRequest, ShaderCompileError and SimulatorFault.
    """
    if options.count and options.no_check:
        raise BadRequest("--count needs the checks: leave out --no-check")
    threads = _sizes("--threads", options.threads)
    group_size = _sizes("--group-size", options.group_size)
    library = source.compiled(options, check=not options.no_check, count=options.count)
    if found := source.findings(options, strict=False):
        raise ShaderCompileError("\n".join(map(str, found)))
    slots = _slots(library, options)
    buffers = {slot.parameter.index: slot for slot in slots if slot.parameter.kind == "buffer"}
    torch.manual_seed((options.seed or 0) % 2**63)  # the kernel's call refuses others
    tensors = _tensors(options, buffers)
    saved = _saved(options, buffers, tensors)
    kernel: ShaderKernel = getattr(library, options.kernel)
    try:
        kernel(
            *(tensors.get(index) for index in range(max(tensors, default=-1) + 1)),
            threads=threads or _default_threads(buffers, tensors),
            group_size=group_size,
            seed=options.seed,
            threadgroup_bytes=_threadgroup_bytes(options, slots),
            lane_map=_lane_map(options.lane_map),
            relaxed_precision=options.relaxed_precision,
        )
    except (TypeError, ValueError) as error:
        raise BadRequest(str(error)) from None
    for index, slot in sorted(buffers.items()):
        if index in saved:
            values.save(tensors[index], saved[index])
        elif slot.is_output:
            print(f"{slot.parameter.name} =\n{tensors[index]}")
    if options.count:
        print(_table(library.last_counters or Counters()))


def _sizes(option: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    found = values.sizes(text) if values.SHAPE.fullmatch(text) else (0,)
    if 0 in found:
        raise BadRequest(f"{option} is {text}; it must be sizes above 0, such as 640 or 5x128")
    return found


def _lane_map(text: str | None) -> str | int | None:
    return int(text) if text is not None and text.isdecimal() else text


def _slots(library: ShaderLibrary, options: argparse.Namespace) -> list[_Slot]:
    """The kernel's parameters."""
    kernel = library._program.kernels.get(options.kernel)
    if kernel is None:
        known = ", ".join(dir(library)) or "none"
        raise BadRequest(f"{options.file} has no kernel {options.kernel}; it has {known}")
    if kernel.missing:
        needed = " ".join(f"--constant {name}=..." for name in kernel.missing)
        raise BadRequest(f"{options.kernel} needs values of function constants: {needed}")
    image = library._program.image(kernel.name)
    found = zip(kernel.parameters, image.types(kernel), image.enabled(kernel), strict=True)
    return [_Slot(parameter, type) for parameter, type, enabled in found if enabled]


def _default_threads(buffers: dict[int, _Slot], tensors: dict[int, torch.Tensor]) -> int:
    for index, slot in sorted(buffers.items()):
        if not slot.type.is_reference:
            return tensors[index].numel()
    raise BadRequest("give --threads: there is no tensor to take them from")


def _names(slots: Mapping[int, _Slot]) -> str:
    return ", ".join(f"{slot.parameter.name} ({i})" for i, slot in slots.items()) or "none"


def _pair(option: str, text: str, slots: Mapping[int, _Slot]) -> tuple[int, str]:
    """`NAME=VALUE` as the index of the slot, which may be named by its index, and the value."""
    name, equals, value = text.partition("=")
    if not equals:
        raise BadRequest(f"{option} {text}: it must be NAME=VALUE")
    for index, slot in slots.items():
        if name in (slot.parameter.name, str(index)):
            return index, value
    raise BadRequest(f"{option} {text}: {name!r} must be one of {_names(slots)}")


def _tensors(options: argparse.Namespace, buffers: dict[int, _Slot]) -> dict[int, torch.Tensor]:
    """The arguments by index; those without a name are for the other buffers, in order."""
    given: dict[int, str] = {}
    unnamed = []
    for text in options.arg:
        if "=" not in text:
            unnamed.append(text)
            continue
        index, value = _pair("--arg", text, buffers)
        if index in given:
            raise BadRequest(f"--arg {text}: the argument is given twice")
        given[index] = value
    left = [index for index in sorted(buffers) if index not in given]
    if len(unnamed) != len(left):
        raise BadRequest(
            f"{options.kernel} has {len(buffers)} arguments, {_names(buffers)}; "
            f"{len(options.arg)} are given"
        )
    given |= dict(zip(left, unnamed, strict=True))
    return {
        index: values.tensor(given[index], buffers[index].parameter, buffers[index].type)
        for index in sorted(buffers)
    }


def _saved(
    options: argparse.Namespace, buffers: dict[int, _Slot], tensors: dict[int, torch.Tensor]
) -> dict[int, Path]:
    """The files to save arguments to. A file that cannot be written is refused before the run."""
    saved = {}
    for text in options.save:
        index, name = _pair("--save", text, buffers)
        path = Path(name)
        if path.suffix not in values.FILE_SUFFIXES:
            raise BadRequest(f"--save {text}: the file's name must end with .npy or .pt")
        if path.suffix == ".npy" and tensors[index].dtype is torch.bfloat16:
            raise BadRequest(f"--save {text}: .npy has no bfloat16: save it as .pt")
        if not path.resolve().parent.is_dir():
            raise BadRequest(f"--save {text}: {path.parent} is not a folder")
        saved[index] = path
    return saved


def _threadgroup_bytes(options: argparse.Namespace, slots: list[_Slot]) -> dict[int, int]:
    memory = {slot.parameter.index: slot for slot in slots if slot.parameter.kind == "threadgroup"}
    given = {}
    for text in options.threadgroup_bytes:
        index, size = _pair("--threadgroup-bytes", text, memory)
        if not size.isdecimal():
            raise BadRequest(f"--threadgroup-bytes {text}: {size!r} must be a number of bytes")
        given[index] = int(size)
    return given


def _table(counters: Counters) -> str:
    """Each count that is not 0, in a line."""
    rows: dict[str, int | None] = {}
    for name, count in counters.as_dict().items():
        if isinstance(count, dict):
            rows |= {f"{name} {space}": of_space for space, of_space in count.items()}
        else:
            rows[name] = count
    shown = {name: count for name, count in rows.items() if count}
    width = max(map(len, shown), default=0)
    return "\n".join(f"{name:<{width}}  {count}" for name, count in shown.items())
