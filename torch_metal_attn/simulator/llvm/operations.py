"""The kinds of operation that counted builds count, for each line of LLVM IR.

Instructions that only move data are not counted: loads, constant addresses, bit casts, accesses to
vector elements and sign changes of floats. A vector operation counts once for each element.
"""

import re

from .ir import FLAGS, INSTRUCTION, element, lanes_of, typed

# The counters' names, in the order of abi.h.
COUNTS = (
    "converts",
    "exps",
    "float_operations",
    "integer_operations",
    "addresses",
    "selects",
    "functions",
)
# Counted in every checked build. The other counts depend on the unrolling of loops.
ALWAYS = frozenset({"converts", "exps"})

_INSTRUCTIONS = {
    "converts": "fpext fptrunc fptosi fptoui sitofp uitofp",
    "float_operations": "fadd fsub fmul fdiv frem",
    "integer_operations": "add sub mul sdiv udiv srem urem shl lshr ashr and or xor",
    "selects": "select icmp fcmp",
}
# Functions of LLVM. The C library's functions have the same names with an f at the end.
_FUNCTIONS = {
    "converts": "fptosi fptoui",
    "exps": "exp exp2 exp10",
    "float_operations": "fma fmuladd floor ceil trunc rint round roundeven nearbyint ldexp fmod",
    "integer_operations": "abs bitreverse bswap ctlz cttz ctpop fshl fshr",
    "selects": "minnum maxnum minimum maximum minimumnum maximumnum fmin fmax smin smax umin umax",
    "functions": "log log2 log10 sqrt pow sin cos tan asin acos atan atan2 sinh cosh tanh asinh "
    "acosh atanh",
}
_OF_INSTRUCTION = {name: what for what, names in _INSTRUCTIONS.items() for name in names.split()}
_OF_FUNCTION = {name: what for what, names in _FUNCTIONS.items() for name in names.split()}

_CALLED = re.compile(r"@(?:llvm\.)?([a-z]\w*)")
_INDEX = re.compile(r", ptr [^,]+,.*%")


def operation(line: str) -> tuple[str, int] | None:
    """(counter, number of operations) of a line; None if the line is not counted."""
    match = INSTRUCTION.match(line)
    if not match:
        return None
    _, instruction, rest = match.groups()
    if instruction == "call":
        called = _CALLED.search(rest)
        name = called.group(1) if called else ""
        what = _OF_FUNCTION.get(name) or _OF_FUNCTION.get(name.removesuffix("f"))
        return (what, lanes_of(typed(rest)[0]) or 1) if what else None
    if instruction == "getelementptr":
        return ("addresses", 1) if _INDEX.search(rest) else None
    what = _OF_INSTRUCTION.get(instruction)
    if what is None:
        return None
    if instruction in ("icmp", "fcmp"):
        rest = FLAGS.sub("", rest).partition(" ")[2]
    of_type = typed(rest)[0]
    lanes = lanes_of(of_type)
    if what == "integer_operations" and (element(of_type) if lanes else of_type) == "i1":
        what = "selects"  # logic on conditions
    return what, lanes or 1
