"""The compiler's messages, at the lines of the Metal source."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

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


@dataclass
class _Diagnostic:
    """An error or warning, and the notes and lines of text that follow it."""

    first: str
    more: list[str] = field(default_factory=list)


def readable(said: str, in_shim: Callable[[str], bool]) -> str:
    """The messages without those about files that are not the user's.

    An error in the simulator's own headers is placed where the source uses them. One that has no
    such place is left out if there is another: it follows from that.
    """
    found: list[_Diagnostic] = []
    for line in said.strip().split("\n"):
        if line.startswith(("In file included from ", "                 from ")):
            continue
        located = LOCATED.match(line)
        if unknown := UNKNOWN.search(line):
            line += f": {unknown[1] or unknown[2]} is not in Metal; the text must define it"
        if not found or (located and ERROR.match(located["rest"])):
            found.append(_Diagnostic(line))
        else:
            found[-1].more.append(line)
    placed = [text for one in found if (text := _placed(one, in_shim))]
    lines = placed or [line for one in found for line in (one.first, *one.more)]
    return "\n".join("\n".join(lines).split("\n")[:MOST_LINES])


def _placed(one: _Diagnostic, in_shim: Callable[[str], bool]) -> str | None:
    located = LOCATED.match(one.first)
    if located is None or not in_shim(located["file"]):
        return "\n".join([one.first, *one.more])
    places = _outside(one.more, in_shim)
    if not places:
        return None
    place = places[0]
    where = f"{place['file']}:{place['line']}{place['column'] or ''}"
    return "\n".join([f"{where}: {located['rest']}", *(note[0] for note in places[1:])])


def _outside(lines: Iterable[str], in_shim: Callable[[str], bool]) -> list[re.Match[str]]:
    found = map(LOCATED.match, lines)
    return [one for one in found if one is not None and not in_shim(one["file"])]
