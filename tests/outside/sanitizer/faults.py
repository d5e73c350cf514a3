"""Planted faults: what compute-sanitizer must find in every kernel, or its silence says little."""

from collections.abc import Iterator
from dataclasses import replace

from bench.front_end import Source

from .packed import Dispatch, Fault, Packed, Problem

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
COMPILED_BARRIER = "bar.sync"
# A barrier of half a SIMD group that the other half reaches too. Nothing waits for ever.
FOREIGN = f"""__asm__ volatile("bar.warp.sync 0xffff;" ::: "memory"); {BARRIER}"""
# By the text that each barrier becomes.
BARRIER_FAULTS = {
    "": Fault("racecheck", "no barriers of the threadgroup"),
    FOREIGN: Fault("synccheck", "barriers of lanes that are not meant"),
}


def _memory_faults(dispatch: Dispatch, inputs: set[str], outputs: set[str]) -> Iterator[Fault]:
    bound = [name for name, _ in dispatch.buffers.values()]
    for tool, what, among in (
        ("memcheck", "half of the memory of a result", outputs),
        ("initcheck", "an input that nothing has been written to", inputs - outputs),
    ):
        found = [name for name in bound if name in among]
        if found:
            yield Fault(tool, what, found[0])


def planted(packed: Packed, sources: dict[str, Source]) -> Iterator[Problem]:
    """A problem for each kernel and tool, by way of the first small problem that can have it.

    Kernels without a barrier have no fault in barriers. What is to be compiled joins `sources`.
    """
    known: set[tuple[str, str]] = set()
    for problem in list(packed.problems):
        inputs, outputs = set(problem.inputs), set(problem.expected)
        for index, dispatch in enumerate(problem.dispatches):
            source = sources[dispatch.program]
            every = [(fault, source) for fault in _memory_faults(dispatch, inputs, outputs)]
            outputs -= {name for name, _ in dispatch.buffers.values()}
            if COMPILED_BARRIER in packed.programs[dispatch.program].ptx:
                for barrier, fault in BARRIER_FAULTS.items():
                    text = source.text.replace(BARRIER, barrier)
                    every.append((fault, replace(source, text=text)))
            for fault, faulty in every:
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
