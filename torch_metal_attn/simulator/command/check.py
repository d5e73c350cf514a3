"""`python -m torch_metal_attn.simulator check`: what a file's kernels are, without running them."""

import argparse
import re
from collections.abc import Iterator

from ..build import Image
from ..metal.kernels import Kernel
from ..threadgroup_memory import LIMIT, threadgroup_bytes
from . import source

DESCRIPTION = """Compiles a Metal file, reports what Apple's compiler would refuse, and
lists the kernels with their arguments and threadgroup memory. The exit status
is 1 if the file does not compile or anything is reported, and 2 if the command
cannot be run as it is given. It does not say how many registers a kernel
needs."""


def add_options(parser: argparse.ArgumentParser) -> None:
    source.add_options(parser)
    parser.add_argument(
        "--strict",
        action="store_true",
        help="also apply the stricter rules that this project has for its own shaders",
    )


def check(options: argparse.Namespace) -> bool:
    """Print findings and kernels; False for a finding. Raises BadRequest and ShaderCompileError."""
    library = source.compiled(options, check=False)
    findings = source.findings(options, strict=options.strict)
    for finding in findings:
        print(finding)
    program = library._program
    for constant in program.constants:
        print(f"function constant {constant.index}: {constant.type} {constant.name}")
    memory = threadgroup_bytes(program)
    too_large = False
    for kernel in program.kernels.values():
        print(f"kernel {kernel.name}")
        for line in _parameters(kernel, program.whole_image()):
            print(f"  {line}")
        if kernel.missing:
            print(f"  needs function constants: {', '.join(kernel.missing)}")
        over = memory[kernel.name] > LIMIT
        too_large |= over
        print(
            f"  threadgroup memory: {memory[kernel.name]} bytes"
            + (f", over the limit of {LIMIT}" if over else "")
        )
    return not findings and not too_large


def _parameters(kernel: Kernel, image: Image) -> Iterator[str]:
    parameters = zip(kernel.parameters, image.types(kernel), image.enabled(kernel), strict=True)
    for parameter, type, enabled in parameters:
        declared = re.sub(r" (?=[*&])", "", f"{parameter.type} {parameter.name}")
        if parameter.kind == "attribute":
            yield f"{declared} [[{parameter.attribute}]]"
            continue
        line = f"{parameter.kind}({parameter.index}): {declared}"
        if type.scalar and not re.search(rf"\b{type.scalar}", declared):
            line += f" of {type.scalar}"
        yield line if enabled else f"{line}, absent by {parameter.condition}"
