"""Planted faults that compute-sanitizer must find in every kernel."""

from collections.abc import Iterator
from dataclasses import replace

from bench.front_end import Source

from .packed import Dispatch, Fault, Packed, Problem

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
# A barrier for half of a SIMD group that both halves reach. No thread waits forever.
FOREIGN = f"""__asm__ volatile("bar.warp.sync 0xffff;" ::: "memory"); {BARRIER}"""
# The text that replaces each barrier.
BARRIER_FAULTS = {
    "": Fault("racecheck", "threadgroup barriers are removed"),
    FOREIGN: Fault("synccheck", "lanes reach a barrier that excludes them"),
}


def _memory_faults(dispatch: Dispatch, inputs: set[str], outputs: set[str]) -> Iterator[Fault]:
    bound = [name for name, _ in dispatch.buffers.values()]
    for tool, what, names in (
        ("memcheck", "a result has half of its memory", outputs),
        ("initcheck", "an input was never written", inputs - outputs),
    ):
        bound_names = [name for name in bound if name in names]
        if bound_names:
            yield Fault(tool, what, bound_names[0])


def plant(packed: Packed, sources: dict[str, Source]) -> Iterator[Problem]:
    """A problem for each kernel and tool; sources to compile are added to `sources`."""
    known: set[tuple[str, str]] = set()
    for problem in list(packed.problems):
        inputs, outputs = set(problem.inputs), set(problem.expected)
        for index, dispatch in enumerate(problem.dispatches):
            source = sources[dispatch.program]
            faults = [(fault, source) for fault in _memory_faults(dispatch, inputs, outputs)]
            outputs -= {name for name, _ in dispatch.buffers.values()}
            if "bar.sync" in packed.programs[dispatch.program].ptx:
                for barrier, fault in BARRIER_FAULTS.items():
                    text = source.text.replace(BARRIER, barrier)
                    faults.append((fault, replace(source, text=text)))
            for fault, faulty in faults:
                if (source.kernel, fault.tool) not in known:
                    known.add((source.kernel, fault.tool))
                    sources[faulty.name] = faulty
                    last = replace(dispatch, program=faulty.name)
                    yield replace(
                        problem,
                        name=f"fault {fault.tool} {source.kernel}",
                        dispatches=[*problem.dispatches[:index], last],
                        expected={},
                        kernel=source.kernel,
                        fault=fault,
                    )
