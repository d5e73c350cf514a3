"""The threadgroup memory that kernels declare, read from their LLVM IR without running them."""

import re
from collections.abc import Iterator

from .build import Program

# As in csrc/simulator/arena.h.
LIMIT = 32768  # bytes in an Apple GPU
ALIGNMENT = 16  # bytes; every variable has at least this alignment

FUNCTION = re.compile(r'^define .*?@("[^"]+"|[\w.$]+)\(')
CALL = re.compile(r'\b(?:call|invoke) [^@]*@("[^"]+"|[\w.$]+)\(')
VARIABLE = re.compile(r"\(ptr [^@]*@(\S+), i64 [^\d]*(\d+), i64 [^\d]*(\d+)\)")

_Variable = tuple[str, int, int]  # global that holds the variable's name, bytes, alignment


def threadgroup_bytes(program: Program) -> dict[str, int]:
    """Bytes of the threadgroup variables that each kernel uses, without [[threadgroup(i)]]."""
    if not program.kernels:
        return {}
    functions = dict(_functions(program.intermediate()))
    return {
        kernel.name: _total(dict.fromkeys(_reached(functions, kernel.symbol, set())))
        for kernel in program.kernels.values()
    }


def _functions(ir: str) -> Iterator[tuple[str, list[str | _Variable]]]:
    result: list[str | _Variable] = []
    for line in ir.split("\n"):
        if head := FUNCTION.match(line):
            result = []
            yield head[1], result
        elif call := CALL.search(line):
            if call[1] != "__msl_threadgroup_memory":
                result.append(call[1])
                continue
            variable = VARIABLE.search(line)
            if variable is None:
                raise RuntimeError(f"threadgroup memory of unknown size: {line.strip()}")
            result.append((variable[1], int(variable[2]), int(variable[3])))


def _reached(
    functions: dict[str, list[str | _Variable]], name: str, seen: set[str]
) -> Iterator[_Variable]:
    if name in seen:
        return
    seen.add(name)
    for item in functions.get(name, ()):
        if isinstance(item, str):
            yield from _reached(functions, item, seen)
        else:
            yield item


def _total(variables: dict[_Variable, None]) -> int:
    used = 0
    for _, size, alignment in variables:
        align = max(alignment, ALIGNMENT)
        used = (used + align - 1) // align * align + size
    return used
