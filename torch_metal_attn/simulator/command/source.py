"""The Metal file of a command, and how it is compiled."""

import argparse
import re
from pathlib import Path
from typing import Any

from ..build import SOURCE_NAME
from ..library import ShaderLibrary, compile_shader
from ..lint import Finding, lint_source
from ..metal import versions
from ..metal.constants import ConstantValue
from .values import BadRequest


def repeated(parser: argparse.ArgumentParser, *names: str, help: str, **about: Any) -> None:
    """An option that can be given several times."""
    words = f"{help}; can be repeated"
    parser.add_argument(*names, action="append", default=[], help=words, **about)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of every command that compiles a file."""
    parser.add_argument("file", type=Path, metavar="FILE", help="a Metal source")
    repeated(parser, "-D", "--define", metavar="NAME[=VALUE]", help="a macro; 1 without a value")
    repeated(
        parser,
        "--constant",
        metavar="NAME=VALUE",
        help="a function constant, by name or index: true, false or a number",
    )
    include = "where #include looks, after the folder of FILE"
    repeated(parser, "-I", "--include", type=Path, metavar="FOLDER", help=include)
    parser.add_argument(
        "--language",
        choices=list(versions.NUMBERS),
        default=versions.DEFAULT,
        help="version of Metal (default: %(default)s)",
    )


def read(path: Path) -> str:
    """The file's text; raises BadRequest."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"{path} cannot be read: {error}") from None


def compiled(options: argparse.Namespace, *, check: bool, count: bool = False) -> ShaderLibrary:
    """The file's kernels; messages and faults name it and its own lines."""
    name = re.sub(r'(["\\])', r"\\\1", str(options.file))
    try:
        return compile_shader(
            f'#line 1 "{name}"\n{read(options.file)}',
            include_dirs=include_dirs(options),
            defines=defines(options),
            constants=dict(map(_constant, options.constant)),
            check=check,
            count=count,
            language=options.language,
        )
    except (ValueError, TypeError, FileNotFoundError) as error:
        raise BadRequest(str(error)) from None


def findings(options: argparse.Namespace, *, strict: bool) -> list[Finding]:
    """Findings that Apple's compiler would reject; with `strict`, also those of project rules."""
    found = lint_source(
        read(options.file),
        include_dirs=[str(folder) for folder in include_dirs(options)],
        defines=defines(options),
        language=options.language,
        strict=strict,
    )
    named = {SOURCE_NAME: str(options.file)}
    return [finding._replace(file=named.get(finding.file, finding.file)) for finding in found]


def include_dirs(options: argparse.Namespace) -> list[Path]:
    return [options.file.resolve().parent, *options.include]


def defines(options: argparse.Namespace) -> dict[str, str]:
    pairs = (define.partition("=") for define in options.define)
    return {name: value if equals else "1" for name, equals, value in pairs}


def _constant(text: str) -> tuple[int | str, ConstantValue]:
    name, equals, word = text.partition("=")
    if not name or not equals:
        raise BadRequest(f"--constant {text}: it must be NAME=VALUE")
    return int(name) if name.isdecimal() else name, _constant_value(text, word)


def _constant_value(text: str, word: str) -> ConstantValue:
    if word in ("true", "false"):
        return word == "true"
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    raise BadRequest(f"--constant {text}: {word!r} must be true, false or a number")
