"""Lint for Metal shaders: rejects, on any machine, what Apple's compiler would reject.

It checks a text's tokens, clang's errors for the host form, and clang's syntax tree of it against
the rules of Metal 3.1 and the stricter rules of this project's shaders.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from .. import build, diagnostics, runs, toolchain
from ..library import folders_and_macros
from ..metal import versions
from ..metal.lexer import END_OF_SHIM, MetalSourceError, TokenList, lex
from ..metal.reserved import FUNCTIONS, ReservedNameError, errors
from ..metal.rewrite import rewrite
from ..metal.unsupported import SUBJECTS
from .token_rules import check_tokens
from .tree_rules import Finding, HostText, check_tree

__tracebackhide__ = diagnostics.hides_frames
# The rewritten text has no function qualifiers of Metal. A name that is one of these words does not
# compile, even if metal/reserved.py misses it.
QUALIFIERS = [f"-D{word}=inline" for word in sorted(FUNCTIONS)]
# Errors for features of C++17 and clang that Metal lacks and the simulator does not refuse.
NEWER = ["-Werror=pre-c++17-compat", "-Werror=c++20-extensions", "-Werror=return-type"]
# A macro that is 1 is a number in a preprocessed text, so clang takes `A || MACRO` for a mistake;
# `constant`, which is const here, may stand beside `const`.
STRICT = """-Werror -Wall -Wextra -Wpedantic -pedantic-errors -Wno-gnu-line-marker
    -Wno-constant-logical-operand -Wno-duplicate-decl-specifier -Wno-unused-parameter
    -Wno-unused-variable -Wno-unused-function -Wno-unknown-pragmas""".split()
NO_WARNINGS = "-Wno-everything"
STANDARDS = {"3.1": "-std=c++14", "3.2": "-std=c++14", "4.0": "-std=c++17"}
CHECK_FLAGS = ["-ferror-limit=0", "-fsyntax-only"]
TREE_FLAGS = ["-Xclang", "-ast-dump=json"]

# Rules that only this project has: Apple's compiler accepts what they reject, or may accept it.
PROJECT_RULES = frozenset(
    """ascii cpp17 cpp20 extern function-pointer implicit-float kernel-parameter lambda metal-name
    output pointer-reference static-local struct-copy template-assert temporary
    threadgroup-initialiser warning""".split()
)

# Names of namespace metal in the specification that the simulator does not have, and `interleave`
# and `deinterleave` of Metal 4.1.
UNSUPPORTED_NAMES = frozenset(
    """access address bias border_color component compare_func coord deinterleave dfdx dfdy
    discard_fragment filter fwidth get_num_samples get_sample_position gradient2d gradient3d
    gradientcube interleave level max_anisotropy min_lod_clamp mip_filter pack_float_to_snorm4x8
    pack_float_to_unorm4x8 pack_half_to_snorm4x8 pack_half_to_unorm4x8 reflect refract
    unpack_snorm4x8_to_float unpack_snorm4x8_to_half unpack_unorm4x8_to_float
    unpack_unorm4x8_to_half faceforward""".split()
).union(SUBJECTS)

DIAGNOSTIC = re.compile(r"^(.*?):(\d+):\d+: (?:fatal )?(error|note): (.*)$", re.M)
# Parts of clang's messages, by our rule; every other error is of the rule "compile".
DIAGNOSED_RULES = {
    "variable length array": "vla",
    "C++17": "cpp17",
    "C++20": "cpp20",
    "[-Werror,-Wreturn-type]": "compile",
    "[-Werror,": "warning",
}


def lint_source(
    source: str,
    *,
    include_dirs: Iterable[str | os.PathLike[str]] = (),
    defines: Mapping[str, str | int | bool] | None = None,
    language: str = versions.DEFAULT,
    strict: bool = True,
) -> list[Finding]:
    """Findings in a Metal text and in the headers that it includes, specialised by `defines`.

    The arguments are those of `compile_shader`, and raise as there.
    strict: also those of PROJECT_RULES, and where there are none, those of each later version of
    Metal. Without strict, Apple's compiler rejects what is found.
    """
    folders, macros = folders_and_macros(source, include_dirs, defines)
    versions.checked(language)
    if runs.as_bool("strict", strict) and (findings := list(ascii_only(source))):
        return findings
    findings = _findings(source, folders, macros, language, strict)
    if not strict:
        return [finding for finding in findings if finding.rule not in PROJECT_RULES]
    known = list(versions.NUMBERS)
    for version in known[known.index(language) + 1 :] if not findings else ():
        later = _findings(source, folders, macros, version, strict, tree_wanted=False)
        findings += [f._replace(message=f"{f.message} (as Metal {version})") for f in later]
    return findings


def refuse(source: str, language: str = versions.DEFAULT) -> None:
    """Raise ShaderCompileError for a text that clang compiles and torch.mps.compile_shader not."""
    findings = lint_source(source, language=language, strict=False)
    if result := [*ascii_only(source)] or findings:
        lines = "\n".join(map(str, result))
        raise build.ShaderCompileError(
            f"torch.mps.compile_shader would reject the source:\n{lines}"
        )


def _findings(
    source: str,
    include_dirs: Sequence[str],
    defines: Mapping[str, str],
    language: str,
    strict: bool,
    tree_wanted: bool = True,
) -> list[Finding]:
    try:
        preprocessed = build.preprocess(source, include_dirs, defines, False, language=language)
        shim, marked, body = preprocessed.partition(END_OF_SHIM)
        if not marked:
            raise toolchain.ToolchainError("clang does not mark where the simulator's headers end")
        of_tokens, text = _rewritten(body)
    except build.ShaderCompileError as error:
        return sorted(set(compile_errors(str(error))))
    except MetalSourceError as error:
        return [_of_error(error)]
    findings = list(of_tokens)
    if text is not None:
        tree, said = _parse(shim, text, STANDARDS[language] if strict else "", tree_wanted)
        if tree:
            findings += check_tree(tree, HostText(text), metal_names())
        findings += compile_errors(said)
    return sorted(set(findings))


# Successive versions of Metal often preprocess to the same text.
@lru_cache(maxsize=1)
def _rewritten(body: str) -> tuple[list[Finding], str | None]:
    """Findings in the tokens of a preprocessed text, and its host form if it has one."""
    tokens = TokenList(lex(END_OF_SHIM + body))
    if named := [_of_error(error) for error in errors(tokens)]:
        return named, None
    findings = list(check_tokens(tokens))
    try:
        host = rewrite(END_OF_SHIM + body, language=versions.LATEST)
    except MetalSourceError as error:
        return [*findings, _of_error(error)], None
    return findings, host.text.partition(END_OF_SHIM)[2]


def _of_error(error: MetalSourceError) -> Finding:
    rule = "reserved-name" if isinstance(error, ReservedNameError) else "compile"
    return Finding(error.file, error.line, rule, str(error).rpartition("error: ")[2])


@lru_cache
def metal_names() -> frozenset[str]:
    """The functions, types and constants of namespace metal."""
    headers = "#include <metal_tensor>\n"
    text = build.preprocess(headers, [], {}, False, language=versions.LATEST)
    command = [*build.host_command(), "-fsyntax-only", "-Xclang", "-ast-list", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    names = re.findall(r"^metal::([a-z]\w+)", done.stdout, re.M)
    return UNSUPPORTED_NAMES.union(names)


def ascii_only(source: str) -> Iterator[Finding]:
    """PyTorch hands shader text to Metal as ASCII, comments included."""
    for number, line in enumerate(source.split("\n"), 1):
        if not line.isascii():
            yield Finding(
                build.SOURCE_NAME, number, "ascii", "torch passes shader text to Metal as ASCII"
            )


def compile_errors(said: str) -> Iterator[Finding]:
    """Clang's errors; one in the simulator's headers is reported at the shader's own line."""
    pending: tuple[str, int, str] | None = None
    for match in DIAGNOSTIC.finditer(said):
        file, line, kind, message = match[1], int(match[2]), match[3], match[4]
        if kind == "error":
            if pending:
                yield _diagnosed(*pending)
            pending = (file, line, message)
        elif pending and build.in_shim(pending[0]) and not build.in_shim(file):
            pending = (file, line, pending[2])
    if pending:
        yield _diagnosed(*pending)


def _diagnosed(file: str, line: int, message: str) -> Finding:
    rules = [rule for words, rule in DIAGNOSED_RULES.items() if words in message]
    said = diagnostics.in_metal(message)
    return Finding(file, line, rules[0] if rules else "compile", said)


def _parse(shim: str, text: str, standard: str, tree_wanted: bool) -> tuple[bytes, str]:
    """Clang's syntax tree of `text`, if it is wanted, and clang's messages."""
    command = [*build.host_command(), *QUALIFIERS]
    if standard:
        command.remove(NO_WARNINGS)  # It would hide the warnings that clang has on by default.
        command += [*STRICT, standard]
    else:
        command += NEWER
    command += ["-include-pch", str(build.precompiled(command, shim)), *CHECK_FLAGS]
    command += [*(TREE_FLAGS if tree_wanted else ()), "-"]
    # A tree has tens of megabytes, which a pipe would bring in thousands of pieces.
    with tempfile.TemporaryFile() as written:
        done = subprocess.run(command, input=text.encode(), stdout=written, stderr=subprocess.PIPE)
        written.seek(0)
        tree = written.read()
    said = done.stderr.decode(errors="replace")
    if tree_wanted and not tree:
        raise toolchain.ToolchainError(f"clang made no syntax tree: {said}")
    return tree, said


__all__ = ["PROJECT_RULES", "Finding", "lint_source", "refuse"]
