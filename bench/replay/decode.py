"""Times of decoding beside the peers', on parts of the GPU, as a share of a copy's speed.

For each number of multiprocessors: what the op chooses for a GPU of so many cores, the best number
of splits and registers (at most 128, and any), and the peers. The caches are as many copies as no
level of cache can hold. Every result is compared with float64.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import manifest
from .driver import Launch, Programs, part_of_gpu, synchronise
from .manifest import NO_LIMIT, OURS, Candidate, Problem

# Labels of this project's candidates begin or end so.
CHOSEN, SPLITS = "chosen for", "splits"
PARTS = (16, 32, 64, 132)
TOTAL_BYTES = 1_200_000_000
MOST_COPIES = 48
# Relative to the largest number of the result: weights and results are rounded to float16.
ALLOWED_ERROR = 2**-9
M1_REGISTERS = 128  # of a thread, on M1 and M2


@dataclass
class Time:
    """One candidate on a part of the GPU."""

    problem: str
    multiprocessors: int
    party: str
    label: str
    registers: int
    us: float
    error: float
    copy_share: float


def launches_of(
    programs: Programs, candidate: Candidate, limit: int, pointers: Mapping[str, int]
) -> list[Launch]:
    """The candidate's dispatches, each for `limit` registers if it is assembled for that."""
    known = programs.manifest.programs
    return [
        Launch(programs, d, limit if limit in known[d.program].limits else NO_LIMIT, pointers)
        for d in candidate.dispatches
    ]


def limits(programs: Programs, candidate: Candidate) -> list[int]:
    """The numbers of registers that some dispatch is assembled for."""
    known = programs.manifest.programs
    return sorted({n for dispatch in candidate.dispatches for n in known[dispatch.program].limits})


def by_clock(copies: Sequence[Sequence[Launch]], stream: int, seconds: float = 0.006) -> float:
    """Microseconds on a part of the GPU: the least of three rounds, by the host's clock.

    copies: the same work on other memory, in rotation, so that no cache has it.
    """

    def run(count: int) -> float:
        begin = time.perf_counter()
        for index in range(count):
            for launch in copies[index % len(copies)]:
                launch.enqueue(stream)
        synchronise(stream)
        return (time.perf_counter() - begin) / count

    run(2)
    count = max(3, min(400, int(seconds / run(1))))
    return min(run(count) for _ in range(3)) * 1e6


def copy_speed(programs: Programs, problem: Problem, stream: int) -> float:
    """Bytes read and written a microsecond by the fastest copy."""
    size = problem.sizes["bytes"]
    x, out = (torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    pointers = {"q": x.data_ptr(), "out": out.data_ptr()}
    works = [launches_of(programs, c, NO_LIMIT, pointers) for c in problem.candidates]
    return max(2 * size / by_clock([work], stream, 0.02) for work in works)


def make(sizes: Mapping[str, Any]) -> tuple[list[dict[str, Tensor]], Tensor]:
    """Copies of q, the cache and what it needs, and out of the first of them in float64."""
    torch.manual_seed(0)
    heads, kv_heads, keys, head_dim = (sizes[n] for n in ("heads", "kv_heads", "keys", "head_dim"))
    shape = kv_heads, keys, head_dim
    count = -(-TOTAL_BYTES // (2 * kv_heads * keys * head_dim * 2))
    q = torch.randn(heads, head_dim, device="cuda").half()
    copies: list[dict[str, Tensor]] = []
    plain: dict[str, Tensor] = {}
    for _ in range(min(count, MOST_COPIES)):
        if sizes["cache"] == "q8_0":
            own = {
                n: torch.randint(-127, 128, shape, dtype=torch.int8, device="cuda") for n in "kv"
            }
            blocks = (kv_heads, keys, head_dim // 32)
            for name in "kv":
                scale = torch.rand(blocks, device="cuda").mul(0.008).half()
                own[f"{name}_scale"] = scale
                if not copies:
                    plain[name] = own[name] * scale.double().repeat_interleave(32, 2)
        else:
            own = {n: torch.randn(shape, device="cuda").half() for n in "kv"}
            if not copies:
                plain = dict(own)
            if sizes["cache"] == "paged":
                own = paged(own, sizes["page"])
        copies.append({"q": q, **own})
    scores = q.double().view(kv_heads, -1, head_dim) @ plain["k"].double().mT * head_dim**-0.5
    return copies, (scores.softmax(2) @ plain["v"].double()).view(heads, head_dim)


def paged(cache: Mapping[str, Tensor], page: int) -> dict[str, Tensor]:
    """The cache in pages that lie in no order."""
    kv_heads, keys, head_dim = cache["k"].shape
    table = torch.randperm(keys // page, device="cuda").int()
    pools = {}
    for name, tensor in cache.items():
        pages = tensor.view(kv_heads, -1, page, head_dim).transpose(0, 1)
        pools[name] = torch.empty_like(pages, memory_format=torch.contiguous_format)
        pools[name][table.long()] = pages
    used = torch.tensor([keys], dtype=torch.int32, device="cuda")
    return {**pools, "block_table": table, "seqused_k": used}


def groups(candidate: Candidate) -> int:
    """Threadgroups of the first launch."""
    x, y, z = candidate.dispatches[0].threadgroups
    return x * y * z


def measure(
    programs: Programs,
    problem: Problem,
    copies: Sequence[Mapping[str, Tensor]],
    exact: Tensor,
    parts: Mapping[int, int],
    speeds: Mapping[int, float],
) -> list[Time]:
    """Every candidate on each part that it has enough, and not too many, threadgroups for."""
    out = torch.empty(exact.shape, dtype=torch.float16, device="cuda")
    lse = torch.empty(exact.shape[0], device="cuda")
    size = sum(t.nbytes for n, t in copies[0].items() if n[0] in "kv")
    times = []
    for candidate in problem.candidates:
        scratch = {
            name: torch.empty(max(size_, 16), dtype=torch.uint8, device="cuda")
            for name, size_ in candidate.scratch.items()
        }
        shared = {"out": out, "lse": lse, **scratch}
        pointers = [{n: t.data_ptr() for n, t in {**copy, **shared}.items()} for copy in copies]
        for limit in limits(programs, candidate):
            launches = [launches_of(programs, candidate, limit, p) for p in pointers]
            for part, stream in parts.items():
                label = candidate.label
                if label.startswith(CHOSEN) and label != f"{CHOSEN} {part} cores":
                    continue
                if label.endswith(SPLITS) and not part / 2 <= groups(candidate) <= 64 * part:
                    continue
                out.fill_(torch.nan)
                torch.cuda.synchronize()
                for launch in launches[0]:
                    launch.enqueue(stream)
                synchronise(stream)
                error = float((out.double() - exact).abs().max() / exact.abs().max())
                us = by_clock(launches, stream)
                share = size / us / speeds[part]
                party = candidate.party
                times.append(Time(problem.name, part, party, label, limit, us, error, share))
                if not error <= ALLOWED_ERROR:
                    print(f"WRONG {times[-1]}", flush=True)
    return times


def rows(times: Sequence[Time], name: str) -> list[list[str]]:
    """The fastest of each kind on each part: us, share of a copy, registers, and which it is.

    This project's have at most 128 registers; once more with any number.
    """
    few = [t for t in times if t.registers <= M1_REGISTERS or t.party != OURS]
    kinds: dict[str, list[Time]] = {
        "ours, as it chooses": [t for t in few if t.label.startswith(CHOSEN)],
        "ours, best splits": [t for t in few if t.label.endswith(SPLITS)],
        "ours, best splits, any registers": [t for t in times if t.label.endswith(SPLITS)],
    }
    for party in sorted({t.party for t in times} - {OURS}):
        kinds[party] = [t for t in times if t.party == party]
    found = []
    for kind, among in kinds.items():
        cells = []
        for part in PARTS:
            here = [t for t in among if t.multiprocessors == part]
            if here:
                best = min(here, key=lambda t: t.us)
                which = "" if best.label.startswith(CHOSEN) else f", {best.label}"
                cells.append(f"{best.us:.0f} us, {100 * best.copy_share:.0f} %{which}")
        if cells:
            found.append([name.removeprefix("decode-"), kind, *cells])
    return found


def main() -> None:
    """Measure every problem of FOLDER on every part, and print a table."""
    parser = argparse.ArgumentParser(prog="bench.replay.decode", description=__doc__)
    parser.add_argument("folder", type=Path, help="with the programs, assembled")
    parser.add_argument("--save", type=Path, help="a JSON file for every time")
    arguments = parser.parse_args()
    torch.zeros(1, device="cuda")
    contents = manifest.read(arguments.folder)
    programs = Programs(arguments.folder, contents)
    parts = {count: part_of_gpu(count) for count in PARTS}
    properties = torch.cuda.get_device_properties(0)
    print(f"{properties.name}, {properties.multi_processor_count} SMs, torch {torch.__version__}\n")
    (copy,) = (p for p in contents.problems if p.kind == "copy")
    speeds = {part: copy_speed(programs, copy, stream) for part, stream in parts.items()}
    for part, speed in speeds.items():
        print(f"copy on {part} multiprocessors: {speed / 1e3:.0f} GB/s, read and written")
    print()
    times: list[Time] = []
    headings = ["cache, KV heads", "kernel", *(f"{part} SMs" for part in PARTS)]
    table = []
    for problem in contents.problems:
        if problem.kind == "decode":
            copies, exact = make(problem.sizes)
            found = measure(programs, problem, copies, exact, parts, speeds)
            times += found
            table += rows(found, problem.name)
            worst = max(t.error for t in found)
            print(f"{problem.name}: {len(found)} times, largest error {worst:.1e}", flush=True)
            del copies
            torch.cuda.empty_cache()
    print()
    for row in (headings, ["---"] * len(headings), *table):
        print(f"| {' | '.join(row)} |")
    if arguments.save:
        arguments.save.write_text(json.dumps([asdict(t) for t in times]))
    wrong = [t for t in times if not t.error <= ALLOWED_ERROR]
    if wrong:
        sys.exit(f"{len(wrong)} of {len(times)} results are wrong")


if __name__ == "__main__":
    main()
