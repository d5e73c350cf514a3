"""Counts of a kernel's inner loop per block of 32 keys or queries, from the simulator.

A count is the slope between two lengths, so that work done once per launch cancels.
"""

from collections.abc import Iterable

from torch_metal_attn.simulator import Counters

BLOCK = 32
LENGTHS = (96, 192)  # whole blocks of 32 and of 24 keys

_SIMDGROUP, _THREAD, _THREADGROUP = "a SIMD group", "a thread", "a threadgroup"
# {column: (the counter, its address space, the unit for which the counts are shown)}
_COLUMNS = {
    "MMA": ("matrix_operations", "", _SIMDGROUP),
    "products": ("tensor_operations", "", _SIMDGROUP),
    "tg loads": ("loads", "threadgroup", _THREAD),
    "tg loads (bytes)": ("load_bytes", "threadgroup", _THREAD),
    "tg stores": ("stores", "threadgroup", _THREAD),
    "device loads": ("loads", "device", _THREAD),
    "device loads (bytes)": ("load_bytes", "device", _THREAD),
    "converts": ("converts", "", _THREAD),
    "exps": ("exps", "", _THREAD),
    "functions": ("functions", "", _THREAD),
    "floats": ("float_operations", "", _THREAD),
    "integers": ("integer_operations", "", _THREAD),
    "addresses": ("addresses", "", _THREAD),
    "selects": ("selects", "", _THREAD),
    "shuffles": ("shuffles", "", _SIMDGROUP),
    "SIMD barriers": ("simdgroup_barriers", "", _SIMDGROUP),
    "barriers": ("threadgroup_barriers", "", _THREADGROUP),
}
# The columns of a loop on 8x8 matrices.
COLUMNS = tuple(name for name in _COLUMNS if name != "products")


def slopes(
    counted: Iterable[Counters],
    simdgroups: float,
    columns: Iterable[str] = COLUMNS,
    blocks: float = (LENGTHS[1] - LENGTHS[0]) / BLOCK,
) -> dict[str, float]:
    """Counts per block and SIMD group. counted: the counters of two lengths, `blocks` apart."""
    short, long = counted
    instances = {
        _SIMDGROUP: simdgroups,
        _THREAD: simdgroups * 32,
        _THREADGROUP: long.threadgroups,
    }

    def slope(counter: str, space: str, whose: str) -> float:
        values = [getattr(counters, counter) for counters in (short, long)]
        first, last = (value[space] for value in values) if space else values
        assert first is not None, "the kernel was not built with count=True"
        return float(last - first) / (blocks * instances[whose])

    return {name: slope(*_COLUMNS[name]) for name in columns}
