"""Planted faults: what compute-sanitizer must find in every kernel, or its silence says little."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bench.replay.collect import Collection
from bench.replay.manifest import Candidate, Dispatch, Problem

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
COMPILED_BARRIER = "bar.sync"
# A barrier of half a SIMD group that the other half reaches too. Nothing waits for ever.
FOREIGN = f"""__asm__ volatile("bar.warp.sync 0xffff;" ::: "memory"); {BARRIER}"""


@dataclass(frozen=True)
class Fault:
    """A fault, the tool that finds it, and what it is made of.

    barrier: what the text has in place of each barrier. tensor: which is too short (memcheck) or
    never written (initcheck).
    """

    tool: str
    what: str
    barrier: str | None = None
    tensor: str = ""


BARRIER_FAULTS = (
    Fault("racecheck", "no barriers of the threadgroup", ""),
    Fault("synccheck", "barriers of lanes that are not meant", FOREIGN),
)


def _memory_faults(dispatch: Dispatch, inputs: set[str], outputs: set[str]) -> Iterator[Fault]:
    bound = [name for name, _ in dispatch.buffers.values()]
    for tool, what, among in (
        ("memcheck", "half of the memory of a result", outputs),
        ("initcheck", "an input that nothing has been written to", inputs - outputs),
    ):
        found = [name for name in bound if name in among]
        if found:
            yield Fault(tool, what, tensor=found[0])


def plant(collection: Collection, folder: Path) -> None:
    """Add a problem for each kernel and tool, by way of the first small problem that can have it.

    folder: the programs, compiled. Kernels without a barrier have no fault in barriers.
    """
    known: set[tuple[str, str]] = set()

    def add(problem: Problem, index: int, fault: Fault) -> None:
        (candidate,) = problem.candidates
        dispatch = candidate.dispatches[index]
        source = collection.sources[dispatch.program]
        if (source.kernel, fault.tool) in known:
            return
        known.add((source.kernel, fault.tool))
        if fault.barrier is not None:
            faulty = replace(source, text=source.text.replace(BARRIER, fault.barrier))
            dispatch = replace(dispatch, program=collection.add(faulty))
        dispatches = [*candidate.dispatches[:index], dispatch]
        sizes = {"kernel": source.kernel, "case": problem.name}
        sizes |= {"tool": fault.tool, "what": fault.what, "tensor": fault.tensor}
        planted = Problem(f"fault {fault.tool} {source.kernel}", "fault", sizes)
        planted.candidates = [Candidate("", "", dispatches, candidate.scratch)]
        collection.manifest.problems.append(planted)

    for problem in list(collection.manifest.problems):
        (candidate,) = problem.candidates
        inputs, outputs = set(problem.sizes["inputs"]), set(problem.sizes["dtypes"])
        for index, dispatch in enumerate(candidate.dispatches):
            for fault in _memory_faults(dispatch, inputs, outputs):
                add(problem, index, fault)
            outputs -= {name for name, _ in dispatch.buffers.values()}
            if COMPILED_BARRIER in (folder / f"{dispatch.program}.ptx").read_text():
                for fault in BARRIER_FAULTS:
                    add(problem, index, fault)
