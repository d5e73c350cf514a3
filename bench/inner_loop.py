"""What a kernel's inner loop does, by the simulator: per thread, per 32 keys and 8 query rows.

A count is the slope between two key lengths, so that work done once per launch cancels. Memory
instructions and arithmetic are those of the source after -O1, per thread; matrix operations,
shuffles and SIMD-group barriers are per SIMD group, barriers per threadgroup. See `Counters`.
"""

from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import ClassVar

from torch_metal_attn.simulator import Counters

KEYS, ROWS = 32, 8
LENGTHS = (96, 192)  # whole blocks of 32 and of 24 keys


@dataclass(frozen=True)
class InnerLoop:
    """Counts per 32 keys and 8 query rows, in the order of the table's columns."""

    matrix_operations: float
    threadgroup_loads: float
    threadgroup_load_bytes: float
    threadgroup_stores: float
    device_loads: float
    device_load_bytes: float
    converts: float
    exps: float
    functions: float
    float_operations: float
    integer_operations: float
    addresses: float
    selects: float
    shuffles: float
    simdgroup_barriers: float
    barriers: float

    HEADINGS: ClassVar = (
        *("MMA", "tg loads", "(bytes)", "tg stores", "device loads", "(bytes)"),
        *("converts", "exps", "functions", "floats", "integers", "addresses", "selects"),
        *("shuffles", "SIMD barriers", "barriers"),
    )

    @property
    def loads(self) -> float:
        """Loads of either address space."""
        return self.threadgroup_loads + self.device_loads

    def cells(self) -> list[str]:
        """The values, formatted."""
        return [f"{value:.4g}" for value in astuple(self)]


def counted(operations: int | None) -> int:
    """A counter that only builds that count have."""
    assert operations is not None, "the kernel was not built with count=True"
    return operations


def measure(run: Callable[[int], Counters], q_length: int) -> InnerLoop:
    """The slope of `run`, which runs a kernel at a key length and returns its counters.

    `run` has one head of `q_length` queries, all of them full tiles that see every key.
    """
    short, long = (run(length) for length in LENGTHS)
    blocks = (LENGTHS[1] - LENGTHS[0]) / KEYS
    row_blocks = q_length / ROWS  # what one SIMD group does for 8 rows

    def slope(count: Callable[[Counters], int], instances: float) -> float:
        return (count(long) - count(short)) / (blocks * instances)

    def per_thread(count: Callable[[Counters], int]) -> float:
        return slope(count, row_blocks * 32)

    return InnerLoop(
        matrix_operations=slope(lambda c: c.matrix_operations, row_blocks),
        threadgroup_loads=per_thread(lambda c: c.loads["threadgroup"]),
        threadgroup_load_bytes=per_thread(lambda c: c.load_bytes["threadgroup"]),
        threadgroup_stores=per_thread(lambda c: c.stores["threadgroup"]),
        device_loads=per_thread(lambda c: c.loads["device"]),
        device_load_bytes=per_thread(lambda c: c.load_bytes["device"]),
        converts=per_thread(lambda c: c.converts),
        exps=per_thread(lambda c: c.exps),
        functions=per_thread(lambda c: counted(c.functions)),
        float_operations=per_thread(lambda c: counted(c.float_operations)),
        integer_operations=per_thread(lambda c: counted(c.integer_operations)),
        addresses=per_thread(lambda c: counted(c.addresses)),
        selects=per_thread(lambda c: counted(c.selects)),
        shuffles=slope(lambda c: c.shuffles, row_blocks),
        simdgroup_barriers=slope(lambda c: c.simdgroup_barriers, row_blocks),
        barriers=slope(lambda c: c.threadgroup_barriers, long.threadgroups),
    )
