"""The private variables that an address in LLVM IR may be in, and its constant offsets."""

from .ir import DEBUG, FLAGS, INSTRUCTION, METADATA, element, fields, layout, operand, split, typed

Range = tuple[int, int]  # the lowest and the highest offset of an address
MAX_DEPTH = 40  # of addresses that are computed from other addresses


class Places:
    def __init__(self, body: list[str], structs: dict[str, str]) -> None:
        self.body = body
        self.structs = structs
        self.lines = {  # the line that computes each value
            line[2 : line.index(" ", 3)]: number
            for number, line in enumerate(body)
            if line.startswith("  %")
        }
        self.known: dict[str, dict[str, Range] | None] = {}
        self.open: set[str] = set()  # addresses whose computation has begun

    def instruction(self, name: str) -> tuple[str, str]:
        """(operation, operands) of a value; ("", "") for an argument."""
        number = self.lines.get(name)
        match = INSTRUCTION.match(self.body[number]) if number is not None else None
        if not match:
            return "", ""
        rest = match.group(3)
        if location := DEBUG.search(rest):
            rest = rest[: location.start()]
        return match.group(2), METADATA.sub("", rest)

    def of(self, address: str) -> dict[str, Range] | None:
        """The offsets of an address, as a range for each variable that it may be in; or None."""
        if address not in self.known:
            if address in self.open or len(self.open) > MAX_DEPTH:
                return None
            self.open.add(address)
            self.known[address] = self.computed(address)
            self.open.discard(address)
        return self.known[address]

    def computed(self, address: str) -> dict[str, Range] | None:
        op, rest = self.instruction(address)
        if op == "alloca":
            return {address: (0, 0)}
        if op == "getelementptr":
            of_type, base, *indices = split(FLAGS.sub("", rest))
            places, offset = self.of(operand(base)), self.offset(of_type, indices)
            if places is None or offset is None:
                return None
            return {name: (low + offset, high + offset) for name, (low, high) in places.items()}
        result: dict[str, Range] = {}
        for choice in addresses_of(op, rest):
            places = self.of(choice)
            if places is None:
                return None
            for name, (low, high) in places.items():
                other = result.get(name, (low, high))
                result[name] = min(low, other[0]), max(high, other[1])
        return result or None

    def offset(self, of_type: str, indices: list[str]) -> int | None:
        """The bytes that a getelementptr adds; None if an index is not constant."""
        total = 0
        for number, index in enumerate(indices):
            value = typed(index)[1]
            if not value.lstrip("-").isdigit():
                return None
            if number:
                of_type = self.structs.get(of_type, of_type)
                if parts := fields(of_type, self.structs):
                    begin, of_type = parts[int(value)]
                    total += begin
                    continue
                of_type = element(of_type)
            size = layout(of_type, self.structs)[0]
            if not size:
                return None
            total += int(value) * size
        return total


def addresses_of(op: str, rest: str) -> list[str]:
    """The operands of a phi or select of addresses; empty for other instructions."""
    if op == "phi":
        of_type, pairs = typed(rest)
        return [split(pair[1:-1])[0] for pair in split(pairs)] if of_type == "ptr" else []
    return [operand(part) for part in split(rest)[1:]] if op == "select" else []
