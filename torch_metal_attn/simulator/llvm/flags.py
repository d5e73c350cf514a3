"""Flags of the values that may be undefined: for each element, whether it is defined."""

from dataclasses import dataclass

from .ir import ARITHMETIC, CASTS, FLAGS, debug, element, lanes_of, split, typed
from .undefined import SITE


@dataclass
class Value:
    """An instruction that computes a value from other values."""

    type: str
    operands: list[tuple[str, str]]
    op: str
    rest: str


def parse(op: str, rest: str) -> Value | None:
    """The value that an instruction computes; None for instructions without a flag."""
    rest = FLAGS.sub("", rest)
    if op in ARITHMETIC or op in ("icmp", "fcmp", "fneg", "freeze"):
        if op in ("icmp", "fcmp"):
            rest = rest.partition(" ")[2]
        first, *others = split(rest)
        of_type, value = typed(first)
        lanes = lanes_of(of_type)
        result = of_type if op not in ("icmp", "fcmp") else f"<{lanes} x i1>" if lanes else "i1"
        return Value(result, [(of_type, v) for v in [value, *others]], op, rest)
    if op in CASTS:
        source, _, target = rest.rpartition(" to ")
        return Value(target, [typed(source)], op, rest)
    if op == "phi":
        of_type, pairs = typed(rest)
        values = [(of_type, split(pair[1:-1])[0]) for pair in split(pairs)]
        return Value(of_type, values, op, rest)
    if op in ("select", "insertelement", "extractelement", "shufflevector"):
        operands = [typed(part) for part in split(rest)]
        at = 1 if op == "select" else 0
        of_type = operands[at][0]
        if op == "extractelement":
            of_type = element(of_type)
        elif op == "shufflevector":
            of_type = f"<{lanes_of(operands[2][0])} x {element(of_type)}>"
        return Value(of_type, operands, op, rest)
    if op == "getelementptr":
        return Value("ptr", [typed(part) for part in split(rest)[1:]], op, rest)
    if op == "call" and "@llvm." in rest:
        of_type = typed(rest)[0]
        inside = rest[rest.index("(") + 1 : rest.rindex(")")]
        return Value(of_type, [typed(part) for part in split(inside)], op, rest)
    return None


class Flags:
    """The flags of a function's values. `out` collects the lines that compute the flags."""

    def __init__(self) -> None:
        self.values: dict[str, Value] = {}  # computed values that may be undefined
        self.unset: dict[str, str] = {}  # each value that may be undefined, and its variable's name
        self.types: dict[str, str] = {}
        self.names = 0
        self.out: list[str] = []

    def fresh(self) -> str:
        self.names += 1
        return f"%msl.flag.{self.names}"

    def emit(self, text: str) -> str:
        name = self.fresh()
        self.out.append(f"  {name} = {text}")
        return name

    def flag(self, value: str, lanes: int) -> str:
        """The flag of a value; constant true if the value is always defined."""
        if value in self.unset:
            return f"%msl.defined.{value[1:]}"
        return f"<{', '.join(['i1 true'] * lanes)}>" if lanes else "true"

    def all_lanes(self, flag: str, lanes: int) -> str:
        if not lanes:
            return flag
        bits = self.emit(f"bitcast <{lanes} x i1> {flag} to i{lanes}")
        return self.emit(f"icmp eq i{lanes} {bits}, -1")

    def resized(self, flag: str, lanes: int, wanted: int) -> str:
        """The flag converted from `lanes` to `wanted` elements; 0 is a scalar."""
        if lanes == wanted:
            return flag
        one = self.all_lanes(flag, lanes)
        if not wanted:
            return one
        first = self.emit(f"insertelement <{wanted} x i1> poison, i1 {one}, i32 0")
        return self.emit(
            f"shufflevector <{wanted} x i1> {first}, <{wanted} x i1> poison, "
            f"<{wanted} x i32> zeroinitializer"
        )

    def define(self, name: str, value: Value) -> None:
        """Compute the flag of a value."""
        lanes = lanes_of(value.type)
        flags = f"<{lanes} x i1>" if lanes else "i1"
        result = f"  %msl.defined.{name[1:]} = "
        operands = value.operands

        def of(index: int) -> str:
            return self.flag(operands[index][1], lanes_of(operands[index][0]))

        if value.op == "phi":
            _, pairs = typed(value.rest)
            sources = [split(pair[1:-1])[1] for pair in split(pairs)]
            parts = [f"[ {of(i)}, {source} ]" for i, source in enumerate(sources)]
            self.out.append(f"{result}phi {flags} {', '.join(parts)}")
        elif value.op == "select":
            condition = f"{operands[0][0]} {operands[0][1]}"
            chosen = f"select {condition}, {flags} {of(1)}, {flags} {of(2)}"
            if operands[0][1] in self.unset:
                both = self.resized(of(0), lanes_of(operands[0][0]), lanes)
                self.out.append(f"{result}and {flags} {self.emit(chosen)}, {both}")
            else:
                self.out.append(result + chosen)
        elif value.op == "extractelement":
            vector = f"<{lanes_of(operands[0][0])} x i1> {of(0)}"
            self.out.append(f"{result}extractelement {vector}, {' '.join(operands[1])}")
        elif value.op == "insertelement":
            inserted = f"i1 {of(1)}, {' '.join(operands[2])}"
            self.out.append(f"{result}insertelement {flags} {of(0)}, {inserted}")
        elif value.op == "shufflevector":
            source = f"<{lanes_of(operands[0][0])} x i1>"
            mask = " ".join(operands[2])
            self.out.append(f"{result}shufflevector {source} {of(0)}, {source} {of(1)}, {mask}")
        else:
            undefined = [i for i, operand in enumerate(operands) if operand[1] in self.unset]
            parts = [self.resized(of(i), lanes_of(operands[i][0]), lanes) for i in undefined]
            if value.op in ("and", "or") and value.type == "i1":
                parts = self.short_circuit(value, parts, undefined)
            total = parts[0]
            for part in parts[1:]:
                total = self.emit(f"and {flags} {total}, {part}")
            one = f"<{', '.join(['i1 true'] * lanes)}>" if lanes else "true"
            self.out.append(f"{result}and {flags} {total}, {one}")

    def short_circuit(self, value: Value, parts: list[str], undefined: list[int]) -> list[str]:
        """`and` is defined if one defined operand is false, and `or` if one is true."""
        decides = []  # for each operand, whether it alone decides the result
        for at, (_, operand) in enumerate(value.operands):
            settled = operand if value.op == "or" else self.emit(f"xor i1 {operand}, true")
            if at in undefined:
                settled = self.emit(f"and i1 {settled}, {parts[undefined.index(at)]}")
            decides.append(settled)
        either = self.emit(f"or i1 {decides[0]}, {decides[1]}")
        return [self.emit(f"or i1 {either}, {part}") for part in parts]

    def use_values(self, line: str, names: list[str]) -> None:
        """Report the undefined values among `names`, which a line uses to decide something."""
        for name in dict.fromkeys(names):
            if name in self.unset and not line.startswith(f"  {name} = "):
                lanes = lanes_of(self.types[name])
                one = self.all_lanes(self.flag(name, lanes), lanes)
                self.report_use(self.emit(f"zext i1 {one} to i32"), self.unset[name], line)

    def report_use(self, number: str, variable: str, line: str) -> None:
        """Call the engine with the flag of a value that a line uses."""
        self.out.append(
            f"  call void @__msl_defined(i32 {number}, ptr {variable}, i32 {SITE})" + debug(line)
        )
