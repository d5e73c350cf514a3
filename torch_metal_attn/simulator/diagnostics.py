"""The compiler's messages, in Metal's terms and at the lines of the Metal source."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .metal import unsupported

MOST_LINES = 60

LOCATED = re.compile(r"(?P<file>.*?):(?P<line>\d+)(?P<column>:\d+)?: (?P<rest>.*)")
ERROR = re.compile(r"(fatal )?error: ")
# Functions of C that the Metal Shading Language specification does not list.
NOT_IN_METAL = """cbrt erf erfc expm1 fpclassify hypot lgamma llrint llround log1p logb lrint
lround nearbyint nexttoward remainder remquo scalbln scalbn tgamma""".split()
_NAMES = "|".join(NOT_IN_METAL)
UNKNOWN = re.compile(
    rf"undeclared identifier '({_NAMES})'|no member named '({_NAMES})' in namespace 'metal"
)
UNDECLARED = re.compile(
    r"(?:unknown type name|use of undeclared identifier|no template named"
    r"|no (?:member|type|template) named) '(?:metal::)?(\w+)'"
    r"|'(?:metal_)?(\w+)[\w/.]*' file not found"
)
METHOD = re.compile(
    r"(?:'this' argument to member function '\w+' has|cannot initialize object parameter of)"
    r" type '[^']*'.*|.*' is unavailable: .*"
)
OTHER_MEMORY = re.compile(r"__global|__local|__constant|\b(?:device|threadgroup|constant)\b")

# The host's spellings and Metal's, in the order of replacement.
UNSIGNED = {f"unsigned {name}": f"u{name}" for name in ("char", "short", "int", "long")}
_ELEMENT = r"((?:unsigned |u)?(?:char|short|int|long)|bool|half|bfloat|float)"
HOST_WORDS = [
    (r"\bconst (volatile )?__constant\b", r"\1constant"),
    (r"\b__constant\b", "constant"),
    (r"\b__global\b", "device"),
    (r"\b__local\b", "threadgroup"),
    (r"\b_Float16\b", "half"),
    (r"\b__bf16\b", "bfloat"),
    (r"\bgeneric address space\b", "address space 'thread'"),
    (rf"\b{_ELEMENT} __attribute__\(\(ext_vector_type\((\d)\)\)\)", r"\1\2"),
    (rf"\b(?:metal::)?vec<{_ELEMENT}, (\d)>", r"\1\2"),
    (rf"\b(?:metal::)?matrix<{_ELEMENT}, (\d), (\d)>", r"\1\2x\3"),
    *((rf"\b{host}(?=[234]\b)", metal) for host, metal in UNSIGNED.items()),
    (r" \(vector of \d '[^']*' values\)", ""),
    (r"'[^']*\b__tg_[^']*' \(aka '([^']*)'\)", r"'\1'"),
    (r"'([^']*)' \(aka '\1'\)", r"'\1'"),
    (r" \(aka '[^']*\b_[^']*'\)", ""),
    (r"; did you mean '__\w+'\?", ""),
]
_HOST_WORDS = [(re.compile(pattern), metal) for pattern, metal in HOST_WORDS]


class KernelError(RuntimeError):
    """An error in a Metal text or in a running kernel."""


def in_metal(message: str) -> str:
    """A message with Metal's names of types and address spaces instead of the host's."""
    for pattern, metal in _HOST_WORDS:
        message = pattern.sub(metal, message)
    return message


def hides_frames(caught: Any) -> bool:
    """`__tracebackhide__` for pytest: true for errors of the text or the arguments."""
    return isinstance(caught.value, (KernelError, TypeError, ValueError))


@dataclass
class _Diagnostic:
    first: str
    notes: list[str] = field(default_factory=list)


def readable(output: str, in_shim: Callable[[str], bool]) -> str:
    """The messages about the user's files; only those about unsupported features, if any exist."""
    diagnostics: list[_Diagnostic] = []
    missing: dict[tuple[str, str, str], str] = {}  # (file, line, reason): message
    for line in output.strip().split("\n"):
        if line.startswith(("In file included from ", "                 from ")):
            continue
        located = LOCATED.match(line)
        if unknown := UNKNOWN.search(line):
            line += f": {unknown[1] or unknown[2]} is not in Metal; the text must define it"
        if located and not in_shim(located["file"]) and (why := _unsupported(located["rest"])):
            key = (located["file"], located["line"], why)
            message = f"{':'.join(key[:2])}{located['column'] or ''}: error: {why}"
            missing.setdefault(key, message)
        if not diagnostics or (located and ERROR.match(located["rest"])):
            diagnostics.append(_Diagnostic(line))
        else:
            diagnostics[-1].notes.append(line)
    if missing:
        return "\n".join(missing.values())
    shown = [text for one in diagnostics if (text := _in_user_file(one, in_shim))]
    lines = shown or [line for one in diagnostics for line in (one.first, *one.notes)]
    return "\n".join(in_metal("\n".join(lines)).split("\n")[:MOST_LINES])


def _unsupported(message: str) -> str | None:
    if name := UNDECLARED.search(message):
        return unsupported.reason(name[1] or name[2])
    if METHOD.fullmatch(message.removeprefix("error: ")) and OTHER_MEMORY.search(message):
        return unsupported.METHOD
    return None


def _in_user_file(one: _Diagnostic, in_shim: Callable[[str], bool]) -> str | None:
    """A diagnostic at a line of the user's files; None if it names no such line."""
    located = LOCATED.match(one.first)
    if located is None or not in_shim(located["file"]):
        return "\n".join([one.first, *(note for note in one.notes if _is_shown(note, in_shim))])
    notes = [note for note in map(LOCATED.match, one.notes) if note and not in_shim(note["file"])]
    if not notes:
        return None
    where = f"{notes[0]['file']}:{notes[0]['line']}{notes[0]['column'] or ''}"
    return "\n".join([f"{where}: {located['rest']}", *(note[0] for note in notes[1:])])


def _is_shown(note: str, in_shim: Callable[[str], bool]) -> bool:
    """True for a note in a user's file, or one that names a candidate function for a call."""
    located = LOCATED.match(note)
    return located is None or not in_shim(located["file"]) or "candidate function" in note
