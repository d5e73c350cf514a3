"""Lint for Metal shaders, which reports on any machine what Apple's compiler would reject.

It checks a text's tokens, clang's errors for the text's host form, and clang's syntax tree of that
form. The rules are those of Metal 3.1 and the stricter rules of this project's shaders.
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
# The rewritten text has no function qualifiers of Metal. With these macros, a name that is such a
# word does not compile, even if metal/reserved.py misses it.
QUALIFIERS = [f"-D{word}=inline" for word in sorted(FUNCTIONS)]
# Errors for features of C++17 and clang that Metal lacks, although the simulator accepts them.
NEWER = ["-Werror=pre-c++17-compat", "-Werror=c++20-extensions", "-Werror=return-type"]
# A preprocessed text has a number in place of a macro, so clang would warn about `A || MACRO`.
# `constant` implies const here, so clang would warn about `const constant` as a duplicate.
STRICT = """-Werror -Wall -Wextra -Wpedantic -pedantic-errors -Wno-gnu-line-marker
    -Wno-constant-logical-operand -Wno-duplicate-decl-specifier -Wno-unused-parameter
    -Wno-unused-variable -Wno-unused-function -Wno-unknown-pragmas""".split()
NO_WARNINGS = "-Wno-everything"
STANDARDS = {"3.1": "-std=c++14", "3.2": "-std=c++14", "4.0": "-std=c++17"}
CHECK_FLAGS = ["-ferror-limit=0", "-fsyntax-only"]
TREE_FLAGS = ["-Xclang", "-ast-dump=json"]

# Rules of this project, which may reject texts that Apple's compiler accepts.
PROJECT_RULES = frozenset(
    """ascii cpp17 cpp20 extern function-pointer implicit-float kernel-parameter lambda metal-name
    output pointer-reference static-local struct-copy template-assert temporary
    threadgroup-initialiser warning""".split()
)

# Names of namespace metal that the simulator does not have, from the specification and Metal 4.1
# (`interleave` and `deinterleave`).
UNSUPPORTED_NAMES = frozenset(
    """access address bias border_color component compare_func coord deinterleave dfdx dfdy
    discard_fragment filter fwidth get_num_samples get_sample_position gradient2d gradient3d
    gradientcube interleave level max_anisotropy min_lod_clamp mip_filter pack_float_to_snorm4x8
    pack_float_to_unorm4x8 pack_half_to_snorm4x8 pack_half_to_unorm4x8 reflect refract
    unpack_snorm4x8_to_float unpack_snorm4x8_to_half unpack_unorm4x8_to_float
    unpack_unorm4x8_to_half faceforward""".split()
).union(SUBJECTS)

DIAGNOSTIC = re.compile(r"^(.*?):(\d+):\d+: (?:fatal )?(error|note): (.*)$", re.M)
# The rule for an error, by a part of clang's message. The rule for all other errors is "compile".
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

    The arguments are those of `compile_shader` and raise the same errors.
    strict: also apply PROJECT_RULES and, if there are no findings, check the text as each later
    version of Metal. If not strict, report only what Apple's compiler would reject.
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
    """Raise ShaderCompileError for a text that torch.mps.compile_shader would reject on a Mac."""
    findings = lint_source(source, language=language, strict=False)
    if findings := [*ascii_only(source)] or findings:
        lines = "\n".join(map(str, findings))
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
        token_findings, text = _rewritten(body)
    except build.ShaderCompileError as error:
        return sorted(set(compile_errors(str(error))))
    except MetalSourceError as error:
        return [_source_finding(error)]
    findings = list(token_findings)
    if text is not None:
        tree, output = _parse(shim, text, STANDARDS[language] if strict else "", tree_wanted)
        if tree:
            findings += check_tree(tree, HostText(text), metal_names())
        findings += compile_errors(output)
    return sorted(set(findings))


# Cached, because versions of Metal often preprocess to the same text.
@lru_cache(maxsize=1)
def _rewritten(body: str) -> tuple[list[Finding], str | None]:
    """Findings in the tokens of a preprocessed text, and its host form if it has one."""
    tokens = TokenList(lex(END_OF_SHIM + body))
    if named := [_source_finding(error) for error in errors(tokens)]:
        return named, None
    findings = list(check_tokens(tokens))
    try:
        host = rewrite(END_OF_SHIM + body, language=versions.LATEST)
    except MetalSourceError as error:
        return [*findings, _source_finding(error)], None
    return findings, host.text.partition(END_OF_SHIM)[2]


def _source_finding(error: MetalSourceError) -> Finding:
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
    """Lines with characters outside of ASCII, also in comments. PyTorch cannot pass them on."""
    message = "torch passes shader text to Metal as ASCII"
    for number, line in enumerate(source.split("\n"), 1):
        if not line.isascii():
            yield Finding(build.SOURCE_NAME, number, "ascii", message)


def compile_errors(output: str) -> Iterator[Finding]:
    """Clang's errors. An error in the simulator's headers is reported at the shader's line."""
    diagnosed: list[tuple[str, int, str]] = []
    for match in DIAGNOSTIC.finditer(output):
        file, line, kind, message = match[1], int(match[2]), match[3], match[4]
        if kind == "error":
            diagnosed.append((file, line, message))
        elif diagnosed and build.in_shim(diagnosed[-1][0]) and not build.in_shim(file):
            diagnosed[-1] = (file, line, diagnosed[-1][2])
    for file, line, message in diagnosed:
        rules = [rule for part, rule in DIAGNOSED_RULES.items() if part in message]
        yield Finding(file, line, [*rules, "compile"][0], diagnostics.in_metal(message))


def _parse(shim: str, text: str, standard: str, tree_wanted: bool) -> tuple[bytes, str]:
    """Clang's syntax tree of `text` if `tree_wanted`, and clang's messages."""
    command = [*build.host_command(), *QUALIFIERS]
    if standard:
        command.remove(NO_WARNINGS)  # it hides clang's default warnings
        command += [*STRICT, standard]
    else:
        command += NEWER
    command += ["-include-pch", str(build.precompiled(command, shim)), *CHECK_FLAGS]
    command += [*(TREE_FLAGS if tree_wanted else ()), "-"]
    # A pipe would deliver the tens of megabytes of a tree in thousands of pieces.
    with tempfile.TemporaryFile() as written:
        done = subprocess.run(command, input=text.encode(), stdout=written, stderr=subprocess.PIPE)
        written.seek(0)
        tree = written.read()
    output = done.stderr.decode(errors="replace")
    if tree_wanted and not tree:
        raise toolchain.ToolchainError(f"clang made no syntax tree: {output}")
    return tree, output


__all__ = ["PROJECT_RULES", "Finding", "lint_source", "refuse"]
