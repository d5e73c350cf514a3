"""What a kernel's inner loop does: per thread, per 32 keys and 8 query rows, by the simulator.

A count is the slope between two key lengths, so what happens once a launch falls out. Memory
instructions, converts and exps are those of the source after -O1, per thread; matrix operations
and shuffles are per SIMD group, barriers per threadgroup.
"""

from collections.abc import Callable
from dataclasses import astuple, dataclass

from torch_metal_attn.simulator import Counters

KEYS, ROWS = 32, 8
LENGTHS = (128, 256)


@dataclass(frozen=True)
class InnerLoop:
    """Counts per 32 keys and 8 query rows, the columns of the table in order."""

    matrix_operations: float
    threadgroup_loads: float
    threadgroup_load_bytes: float
    threadgroup_stores: float
    device_loads: float
    device_load_bytes: float
    converts: float
    exps: float
    shuffles: float
    barriers: float

    HEADINGS = (
        "MMA",
        "tg loads",
        "(bytes)",
        "tg stores",
        "dev loads",
        "(bytes)",
        "converts",
        "exps",
        "shuffles",
        "barriers",
    )

    @property
    def loads(self) -> float:
        """Loads of either address space."""
        return self.threadgroup_loads + self.device_loads

    def cells(self) -> list[str]:
        return [f"{value:g}" for value in astuple(self)]


def measure(run: Callable[[int], Counters], rows_per_simdgroup: int) -> InnerLoop:
    """The slope of `run`, which runs the kernel at a key length and returns its counters.

    Every SIMD group must have `rows_per_simdgroup` queries to work on and see every key.
    """
    short, long = (run(length) for length in LENGTHS)
    blocks = (LENGTHS[1] - LENGTHS[0]) / KEYS
    fragments = rows_per_simdgroup / ROWS
    threadgroups = long.threadgroups

    def slope(count: Callable[[Counters], int], instances: float) -> float:
        return (count(long) - count(short)) / (blocks * instances)

    simdgroups = threadgroups * SIMDGROUPS * fragments
    threads = simdgroups * 32
    return InnerLoop(
        matrix_operations=slope(lambda c: c.matrix_operations, simdgroups),
        threadgroup_loads=slope(lambda c: c.loads["threadgroup"], threads),
        threadgroup_load_bytes=slope(lambda c: c.load_bytes["threadgroup"], threads),
        threadgroup_stores=slope(lambda c: c.stores["threadgroup"], threads),
        device_loads=slope(lambda c: c.loads["device"], threads),
        device_load_bytes=slope(lambda c: c.load_bytes["device"], threads),
        converts=slope(lambda c: c.converts, threads),
        exps=slope(lambda c: c.exps, threads),
        shuffles=slope(lambda c: c.shuffles, simdgroups),
        barriers=slope(lambda c: c.threadgroup_barriers, threadgroups),
    )


# SIMD groups a threadgroup, of our kernel and of both peers'.
SIMDGROUPS = 4
