"""Loops of a listing of Apple's instructions, as Mesa prints one, and their cycles by unit."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

PRODUCT = "simd_matrix_fmadd"
# Cycles that an instruction of a SIMD group keeps the unit for floats and simple integers, by
# Mesa's agx_performance.c; one that is not named takes one. A product of 8x8 matrices is 16 cycles
# of multiply-adds, and takes about 20 as measured on M1 (docs/design/tiles.md has the source).
PRODUCT_CYCLES = 20
CYCLES = {
    PRODUCT: PRODUCT_CYCLES,
    "get_sr": 2,
    "shuffle": 2,
    "shuffle_xor": 2,
    "icmp_ballot": 2,
    "fcmp_ballot": 2,
    "simd_prefix": 18,
    "simd_reduce": 24,
}
# Memory and control flow have units of their own.
FREE = re.compile(
    r"(local|device|stack)_(load|store)$|wait$|stop$|begin_cf$|(threadgroup|memory)_barrier$|"
    r"(jmp_exec_any|jmp_exec_none|pop_exec)$|if_|else_|while_|break"
)
# Of the unit for other integers and functions, which works beside the first.
COMPLEX_CYCLES = {
    **dict.fromkeys(("imad", "bfi", "bfeil", "extr", "asr", "floor", "log2", "exp2"), 4),
    **dict.fromkeys(("sin_pt_1", "sin_pt_2"), 4),
    "rcp": 6,
    "rsqrt": 8,
    "srsqrt": 8,
}
THREADGROUP_BYTES = 64  # that a core's threadgroup memory moves a cycle
SIMD_UNITS = 4  # of a core
LANES = 32


@dataclass
class Block:
    """Instructions with one way in and one way out, and the blocks that may follow."""

    opcodes: Counter[str] = field(default_factory=Counter)
    lane_bytes: Counter[str] = field(default_factory=Counter)
    followers: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Loop:
    """One loop, with all that is inside it.

    Attributes: blocks: their numbers. opcodes: how often each instruction is in the text.
    lane_bytes: that a lane moves, by local_load, local_store, device_load and so on.
    """

    blocks: range
    opcodes: Counter[str]
    lane_bytes: Counter[str]

    @property
    def instructions(self) -> int:
        return sum(self.opcodes.values())

    @property
    def products(self) -> int:
        """Products of 8x8 matrices."""
        return self.opcodes[PRODUCT]

    @property
    def arithmetic(self) -> int:
        """Cycles of the unit for floats and simple integers, which also computes products."""
        return sum(n * CYCLES.get(op, 1) for op, n in self.opcodes.items() if not FREE.match(op))

    @property
    def complex(self) -> int:
        """Cycles of the unit for other integers and functions."""
        return sum(n * COMPLEX_CYCLES.get(op, 0) for op, n in self.opcodes.items())

    @property
    def threadgroup(self) -> float:
        """Cycles of threadgroup memory, when each SIMD unit of a core runs such a loop."""
        moved = self.lane_bytes["local_load"] + self.lane_bytes["local_store"]
        return SIMD_UNITS * LANES * moved / THREADGROUP_BYTES

    @property
    def cycles(self) -> float:
        """Of the busiest unit."""
        return max(self.arithmetic, self.complex, self.threadgroup)


def blocks(text: str) -> Iterator[Block]:
    """The blocks of a listing, in their order."""
    block = None
    for line in text.split("\n"):
        if line.startswith("block"):
            block = Block()
        elif line.startswith("}") and block is not None:
            followers = line.partition(" -> ")[2].partition(" from")[0]
            block.followers = [int(n) for n in re.findall(r"block(\d+)", followers)]
            yield block
            block = None
        elif block is not None and line.strip():
            result, _, instruction = line.strip().rpartition(" = ")
            opcode, *operands = instruction.replace(",", "").split(" ")
            block.opcodes[opcode] += 1
            if opcode.endswith(("_load", "_store")):
                register = result or operands[0]
                (elements,) = (word for word in operands if re.fullmatch("[xyzw]+", word))
                each = 2 if re.match(r"r\d+[lh]", register) else 4
                block.lane_bytes[opcode] += each * len(elements)


def loops(text: str) -> list[Loop]:
    """The loops of a listing, each from where it is entered to where it is repeated."""
    found = list(blocks(text))
    of_loops = []
    for last, block in enumerate(found):
        for first in block.followers:
            if first <= last:
                inside = found[first : last + 1]
                opcodes = sum((one.opcodes for one in inside), Counter[str]())
                lane_bytes = sum((one.lane_bytes for one in inside), Counter[str]())
                of_loops.append(Loop(range(first, last + 1), opcodes, lane_bytes))
    return of_loops
