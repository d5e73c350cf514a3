"""Command line: python -m torch_metal_attn.simulator check, which runs no kernel."""

import argparse
import glob
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .build import SOURCE_NAME, Image, ShaderCompileError
from .exit_status import BadRequest, exit_status
from .library import compile_shader
from .lint import lint_source
from .metal import versions
from .metal.constants import ConstantValue
from .metal.kernels import Kernel
from .threadgroup_memory import ALIGNMENT, LIMIT, threadgroup_bytes
from .wording import count_text

DESCRIPTION = """Compiles Metal files, reports what Apple's compiler would refuse, and lists
the kernels with their arguments and threadgroup memory. The exit status is 1
if a file does not compile or anything is reported, and 2 if the command
cannot run. The command does not report how many registers a kernel needs."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torch_metal_attn.simulator",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def repeated(*names: str, help: str, **options: Any) -> None:
        text = f"{help}; can be repeated"
        parser.add_argument(*names, action="append", default=[], help=text, **options)

    parser.add_argument("command", choices=["check"])
    files = "Metal sources; a pattern such as 'kernels/*.metal' may be quoted"
    parser.add_argument("files", nargs="+", metavar="FILE", help=files)
    repeated("-D", "--define", metavar="NAME[=VALUE]", help="a macro; 1 without a value")
    repeated(
        "--constant",
        metavar="NAME=VALUE",
        help="a function constant, by name or index: true, false or a number",
    )
    include = "where #include looks, after the folder of FILE"
    repeated("-I", "--include", type=Path, metavar="FOLDER", help=include)
    parser.add_argument(
        "--language",
        choices=list(versions.NUMBERS),
        default=versions.DEFAULT,
        help="version of Metal (default: %(default)s)",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="also apply the stricter rules that this project has for its own shaders",
    )
    return parser


def _check_all(options: argparse.Namespace) -> bool:
    """Check all files; True if no file has a finding. Raises BadRequest."""
    texts = {file: _text(file) for pattern in options.files for file in _matching(pattern)}
    passed = True
    for file, text in texts.items():
        if len(texts) > 1:
            print(f"{file}:")
        try:
            passed = _check(file, text, options) and passed
        except BadRequest as error:
            if len(texts) == 1:
                raise
            print(f"{file}: {error}", file=sys.stderr)
            passed = False
    return passed


def _matching(pattern: str) -> list[Path]:
    if not glob.has_magic(pattern) or Path(pattern).exists():
        return [Path(pattern)]
    result = sorted(glob.glob(pattern, recursive=True))
    if not result:
        raise BadRequest(f"no file matches {pattern}")
    return list(map(Path, result))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except IsADirectoryError:
        raise BadRequest(f"{file} is a folder: give its files, such as {file}/*.metal") from None
    except OSError as error:
        raise BadRequest(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadRequest(f"{file} cannot be read: it is not text in UTF-8") from None


def _check(file: Path, text: str, options: argparse.Namespace) -> bool:
    """Print findings and kernels of a file; True without findings. Raises BadRequest."""
    folders = [file.resolve().parent, *options.include]
    pairs = (define.partition("=") for define in options.define)
    defines = {name: value if equals else "1" for name, equals, value in pairs}
    # With #line, messages name the file and its lines.
    name = re.sub(r'(["\\])', r"\\\1", str(file))
    try:
        program = compile_shader(
            f'#line 1 "{name}"\n{text}',
            include_dirs=folders,
            defines=defines,
            constants=dict(map(_constant, options.constant)),
            language=options.language,
        )._program
    except ShaderCompileError as error:
        print(error, file=sys.stderr)
        return False
    except (ValueError, TypeError, FileNotFoundError) as error:
        raise BadRequest(str(error)) from None
    findings = lint_source(
        text,
        include_dirs=list(map(str, folders)),
        defines=defines,
        language=options.language,
        strict=options.strict,
    )
    named = {SOURCE_NAME: str(file)}
    for finding in findings:
        print(finding._replace(file=named.get(finding.file, finding.file)))
    for constant in program.constants:
        print(f"function constant {constant.index}: {constant.type} {constant.name}")
    memory = threadgroup_bytes(program)
    for kernel in program.kernels.values():
        print(f"kernel {kernel.name}")
        for line in _parameters(kernel, program.image()):
            print(f"  {line}")
        if kernel.missing:
            print(f"  needs function constants: {', '.join(kernel.missing)}")
        print(f"  threadgroup memory: {_memory(kernel, memory[kernel.name])}")
    return not findings and max(memory.values(), default=0) <= LIMIT


def _constant(text: str) -> tuple[int | str, ConstantValue]:
    name, equals, word = text.partition("=")
    if not name or not equals:
        raise BadRequest(f"--constant {text}: it must be NAME=VALUE")
    key = int(name) if name.isdecimal() else name
    if word in ("true", "false"):
        return key, word == "true"
    for kind in (int, float):
        try:
            return key, kind(word)
        except ValueError:
            continue
    raise BadRequest(f"--constant {text}: {word!r} must be true, false or a number")


def _memory(kernel: Kernel, used: int) -> str:
    if used > LIMIT:
        return f"{used} bytes, over the limit of {LIMIT}"
    arguments = [f"threadgroup({p.index})" for p in kernel.parameters if p.kind == "threadgroup"]
    left = (LIMIT - used) // ALIGNMENT * ALIGNMENT
    more = f", and up to {left} that a call passes for {' and '.join(arguments)}"
    return count_text(used, "byte") + (more if arguments else "")


def _parameters(kernel: Kernel, image: Image) -> Iterator[str]:
    for parameter, type in zip(kernel.parameters, image.types(kernel), strict=True):
        declared = re.sub(r" (?=[*&])", "", f"{parameter.type} {parameter.name}")
        if parameter.kind == "attribute":
            yield f"{declared} [[{parameter.attribute}]]"
            continue
        line = f"{parameter.kind}({parameter.index}): {declared}"
        if type.scalar and not re.search(rf"\b{type.scalar}", declared):
            line += f" of {type.scalar}"
        yield line if type.exists else f"{line}, absent by {parameter.condition}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check files: 0 on success, 1 for findings in a Metal file, 2 if the command cannot run."""
    options = _parser().parse_args(arguments)
    return exit_status(lambda: _check_all(options))


if __name__ == "__main__":
    sys.exit(main())
