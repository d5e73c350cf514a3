"""Loads of neighbouring elements of device memory joined to vector loads, in optimised LLVM IR.

Apple's vector loads need the alignment of one element. NVIDIA's need that of the whole vector,
which the compiler cannot prove of a row at a stride that it does not know, so it loads each element
by itself. `joined` assumes it: in a replay every row begins at a multiple of 16 bytes. Where
that is wrong, the GPU stops with an error for a misaligned address.
"""

import re
from dataclasses import dataclass

MOST_BYTES = 16
SIZES = {"half": 2, "bfloat": 2, "i16": 2, "i8": 1, "float": 4, "i32": 4, "i64": 8}

VALUE = r"[%@][\w.$]+"
DEVICE = r"ptr addrspace\(1\)"
ADDRESS = re.compile(
    rf"\s*({VALUE}) = getelementptr (?:inbounds |nuw |nusw )*(\w+), {DEVICE} ({VALUE}), "
    r"i(?:64|32) (-?\d+)"
)
LOAD = re.compile(
    rf"\s*({VALUE}) = load (?:<(\d+) x )?(\w+)>?, {DEVICE} ({VALUE}), align (\d+)(.*)"
)
LABEL = re.compile(r"[\w.$-]+:")
# What may write to device memory. Calls that cannot are intrinsics of arithmetic and shuffles.
WRITES = re.compile(r"\b(call|store|atomicrmw|cmpxchg|fence|invoke)\b")
HARMLESS = re.compile(
    r"store .*addrspace\(3\)|"
    r"@llvm\.(fma|fmuladd|assume|maxnum|minnum|fabs|smin|smax|umin|umax|nvvm\.(ex2|lg2|shfl|read))"
)


@dataclass(frozen=True)
class _Load:
    line: int
    name: str
    offset: int
    count: int  # elements, 1 for a scalar
    is_vector: bool


def joined(ir: str) -> str:
    """The IR with every run of neighbouring loads as vector loads of up to MOST_BYTES."""
    lines = ir.split("\n")
    begin = None
    for number, line in enumerate(lines):
        if line.startswith("define "):
            begin = number
        elif line == "}" and begin is not None:
            _join(lines, range(begin, number))
            begin = None
    return "\n".join(lines)


def _join(lines: list[str], body: range) -> None:
    """Replace the loads of one function, in place."""
    places: dict[str, tuple[str, int]] = {}  # an address, as another one and bytes from there
    for number in body:
        if (match := ADDRESS.match(lines[number])) and match[2] in SIZES:
            places[match[1]] = match[3], int(match[4]) * SIZES[match[2]]

    def place(address: str) -> tuple[str, int]:
        offset = 0
        while address in places:
            address, distance = places[address]
            offset += distance
        return address, offset

    # Between writes and within a basic block, by element type and base.
    stretch = 0
    groups: dict[tuple[int, str, str], list[_Load]] = {}
    for number in body:
        line = lines[number]
        match = LOAD.match(line)
        if match and match[3] in SIZES:
            base, offset = place(match[4])
            load = _Load(number, match[1], offset, int(match[2] or 1), match[2] is not None)
            groups.setdefault((stretch, match[3], base), []).append(load)
        elif LABEL.match(line) or (WRITES.search(line) and not HARMLESS.search(line)):
            stretch += 1
    for (_, element, base), loads in groups.items():
        for run in _runs(loads, SIZES[element]):
            _replace(lines, run, element, base)


def _runs(loads: list[_Load], size: int) -> list[list[_Load]]:
    """The loads that one vector load can replace: a power of two of bytes, at a multiple of it."""
    runs: list[list[_Load]] = []
    rest = sorted({load.offset: load for load in loads}.values(), key=lambda load: load.offset)
    while rest:
        run = [rest[0]]
        for load in rest[1:]:
            if load.offset != run[-1].offset + run[-1].count * size:
                break
            run.append(load)
        while len(run) > 1:
            length = sum(load.count for load in run) * size
            if length <= MOST_BYTES and length & (length - 1) == 0 and run[0].offset % length == 0:
                runs.append(run)
                break
            run.pop()
        rest = rest[len(run) :]
    return runs


def _replace(lines: list[str], run: list[_Load], element: str, base: str) -> None:
    count = sum(load.count for load in run)
    vector = f"%joined.{run[0].name[1:]}"
    index = 0
    for load in run:
        elements = ", ".join(f"i32 {index + i}" for i in range(load.count))
        lines[load.line] = (
            f"  {load.name} = shufflevector <{count} x {element}> {vector}, "
            f"<{count} x {element}> poison, <{load.count} x i32> <{elements}>"
            if load.is_vector
            else f"  {load.name} = extractelement <{count} x {element}> {vector}, i64 {index}"
        )
        index += load.count
    # Where the first of them was: later ones may be computed only then, but the base is known.
    first = min(load.line for load in run)
    lines[first] = (
        f"  {vector}.place = getelementptr i8, ptr addrspace(1) {base}, i64 {run[0].offset}\n"
        f"  {vector} = load <{count} x {element}>, ptr addrspace(1) {vector}.place, "
        f"align {count * SIZES[element]}\n{lines[first]}"
    )
