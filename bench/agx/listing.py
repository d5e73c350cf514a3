"""Loops of a listing of Apple's instructions in Mesa's format, and their cycles by unit."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

PRODUCT = "simd_matrix_fmadd"
# Cycles of an instruction of a SIMD group on the unit for floats and simple integers, by Mesa's
# agx_performance.c; unlisted instructions take 1. A product of 8x8 matrices is 16 cycles of
# multiply-adds, and takes about 20 as measured on M1 (docs/design/tiles.md has the source).
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
# Memory and control flow have separate units.
FREE = re.compile(
    r"(local|device|stack)_(load|store)$|wait$|stop$|begin_cf$|(threadgroup|memory)_barrier$|"
    r"(jmp_exec_any|jmp_exec_none|pop_exec)$|if_|else_|while_|break"
)
# Cycles on the unit for other integers and functions, which works in parallel with the first.
COMPLEX_CYCLES = {
    **dict.fromkeys(("imad", "bfi", "bfeil", "extr", "asr", "floor", "log2", "exp2"), 4),
    **dict.fromkeys(("sin_pt_1", "sin_pt_2"), 4),
    "rcp": 6,
    "rsqrt": 8,
    "srsqrt": 8,
}
# Bytes per cycle and core, of threadgroup memory and of the cache of device memory.
THREADGROUP_BYTES = DEVICE_BYTES = 64
SIMD_UNITS = 4  # per core
LANES = 32


@dataclass
class Block:
    """A basic block.

    Attributes: start: the byte offset of its code. followers: the blocks that may come next.
    opcodes: counts of its instructions. lane_bytes: bytes that a lane moves, by local_load,
    local_store, device_load and so on.
    """

    start: int
    followers: list[int]
    opcodes: Counter[str] = field(default_factory=Counter)
    lane_bytes: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Loop:
    """A loop, including inner loops. code: bytes. blocks: their numbers."""

    blocks: range
    code: int
    opcodes: Counter[str]
    lane_bytes: Counter[str]

    @property
    def products(self) -> int:
        return self.opcodes[PRODUCT]

    @property
    def arithmetic(self) -> int:
        """Cycles on the unit for floats and simple integers, which also computes products."""
        return sum(n * CYCLES.get(op, 1) for op, n in self.opcodes.items() if not FREE.match(op))

    @property
    def complex(self) -> int:
        """Cycles on the unit for other integers and functions."""
        return sum(n * COMPLEX_CYCLES.get(op, 0) for op, n in self.opcodes.items())

    @property
    def threadgroup(self) -> float:
        """Cycles of threadgroup memory if each SIMD unit of a core runs this loop."""
        moved = self.lane_bytes["local_load"] + self.lane_bytes["local_store"]
        return SIMD_UNITS * LANES * moved / THREADGROUP_BYTES

    @property
    def device(self) -> float:
        """Like `threadgroup`, for the cache of device memory, which also holds spilled values."""
        moved = sum(n for op, n in self.lane_bytes.items() if not op.startswith("local_"))
        return SIMD_UNITS * LANES * moved / DEVICE_BYTES

    @property
    def cycles(self) -> float:
        return max(self.arithmetic, self.complex, self.threadgroup, self.device)


@dataclass(frozen=True)
class Listing:
    """The driver's report on a kernel.

    Attributes: halves: registers of 16 bits per thread without spilling. threads: threads per core,
    limited by the registers. scratch: bytes of private memory per thread. threadgroup: bytes of
    threadgroup memory. code: bytes.
    """

    halves: int
    threads: int
    scratch: int
    threadgroup: int
    code: int
    blocks: list[Block]

    def opcodes(self) -> Counter[str]:
        return sum((block.opcodes for block in self.blocks), Counter[str]())

    def loops(self) -> Iterator[Loop]:
        """Each loop, from the block where it is entered to the block that jumps back."""
        starts = [*(block.start for block in self.blocks), self.blocks[0].start + self.code]
        for last, block in enumerate(self.blocks):
            for first in block.followers:
                if first <= last:
                    inside = self.blocks[first : last + 1]
                    yield Loop(
                        blocks=range(first, last + 1),
                        code=starts[last + 1] - starts[first],
                        opcodes=sum((one.opcodes for one in inside), Counter[str]()),
                        lane_bytes=sum((one.lane_bytes for one in inside), Counter[str]()),
                    )


def parse(text: str) -> Listing:
    """Parse the driver's output: numbers by name, blocks, and their instructions, indented."""
    numbers: dict[str, int] = {}
    blocks: list[Block] = []
    for line in text.split("\n"):
        words = line.split()
        if line.startswith("block "):
            blocks.append(Block(int(words[3]), [int(word) for word in words[4:]]))
        elif line.startswith(" "):
            blocks[-1].opcodes[words[0]] += 1
            if len(words) > 1:
                blocks[-1].lane_bytes[words[0]] += int(words[1])
        elif len(words) == 2:
            numbers[words[0]] = int(words[1])
    return Listing(blocks=blocks, **numbers)
