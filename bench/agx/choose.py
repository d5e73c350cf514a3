"""Chooses the tile of a class of problems by the code that Mesa's compiler generates."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import torch

from bench.front_end import Source

from . import model
from .candidates import DTYPES, Class, Tile, candidates, specialisation
from .lens import Compiled, Failure

MOST_REGISTERS = 118  # of 128: the compiler's registers may be off by 10
# A tile is preferred to a faster one if it keeps at least RESIDENT SIMD groups per core and takes
# at most CYCLES per product: more SIMD groups hide latencies that the model does not know.
RESIDENT = {"FLASH_FWD": 16, "FLASH_BWD_DQ": 12, "FLASH_BWD_DKV": 12}
RESIDENT_NARROW = 24  # for a forward of up to 64 columns
CYCLES = {"FLASH_FWD": 23.0, "FLASH_BWD_DQ": 24.0, "FLASH_BWD_DKV": 24.0}
MORE_CYCLES = 1.5  # allowed in addition for bfloat16, which must be converted
# Bytes of device memory per cycle and core: the minimum that a decode of up to 8 queries should
# request, and the maximum that M1 to M2 Ultra deliver.
BYTES, MEMORY_BYTES = 16, 10
ALIKE = 1.01  # times within 1 % count as equal
# A tile that takes WORTH times the best one without a feature is not compiled with features, except
# the FEWEST tiles with the fewest registers.
WORTH, FEWEST = 1.35, 4
ACCEPTED_LOSS = 1.15  # times the best time, for rows in registers or more SIMD groups
LENGTH = 512  # assumed keys or queries; a block that does not divide LENGTH computes more
# Up to ROUNDS times, the next AT_ONCE candidates are compiled with all features, until one fits.
AT_ONCE, ROUNDS = 5, 3

Compile = Callable[[Iterable[Source]], Iterator[Compiled | Failure]]
Probe = tuple[torch.dtype, str]


class Candidate(NamedTuple):
    """A tile, and its compiled kernels with each dtype and feature so far."""

    problems: Class
    tile: Tile
    results: dict[Probe, Compiled]

    @property
    def registers(self) -> float:
        return max(compiled.demand for compiled in self.results.values())

    @property
    def fits(self) -> bool:
        # Threadgroups of over 384 threads leave a thread fewer registers.
        spilled = any(compiled.spills for compiled in self.results.values())
        return self.registers <= MOST_REGISTERS and not spilled

    @property
    def cost(self) -> float:
        return sum(cost(self.problems, self.tile, compiled) for compiled in self.results.values())

    @property
    def resident(self) -> int:
        return min(compiled.resident for compiled in self.results.values())

    @property
    def meets_targets(self) -> bool:
        """True if the tile keeps enough SIMD groups with each feature, and is fast without one."""
        macro, narrow = self.problems.macro, self.problems.columns <= 64
        plain = {dtype: x for (dtype, feature), x in self.results.items() if feature == "none"}
        if macro == "FLASH_DECODE":
            few = self.problems.queries <= 8
            return not few or all(model.bytes_a_cycle(x) >= BYTES for x in plain.values())
        if macro == "FLASH_BWD_BIAS":
            return True
        wanted = RESIDENT_NARROW if macro == "FLASH_FWD" and narrow else RESIDENT[macro]
        return self.resident >= wanted and all(
            model.cycles_a_product(x) <= CYCLES[macro] + MORE_CYCLES * (dtype == torch.bfloat16)
            for dtype, x in plain.items()
        )

    @property
    def preference(self) -> tuple[float, ...]:
        """A sort key for tiles that take equally long: the smallest is best."""
        knob_values = self.problems.named(self.tile)
        # The fewer SIMD groups share a decode's columns, the fewer wait for each other.
        group = (knob_values.get("VECTOR_ROWS", 0), knob_values.get("SPANS", 0), self.resident)
        return (*(-number for number in group), self.registers)

    @property
    def reloads_rows(self) -> bool:
        """True if query or key rows are read again for every block, as no cache holds them."""
        knob_values = self.problems.named(self.tile)
        places = {"Q_IN_REGISTERS", "ROWS_IN_REGISTERS", "ROWS_IN_THREADGROUP"} & knob_values.keys()
        return bool(places) and not any(knob_values[name] for name in places)

    @property
    def reloads_keys(self) -> bool:
        knob_values = self.problems.named(self.tile)
        return self.problems.macro == "FLASH_DECODE" and any(
            passes(self.problems, knob_values, compiled) > 1 for compiled in self.results.values()
        )


def cost(problems: Class, tile: Tile, compiled: Compiled) -> float:
    """Cycles of a SIMD unit for 8 queries and 8 keys; for a decode, for 1 KB of keys and values."""
    knob_values = problems.named(tile)
    if problems.macro == "FLASH_DECODE":
        # Memory is the limit: requesting more gains nothing. Each pass reads the keys again.
        times = passes(problems, knob_values, compiled)
        most = BYTES if times == 1 else MEMORY_BYTES
        # The listing has the loads of all SIMD groups that share the keys.
        read = model.bytes_a_cycle(compiled) / row_simdgroups(problems, knob_values, compiled)
        return 1024 * times / min(read, most)
    rows, shared = knob_values.get("ROW_FRAGMENTS", 1), knob_values.get("COLUMN_SIMDGROUPS", 1)
    # Each slice computes the scores again.
    slices = -(-problems.head_dim // (knob_values.get("SLICE") or knob_values["V_SLICE"]))
    block = knob_values.get("BLOCK") or knob_values["BLOCK_K"]
    rounded = -(-LENGTH // block) * block / LENGTH
    return slices * shared * model.iteration(compiled) * rounded / (rows * block / 8)


def row_simdgroups(problems: Class, knob_values: Mapping[str, int], compiled: Compiled) -> int:
    """SIMD groups of a decode's threadgroup with the same columns of different rows."""
    columns = -(-problems.head_dim // (32 * knob_values["SPANS"]))
    return compiled.threads_per_group // (32 * columns) if columns > 1 else 1


def passes(problems: Class, knob_values: Mapping[str, int], compiled: Compiled) -> int:
    """How often a decode's threadgroup reads its keys."""
    rows = 8 * knob_values["ROW_FRAGMENTS"] * row_simdgroups(problems, knob_values, compiled)
    return -(-problems.queries // rows)


def best(compiled: Sequence[Candidate]) -> Candidate:
    """The fastest tile that fits; if none does, the tile with the fewest registers."""
    fitting = [candidate for candidate in compiled if candidate.fits]
    if not fitting:
        return min(compiled, key=lambda candidate: candidate.registers)
    best_kind = min(_by_kind(fitting).items())[1]
    lowest = min(candidate.cost for candidate in best_kind)
    return min((x for x in best_kind if x.cost <= ALIKE * lowest), key=lambda x: x.preference)


def choose(problem_classes: Sequence[Class], compile_: Compile) -> dict[Class, Candidate]:
    """The best tile of each class that a candidate can run."""
    plain, heaviest, others = {}, {}, {}
    for problems in problem_classes:
        first, last = DTYPES[problems.bits][0], DTYPES[problems.bits][-1]
        plain[problems] = [(first, problems.features[0])]
        heaviest[problems] = [(last, problems.features[1])]
        others[problems] = [*product(DTYPES[problems.bits], problems.features)]
    tried = [Candidate(x, tile, {}) for x in problem_classes for tile in candidates(x)]
    order = {}
    for probes in (plain, heaviest):
        order = _by_class(_compiled(tried, probes, compile_))
        print(sum(map(len, order.values())), "candidates of", len(order), "classes", flush=True)
        tried = [candidate for group in order.values() for candidate in _worth_compiling(group)]
    order = _by_class(tried)
    chosen: dict[Class, Candidate] = {}
    for number in range(ROUNDS):
        tried = [
            candidate
            for problems, group in order.items()
            if problems not in chosen or not chosen[problems].fits
            for candidate in group[number * AT_ONCE : (number + 1) * AT_ONCE]
        ]
        results = _by_class(_compiled(tried, others, compile_))
        for problems, group in results.items():
            chosen[problems] = best([*group, *([chosen[problems]] if problems in chosen else [])])
    return {problems: chosen[problems] for problems in problem_classes if problems in chosen}


def measured(problems: Class, tiles: Iterable[Tile], compile_: Compile) -> list[Candidate]:
    """Tiles compiled with all features of a class; those that do not compile have no results."""
    tried = [Candidate(problems, tile, {}) for tile in tiles]
    probes = {problems: [*product(DTYPES[problems.bits], problems.features)]}
    results = {candidate.tile: candidate for candidate in _compiled(tried, probes, compile_)}
    return [results.get(candidate.tile, candidate) for candidate in tried]


def _by_class(group: Iterable[Candidate]) -> dict[Class, list[Candidate]]:
    results: dict[Class, list[Candidate]] = {}
    for candidate in group:
        results.setdefault(candidate.problems, []).append(candidate)
    return results


def _worth_compiling(group: Sequence[Candidate]) -> list[Candidate]:
    fitting = [candidate for candidate in group if candidate.fits]
    if not fitting:
        return sorted(group, key=lambda candidate: candidate.registers)
    fewest = sorted(fitting, key=lambda candidate: candidate.registers)[:FEWEST]
    results = []
    for _, alike in sorted(_by_kind(fitting).items()):
        results += sorted(alike, key=lambda candidate: (candidate.cost, candidate.preference))
    lowest = min(candidate.cost for candidate in fitting)
    return [x for x in results if x.cost <= WORTH * lowest or x in fewest]


def _by_kind(fitting: Sequence[Candidate]) -> dict[tuple[bool, ...], list[Candidate]]:
    """Tiles by kind; the smallest key is the best kind."""
    lowest = min(candidate.cost for candidate in fitting)
    results: dict[tuple[bool, ...], list[Candidate]] = {}
    for candidate in fitting:
        slow = candidate.cost > ACCEPTED_LOSS * lowest
        kind = (candidate.reloads_keys, slow, candidate.reloads_rows, not candidate.meets_targets)
        results.setdefault(kind, []).append(candidate)
    return results


def _compiled(
    tried: Iterable[Candidate], probes: Mapping[Class, Sequence[Probe]], compile_: Compile
) -> Iterator[Candidate]:
    """The candidates that compile, with the results of their probes."""
    jobs: dict[str, Source] = {}
    wanted: list[tuple[Candidate, dict[Probe, str]]] = []
    for candidate in tried:
        names: dict[Probe, str] = {}
        for probe in probes[candidate.problems]:
            if probe in candidate.results:
                continue
            if job := specialisation(candidate.problems, *probe, candidate.tile):
                names[probe] = job.name
                jobs.setdefault(job.name, job)
        wanted.append((candidate, names))
    print(len(jobs), "kernels", flush=True)
    results = dict(zip(jobs, compile_(jobs.values()), strict=True))
    for candidate, names in wanted:
        more = {probe: results[name] for probe, name in names.items()}
        usable = {p: f for p, f in more.items() if isinstance(f, Compiled) and f.main}
        together = candidate.results | usable
        if together and usable.keys() == more.keys():
            yield candidate._replace(results=together)
