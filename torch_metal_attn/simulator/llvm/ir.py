"""LLVM IR as text, parsed for the passes: functions and their lines, types, constants."""

import itertools
import re
from dataclasses import dataclass, field

NAME = r'%(?:[\w.$-]+|"[^"]*")'
VALUE = re.compile(NAME)
INSTRUCTION = re.compile(rf"^  ({NAME}) = (?:tail |musttail |notail )?(\w+) (.*)$")
LABEL = re.compile(r'^([\w.$-]+|"[^"]*"):')
DEBUG = re.compile(r", !dbg (!\d+)")
METADATA = re.compile(r", ![a-z].*$| #\d+$")
ALLOCA = re.compile(rf"^  ({NAME}) = alloca (.+?), align \d+")
LOAD = re.compile(rf"^  ({NAME}) = load (?:volatile )?(.+?), ptr ({NAME}), align")
STORE = re.compile(rf"^  store (?:volatile )?(.+), ptr ({NAME}), align")
# Attributes before an operand's type, or between type and value.
FLAGS = re.compile(
    r"^(?:(?:fast|nnan|ninf|nsz|arcp|contract|afn|reassoc|nuw|nsw|nusw|exact|disjoint|inbounds|nneg"
    r"|samesign|noundef|signext|zeroext|nonnull|volatile) )+"
)
# clang writes an element of a bool vector as an i8, although IR needs an i1.
BOOL_ELEMENT = re.compile(
    rf"^(?P<before>  {NAME} = insertelement <\d+ x i1> [^,]+,) i8 (?P<value>[^,]+),(?P<after>.*)",
    re.MULTILINE,
)
BRACKETS = {"<": ">", "[": "]", "{": "}"}
SCALARS = {"half": 2, "bfloat": 2, "float": 4, "double": 8, "ptr": 8}

ARITHMETIC = frozenset(
    "fadd fsub fmul fdiv frem add sub mul and or xor shl lshr ashr udiv sdiv urem srem".split()
)
CASTS = frozenset(
    "fpext fptrunc fptosi fptoui sitofp uitofp trunc zext sext bitcast ptrtoint inttoptr".split()
)

_STRUCT = re.compile(rf"^({NAME}) = type (<?\{{.*\}}>?)$")
_ATTRIBUTES = re.compile(r"^attributes #(\d+) = \{ (.*)\}")
_GROUP = re.compile(r" #(\d+)")
_ARRAY = re.compile(r"\[(\d+) x (.*)\]$")
_VECTOR = re.compile(r"<(\d+) x (.*)>$")
_FIELDS = re.compile(r"(<?)\{ (.*) \}>?$")
_INTEGER = re.compile(r"i(\d+)$")


@dataclass
class Function:
    """A function definition: its first line and the lines up to its closing brace."""

    head: str
    body: list[str]
    is_kernels: bool  # code of a kernel and not of the shim


@dataclass
class Module:
    """An IR text, as its functions and all other lines in order."""

    outside: list[str]
    functions: list[Function]
    structs: dict[str, str] = field(default_factory=dict)  # definitions of named types

    def text(self) -> str:
        lines = [*self.outside]
        for function in self.functions:
            lines += [function.head, *function.body, "}", ""]
        return "\n".join(lines)


def with_bool_elements(text: str) -> str:
    """The IR with elements of bool vectors as i1, which LLVM requires."""
    numbers = itertools.count(1)

    def repaired(match: re.Match[str]) -> str:
        bit = f"%msl.bit.{next(numbers)}"
        before, value, after = match.group("before", "value", "after")
        return f"  {bit} = trunc i8 {value} to i1\n{before} i1 {bit},{after}"

    return BOOL_ELEMENT.sub(repaired, text)


def parse(text: str) -> Module:
    lines = text.split("\n")
    module = Module([], [])
    instrumented: set[str] = set()  # attribute groups that enable the thread sanitizer
    number, end = 0, len(lines)
    while number < end:
        line = lines[number]
        if line.startswith("define "):
            close = lines.index("}", number)
            module.functions.append(Function(line, lines[number + 1 : close], False))
            number = close
        else:
            module.outside.append(line)
            if line.startswith("%") and (match := _STRUCT.match(line)):
                module.structs[match.group(1)] = match.group(2)
            elif line.startswith("attributes ") and (match := _ATTRIBUTES.match(line)):
                words = match.group(2).split()
                if "sanitize_thread" in words and "disable_sanitizer_instrumentation" not in words:
                    instrumented.add(match.group(1))
        number += 1
    for function in module.functions:
        function.is_kernels = not instrumented.isdisjoint(_GROUP.findall(function.head))
    return module


def debug(line: str) -> str:
    """A line's debug location as a suffix for another line, such as `, !dbg !7`; may be empty."""
    match = DEBUG.search(line)
    return match.group() if match else ""


def split(text: str) -> list[str]:
    """The parts between commas outside of brackets."""
    if not any(bracket in text for bracket in "<[{("):
        return [part.strip() for part in text.split(",")]
    parts, depth, begin = [], 0, 0
    for at, character in enumerate(text):
        if character in "<[{(":
            depth += 1
        elif character in ">]})":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[begin:at].strip())
            begin = at + 1
    return [*parts, text[begin:].strip()]


def typed(text: str) -> tuple[str, str]:
    """(type, value) of an operand, without its attributes."""
    if match := FLAGS.match(text):
        text = text[match.end() :]
    if text[:1] in BRACKETS:
        depth = 0
        for at, character in enumerate(text):
            depth += (character in "<[{") - (character in ">]}")
            if depth == 0:
                return text[: at + 1], text[at + 1 :].lstrip()
    if text.startswith('%"'):
        end = text.index('"', 2) + 1
        return text[:end], text[end:].lstrip()
    of_type, _, value = text.partition(" ")
    return of_type, value


def operand(text: str) -> str:
    """The value of an operand, without the attributes between type and value."""
    value = typed(text)[1]
    match = FLAGS.match(value)
    return value[match.end() :] if match else value


def lanes_of(type_text: str) -> int:
    """The length of a vector type; 0 for other types."""
    match = _VECTOR.match(type_text)
    return int(match.group(1)) if match else 0


def element(type_text: str) -> str:
    return type_text[1:-1].partition(" x ")[2]


def fields(type_text: str, structs: dict[str, str]) -> list[tuple[int, str]]:
    """(offset, type) of each field of a struct; empty for other types and unknown sizes."""
    match = _FIELDS.match(structs.get(type_text, type_text))
    result: list[tuple[int, str]] = []
    end = 0
    for part in split(match.group(2)) if match else ():
        size, align = layout(part, structs)
        if not size:
            return []
        begin = end if match and match.group(1) else (end + align - 1) // align * align
        result.append((begin, part))
        end = begin + size
    return result


def scalars(type_text: str, structs: dict[str, str]) -> set[str]:
    type_text = structs.get(type_text, type_text)
    if match := _ARRAY.match(type_text) or _VECTOR.match(type_text):
        return scalars(match.group(2), structs)
    if match := _FIELDS.match(type_text):
        return set().union(*(scalars(part, structs) for part in split(match.group(2))))
    return {type_text}


def padding(type_text: str, structs: dict[str, str]) -> list[tuple[int, int]]:
    """The bytes [begin, end) of a variable that belong to no scalar of its type."""
    if match := _ARRAY.match(type_text):
        inner, size = padding(match.group(2), structs), layout(match.group(2), structs)[0]
        count = int(match.group(1)) if inner else 0
        return [(i * size + begin, i * size + end) for i in range(count) for begin, end in inner]
    result: list[tuple[int, int]] = []
    end = 0
    parts = fields(type_text, structs)
    for begin, part in parts:
        if begin > end:
            result.append((end, begin))
        result += [(begin + first, begin + last) for first, last in padding(part, structs)]
        end = begin + layout(part, structs)[0]
    size = layout(type_text, structs)[0]
    return [*result, (end, size)] if parts and end < size else result


def layout(type_text: str, structs: dict[str, str]) -> tuple[int, int]:
    """(bytes, alignment) of a type as a variable; (0, 1) if unknown."""
    if type_text in structs:
        return layout(structs[type_text], structs)
    if type_text in SCALARS:
        return SCALARS[type_text], SCALARS[type_text]
    if match := _INTEGER.match(type_text):
        size = (int(match.group(1)) + 7) // 8
        return size, size
    if match := _ARRAY.match(type_text):
        size, align = layout(match.group(2), structs)
        return int(match.group(1)) * size, align
    if match := _VECTOR.match(type_text):
        lanes, bits = int(match.group(1)), 8 * layout(match.group(2), structs)[0]
        if match.group(2) == "i1":
            bits = 1
        size = 1 << (lanes * bits // 8 - 1).bit_length() if lanes * bits > 8 else 1
        return size, size
    if result := fields(type_text, structs):
        aligns = [layout(part, structs)[1] for _, part in result]
        most = 1 if type_text.startswith("<") else max(aligns)
        end = result[-1][0] + layout(result[-1][1], structs)[0]
        return (end + most - 1) // most * most, most
    return 0, 1
