"""Ranges of integers and addresses in LLVM IR.

An access that is always inside of its private variable needs no check when the kernel runs.
"""

import re

from .ir import (
    DEBUG,
    FLAGS,
    INSTRUCTION,
    LABEL,
    METADATA,
    element,
    fields,
    layout,
    operand,
    split,
    typed,
)

Range = tuple[int, int]  # the least and the greatest, as signed integers

BRANCH = re.compile(r"^  br i1 (\S+), label (\S+), label ([^,\s]+)")
COMPARE = re.compile(r"^(?:samesign )?(\w+) i\d+ ([^,]+), ([^,]+)$")
EXTREME = re.compile(r"@llvm\.([su])(min|max)\.i\d+\((.*)\)")
OPPOSITE = {"eq": "ne", "ne": "eq", "slt": "sge", "sge": "slt", "sgt": "sle", "sle": "sgt"}
OPPOSITE |= {"ult": "uge", "uge": "ult", "ugt": "ule", "ule": "ugt"}
SWAPPED = {"eq": "eq", "ne": "ne", "slt": "sgt", "sgt": "slt", "sle": "sge", "sge": "sle"}
SWAPPED |= {"ult": "ugt", "ugt": "ult", "ule": "uge", "uge": "ule"}
MOST_DEEP = 40  # values that are computed from others


class Ranges:
    """The ranges of the values in a function's body."""

    def __init__(self, body: list[str], structs: dict[str, str]) -> None:
        self.body = body
        self.structs = structs
        self.lines: dict[str, int] = {}  # of each value, the line that computes it
        self.branches: dict[str, int] = {}  # of each block, the line at its end
        self.blocks: list[tuple[int, str]] = [(-1, "")]
        for number, line in enumerate(body):
            if line.startswith("  %"):
                self.lines[line[2 : line.index(" ", 3)]] = number
            elif line.startswith("  br "):
                self.branches[self.blocks[-1][1]] = number
            elif line[:1] not in (" ", "") and (match := LABEL.match(line)):
                self.blocks.append((number, match.group(1)))
        self.known: dict[str, Range] = {}
        self.places: dict[str, dict[str, Range] | None] = {}
        self.open: set[str] = set()  # what is being computed now

    def instruction(self, name: str) -> tuple[str, str]:
        """(what computes a value, its operands); ("", "") of an argument."""
        number = self.lines.get(name)
        match = INSTRUCTION.match(self.body[number]) if number is not None else None
        if not match:
            return "", ""
        rest = match.group(3)
        if at := DEBUG.search(rest):
            rest = rest[: at.start()]
        return match.group(2), METADATA.sub("", rest)

    def of(self, value: str, bits: int) -> Range:
        """The range of an integer."""
        whole = (-(1 << bits - 1), (1 << bits - 1) - 1) if bits > 1 else (-1, 0)
        if not value.startswith("%"):
            if bits == 1 or not value.lstrip("-").isdigit():
                return (0, 0) if value in ("false", "zeroinitializer") else whole
            return int(value), int(value)
        if value not in self.known:
            if value in self.open or len(self.open) > MOST_DEEP:
                return whole
            self.open.add(value)
            low, high = self.computed(value, bits) or whole
            self.open.discard(value)
            self.known[value] = (low, high) if whole[0] <= low and high <= whole[1] else whole
        return self.known[value]

    def computed(self, name: str, bits: int) -> Range | None:
        """The range by the instruction; one that does not fit the type overflows."""
        op, rest = self.instruction(name)
        if op == "phi":
            return self.merged(name, rest, bits)
        if op in ("zext", "sext", "trunc"):
            return self.converted(op, rest, bits)
        if op == "call":
            match = EXTREME.search(rest)
            if not match:
                return None
            a, b = (self.of(operand(part), bits) for part in split(match.group(3)))
            if match.group(1) == "u" and (a[0] < 0 or b[0] < 0):
                return None
            of = min if match.group(2) == "min" else max
            return of(a[0], b[0]), of(a[1], b[1])
        if op == "select":
            a, b = (self.of(operand(part), bits) for part in split(rest)[1:])
            return min(a[0], b[0]), max(a[1], b[1])
        if op == "freeze":
            return self.of(operand(rest), bits)
        if op not in ARITHMETIC:
            return None
        disjoint = rest.startswith("disjoint ")
        first, second = split(FLAGS.sub("", rest))[:2]
        a, b = self.of(typed(first)[1], bits), self.of(second, bits)
        if op == "or" and disjoint and a[0] >= 0 and b[0] >= 0:
            op = "add"
        return ARITHMETIC[op](a, b, bits)

    def converted(self, op: str, rest: str, bits: int) -> Range | None:
        source, _, _ = rest.rpartition(" to ")
        of_type, value = typed(source)
        if not of_type.startswith("i"):
            return None
        low, high = self.of(value, int(of_type[1:]))
        if op == "zext" and low < 0:
            return 0, (1 << int(of_type[1:])) - 1
        return low, high

    def merged(self, name: str, rest: str, bits: int) -> Range | None:
        """The range of a phi: of all that come in, or of a loop's counter."""
        parts = [split(pair[1:-1]) for pair in split(typed(rest)[1])]
        again = [(value, block) for value, block in parts if self.step(value, name) is not None]
        if not again:
            ranges = [self.of(value, bits) for value, _ in parts]
            return min(low for low, _ in ranges), max(high for _, high in ranges)
        if len(again) > 1 or len(parts) != 2:
            return None
        ((value, block),) = again
        first = next(start for start, _ in parts if start != value)
        return self.counter(name, value, block, self.of(first, bits), bits)

    def step(self, value: str, counter: str) -> int | None:
        """The step of a loop's counter; None if the value is something else."""
        op, rest = self.instruction(value)
        if op != "add":
            return None
        first, second = split(FLAGS.sub("", rest))[:2]
        constant = second.lstrip("-").isdigit()
        return int(second) if typed(first)[1] == counter and constant else None

    def counter(self, name: str, value: str, block: str, first: Range, bits: int) -> Range | None:
        """The range of a loop's counter, whose next value comes from the end of `block`."""
        step = self.step(value, name)
        number = self.branches.get(block[1:] or "")
        match = BRANCH.match(self.body[number]) if number is not None else None
        if not step or not match:
            return None
        condition, if_true, if_false = match.groups()
        here = self.block_of(name)
        op, rest = self.instruction(condition)
        compared = COMPARE.match(rest) if op == "icmp" else None
        if compared is None or (if_true == here) == (if_false == here):
            return None
        relation, a, b = compared.groups()
        if b in (name, value):
            relation, a, b = SWAPPED[relation], b, a
        if a not in (name, value):
            return None
        if if_true != here:
            relation = OPPOSITE[relation]
        # The loop goes on where a relation b holds; `after` is what is added to `a` until the next.
        after = step if a == name else 0
        bound = self.of(b, bits)
        if relation in ("ult", "ule") and bound[0] >= 0:
            relation = "s" + relation[1:]  # what it holds for is not negative either
        if relation == "eq":
            return min(first[0], bound[0] + after), max(first[1], bound[1] + after)
        if relation == "ne":
            steps, rest_of = divmod(bound[0] - first[0], step)
            if bound[0] != bound[1] or first[0] != first[1] or rest_of or steps < (a == value):
                return None
            last = bound[0] - (step if a == value else 0)
            return min(first[0], last), max(first[0], last)
        if relation in ("slt", "sle") and step > 0:
            last = bound[1] - (relation == "slt") + after
        elif relation in ("sgt", "sge") and step < 0:
            last = bound[0] + (relation == "sgt") + after
        else:
            return None
        low, high = min(first[0], last), max(first[1], last)
        # A step past the last that goes on must not overflow, to go on from the other end.
        whole = 1 << bits - 1
        return (low, high) if -whole <= low + min(step, 0) and high + step < whole else None

    def block_of(self, name: str) -> str:
        """The block of a value, as labels name it."""
        number = self.lines[name]
        return next(f"%{label}" for begin, label in reversed(self.blocks) if begin < number)

    def places_of(self, address: str) -> dict[str, Range] | None:
        """For each variable the range of bytes that an address can be at; None if not known."""
        if address not in self.places:
            if address in self.open or len(self.open) > MOST_DEEP:
                return None
            self.open.add(address)
            self.places[address] = self.computed_places(address)
            self.open.discard(address)
        return self.places[address]

    def computed_places(self, address: str) -> dict[str, Range] | None:
        op, rest = self.instruction(address)
        if op == "alloca":
            return {address: (0, 0)}
        if op == "getelementptr":
            of_type, base, *indices = split(FLAGS.sub("", rest))
            places, offset = self.places_of(operand(base)), self.offset(of_type, indices)
            if places is None or offset is None:
                return None
            return {name: (a + offset[0], b + offset[1]) for name, (a, b) in places.items()}
        found: dict[str, Range] = {}
        for choice in addresses_of(op, rest):
            places = self.places_of(choice)
            if places is None:
                return None
            for name, (low, high) in places.items():
                other = found.get(name, (low, high))
                found[name] = min(low, other[0]), max(high, other[1])
        return found or None

    def offset(self, of_type: str, indices: list[str]) -> Range | None:
        """The bytes that a getelementptr adds."""
        low = high = 0
        for number, index in enumerate(indices):
            index_type, value = typed(index)
            if number:
                of_type = self.structs.get(of_type, of_type)
                if parts := fields(of_type, self.structs):
                    if not value.isdigit():
                        return None
                    low, high = low + parts[int(value)][0], high + parts[int(value)][0]
                    of_type = parts[int(value)][1]
                    continue
                of_type = element(of_type)
            size = layout(of_type, self.structs)[0]
            if not size or not index_type.startswith("i"):
                return None
            a, b = self.of(value, int(index_type[1:]))
            low, high = low + a * size, high + b * size
        return low, high


def addresses_of(op: str, rest: str) -> list[str]:
    """The operands of a choice of addresses; none if an instruction is no choice."""
    if op == "phi":
        of_type, pairs = typed(rest)
        return [split(pair[1:-1])[0] for pair in split(pairs)] if of_type == "ptr" else []
    return [operand(part) for part in split(rest)[1:]] if op == "select" else []


def _add(a: Range, b: Range, bits: int) -> Range:
    return a[0] + b[0], a[1] + b[1]


def _sub(a: Range, b: Range, bits: int) -> Range:
    return a[0] - b[1], a[1] - b[0]


def _mul(a: Range, b: Range, bits: int) -> Range:
    products = [x * y for x in a for y in b]
    return min(products), max(products)


def _shl(a: Range, b: Range, bits: int) -> Range | None:
    return _mul(a, (1 << b[0], 1 << b[1]), bits) if 0 <= b[0] and b[1] < bits else None


def _and(a: Range, b: Range, bits: int) -> Range | None:
    most = [high for low, high in (a, b) if low >= 0]
    return (0, min(most)) if most else None


def _or(a: Range, b: Range, bits: int) -> Range | None:
    if a[0] < 0 or b[0] < 0:
        return None
    return max(a[0], b[0]), (1 << max(a[1], b[1]).bit_length()) - 1


def _xor(a: Range, b: Range, bits: int) -> Range | None:
    either = _or(a, b, bits)
    return (0, either[1]) if either else None


def _ashr(a: Range, b: Range, bits: int) -> Range | None:
    if not 0 <= b[0] == b[1] < bits:
        return None
    return a[0] >> b[0], a[1] >> b[0]


def _lshr(a: Range, b: Range, bits: int) -> Range | None:
    if a[0] >= 0:
        return _ashr(a, b, bits)
    return (0, ((1 << bits) - 1) >> b[0]) if 0 <= b[0] == b[1] < bits else None


def _div(a: Range, b: Range, bits: int) -> Range | None:
    if a[0] < 0 or b[0] < 1:
        return None
    return a[0] // b[1], a[1] // b[0]


def _rem(a: Range, b: Range, bits: int) -> Range | None:
    return (0, min(a[1], b[1] - 1)) if a[0] >= 0 and b[0] >= 1 else None


def _urem(a: Range, b: Range, bits: int) -> Range | None:
    return _rem(a, b, bits) or ((0, b[1] - 1) if b[0] >= 1 else None)


ARITHMETIC = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "shl": _shl,
    "and": _and,
    "or": _or,
    "xor": _xor,
    "ashr": _ashr,
    "lshr": _lshr,
    "sdiv": _div,
    "udiv": _div,
    "srem": _rem,
    "urem": _urem,
}
