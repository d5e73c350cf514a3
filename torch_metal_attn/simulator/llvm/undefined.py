"""Finds undefined behaviour of a kernel's code in checked builds.

The IR calls the engine where clang's undefined behaviour sanitizer would report, at each division
that can overflow, at each loop iteration and at the start of each function. In these calls, `$site`
is a placeholder for the number of the site, which instrument.py inserts.
"""

import re
from collections.abc import Iterator

from .ir import LABEL, NAME, Function, debug

SITE = "$site"

# __msl_undefined_what of shim/abi.h.
INDEX, DIVISION, CONVERSION, SHIFT, RETURN = range(5)
HANDLERS = {
    "out_of_bounds": INDEX,
    "divrem_overflow": DIVISION,
    "float_cast_overflow": CONVERSION,
    "shift_out_of_bounds": SHIFT,
    "missing_return": RETURN,
    "builtin_unreachable": RETURN,
}
HANDLER = re.compile(
    r"^  (?:tail |notail )?call void @__ubsan_handle_(?P<kind>[a-z_]+?)(?:_abort)?"
    r"\(ptr (?:[a-z]+ )*(?P<about>[^,)]+)(?P<values>(?:, i64 (?:[a-z]+ )*[^,)]+)*)\)"
)
OPERAND = re.compile(r"i64 (?:[a-z]+ )*([^,)]+)")
DIVIDE = re.compile(
    r"^  %\S+ = (?P<op>[su])(?:div|rem) (?:exact )?"
    r"(?:i(?P<bits>\d+)|<(?P<lanes>\d+) x i(?P<lane_bits>\d+)>)"
    r" (?P<a>[^,]+|<[^>]*>), (?P<b>%[^,\s]+)"
)
TARGET = re.compile(rf"label ({NAME})")


def find_undefined(function: Function) -> list[str]:
    body = function.body
    out: list[str] = []
    if function.is_kernels and "@__msl_" not in function.head:
        out.append(_call("enter", "", next((line for line in body if debug(line)), "")))
    seen: set[str] = set()  # blocks up to this line
    names = 0
    for number, line in enumerate(body):
        if not line.startswith("  "):
            if match := LABEL.match(line):
                seen.add(f"%{match.group(1)}")
        elif "@__ubsan_handle_" in line and (match := HANDLER.match(line)):
            kind, about = HANDLERS[match.group("kind")], match.group("about")
            a, b = [*OPERAND.findall(match.group("values")), "0", "0"][:2]
            out.append(_call("undefined", f"i32 {kind}, ptr {about}, i64 {a}, i64 {b}, ", line))
            continue
        elif not function.is_kernels:
            pass
        elif ("div " in line or "rem " in line) and (match := DIVIDE.match(line)):
            names += 1
            out += _division(match, f"%msl.divide.{names}", line)
        elif line.startswith(("  br ", "  switch ")) and seen.intersection(targets(body, number)):
            out.append(_call("step", "", line))
        out.append(line)
    return out


def _call(name: str, arguments: str, source: str) -> str:
    """A call with the debug location of the line `source`."""
    return f"  call void @__msl_{name}({arguments}i32 {SITE})" + debug(source)


def targets(lines: list[str], number: int) -> Iterator[str]:
    """The targets of a branch. The cases of a switch are on the lines after the switch."""
    line = lines[number]
    yield from TARGET.findall(line)
    while line.startswith(("  switch ", "    ")) and not line.startswith("  ]"):
        number += 1
        line = lines[number]
        yield from TARGET.findall(line)


def _division(match: re.Match[str], name: str, line: str) -> list[str]:
    """Tests of a division's operands. The sanitizer checks neither vectors nor overflow."""
    a, b, lanes = match.group("a"), match.group("b"), int(match.group("lanes") or 0)
    bits = match.group("lane_bits") or match.group("bits")
    of_type, flags = (f"<{lanes} x i{bits}>", f"<{lanes} x i1>") if lanes else (f"i{bits}", "i1")

    def splat(value: int) -> str:
        return f"<{', '.join([f'i{bits} {value}'] * lanes)}>" if lanes else str(value)

    out = [f"  {name}.bad = icmp eq {of_type} {b}, {splat(0)}"]
    bad = f"{name}.bad"
    if match.group("op") == "s":
        out += [
            f"  {name}.smallest = icmp eq {of_type} {a}, {splat(-(2 ** (int(bits) - 1)))}",
            f"  {name}.minus = icmp eq {of_type} {b}, {splat(-1)}",
            f"  {name}.over = and {flags} {name}.smallest, {name}.minus",
            f"  {name}.either = or {flags} {name}.over, {bad}",
        ]
        bad = f"{name}.either"
    if lanes:
        out += [
            f"  {name}.mask = bitcast {flags} {bad} to i{lanes}",
            f"  {name}.any = icmp ne i{lanes} {name}.mask, 0",
        ]
        bad = f"{name}.any"
    out.append(f"  {name}.flag = zext i1 {bad} to i32")
    out.append(_call("divide", f"i32 {name}.flag, ", line))
    return out
