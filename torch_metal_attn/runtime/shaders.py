"""The Metal text of each kernel family, with the headers of shaders/ inlined.

`setup.py` loads this file by its path to flatten the shaders into the package, so it imports
nothing but the standard library.
"""

import ctypes
import functools
import re
from collections.abc import Mapping
from pathlib import Path

_PACKAGE_DATA = Path(__file__).parents[1] / "_shaders"
_CHECKOUT = Path(__file__).parents[2] / "shaders"

# The version of Metal that a family needs, if it is later than the oldest supported version.
LANGUAGES = {
    "flash_fwd_tensor": "4.0",
    "flash_bwd_dq_tensor": "4.0",
    "flash_bwd_dkv_tensor": "4.0",
    "probe_tensor": "4.0",
}

# The first lines of every text. Metal's headers precede the defines, whose names are common words.
_HEADERS = """\
#include <metal_integer>
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
#include <metal_stdlib>
"""
_TENSOR_HEADER = "<MetalPerformancePrimitives/MetalPerformancePrimitives.h>"
_TENSOR_HEADERS = f"""\
#if __METAL_VERSION__ >= 400 && __has_include({_TENSOR_HEADER})
#include {_TENSOR_HEADER}
#define HAS_TENSOR_OPERATIONS 1
#endif
"""
# The kernels test for infinities and NaN, which only the safe mode of arithmetic keeps. torch
# compiles in it unless PYTORCH_MPS_FAST_MATH is set.
_SAFE_MATH = """\
#if __METAL_VERSION__ >= 320
#pragma METAL fp math_mode(safe)
#endif
"""

_INCLUDE = re.compile(r'\s*#\s*include\s+"([^"]*)"')
_PRAGMA_ONCE = re.compile(r"\s*#\s*pragma\s+once\s*$")
_CONDITION = re.compile(r"\s*#\s*(if|ifdef|ifndef|endif)\b")


class ShaderError(RuntimeError):
    """A shader's text cannot be flattened. The message begins with file and line."""


def families() -> list[str]:
    """The names that `source` accepts, sorted."""
    return sorted(path.stem for path in _directory().glob("*.metal"))


@functools.cache
def source(family: str) -> str:
    """The text to compile for `family`, into which `with_defines` inserts a specialisation.

    A source checkout flattens `shaders/` once per process; an installed package contains the text.
    It is ASCII, begins with the includes of Metal's headers, and its `#line` directives name the
    original files and lines. Raises ValueError for an unknown family and ShaderError for one that
    cannot be flattened.
    """
    if family not in families():
        raise ValueError(f"family is {family!r}; it must be one of {', '.join(families())}")
    path = _directory() / f"{family}.metal"
    if path.parent == _PACKAGE_DATA:
        return path.read_text(encoding="ascii")
    return flatten(path)


def with_defines(text: str, defines: Mapping[str, str]) -> str:
    """A family's text with a specialisation's defines, as csrc/runtime/mps.cpp inserts them."""
    lines = "".join(f"#define {name} {value}\n" for name, value in defines.items())
    head = max(text.find("#line"), 0)
    return text[:head] + lines + text[head:]


def flatten(path: Path) -> str:
    """Metal's headers and the text of `path`, with each quoted include inlined at its first use.

    Raises ShaderError for a missing file, a header without `#pragma once`, an include inside a
    conditional block (where "once" would depend on the condition) and a non-ASCII character
    (PyTorch passes shader text to Metal as ASCII).
    """
    head = _HEADERS + (_TENSOR_HEADERS if path.stem in LANGUAGES else "") + _SAFE_MATH
    lines = _lines(path.resolve(), root=path.resolve().parent, seen=set())
    return head + "\n".join(lines) + "\n"


def serve(library: ctypes.CDLL) -> None:
    """Pass every text to the extension now, as a later callback into Python can be interrupted."""
    for family in families():
        library.metal_attn_set_shader_text(family.encode(), source(family).encode("ascii"))


def _directory() -> Path:
    return _PACKAGE_DATA if _PACKAGE_DATA.is_dir() else _CHECKOUT


def _lines(path: Path, root: Path, seen: set[Path]) -> list[str]:
    seen.add(path)
    name = f"shaders/{path.relative_to(root).as_posix()}"
    lines = [f'#line 1 "{name}"']
    depth = 0
    for number, line in enumerate(_text(path, name).removesuffix("\n").split("\n"), start=1):
        include = _INCLUDE.match(line)
        if include is None:
            lines.append("" if _PRAGMA_ONCE.match(line) else line)
            condition = _CONDITION.match(line)
            if condition is not None:
                depth += -1 if condition[1] == "endif" else 1
            continue
        header = (path.parent / include[1]).resolve()
        if depth > 0:
            raise ShaderError(f'{name}:{number}: include of "{include[1]}" in a conditional block')
        if not header.is_relative_to(root) or not header.is_file():
            raise ShaderError(f'{name}:{number}: no file "{include[1]}" in shaders/')
        if header not in seen:
            lines += _lines(header, root, seen)
        lines.append(f'#line {number + 1} "{name}"')
    return lines


def _text(path: Path, name: str) -> str:
    try:
        text = path.read_bytes().decode("ascii")
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1
        raise ShaderError(f"{name}:{number}: a character that is not ASCII") from None
    if path.suffix != ".metal" and not any(map(_PRAGMA_ONCE.match, text.split("\n"))):
        raise ShaderError(f"{name}:1: a header without #pragma once")
    return text
