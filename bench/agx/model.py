"""The time of a loop on a core of M1 and M2, as docs/design/tiles.md explains it."""

from .lens import Compiled
from .listing import LANES, PRODUCT_CYCLES, SIMD_UNITS, Loop

# Cycles of an instruction whose result the next one needs. In mixes like these loops the throughput
# is 1.02 cycles, and 2.75 to 4.5 with one SIMD group per unit and 3 to 4 independent instructions.
DEPENDENT_CYCLES = 4
# Latency of memory, once after each barrier and once per iteration. An assumption.
MEMORY_WAIT = 400


def alone(loop: Loop) -> float:
    """Cycles of one iteration if a SIMD unit has one SIMD group."""
    products = PRODUCT_CYCLES * loop.products
    waits = MEMORY_WAIT * (1 + loop.opcodes["threadgroup_barrier"])
    return products + DEPENDENT_CYCLES * (loop.arithmetic - products) + waits


def iteration(compiled: Compiled) -> float:
    """Cycles of a SIMD unit per iteration of the main loop and SIMD group."""
    loop = compiled.main
    assert loop is not None, "the kernel has no matrix product in a loop"
    groups = max(compiled.resident / SIMD_UNITS, 1 / SIMD_UNITS)
    return max(loop.cycles, alone(loop) / groups)


def cycles_a_product(compiled: Compiled) -> float:
    """Cycles of an iteration per product of 8x8 matrices."""
    assert compiled.main is not None
    return iteration(compiled) / compiled.main.products


def share_of_limit(compiled: Compiled) -> float:
    return PRODUCT_CYCLES / cycles_a_product(compiled)


def bytes_a_cycle(compiled: Compiled) -> float:
    """Bytes of device memory that the main loop requests per cycle and core."""
    assert compiled.main is not None
    loaded = SIMD_UNITS * LANES * compiled.main.lane_bytes["device_load"]
    return loaded / iteration(compiled)
