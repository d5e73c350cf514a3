"""Planted faults: what compute-sanitizer must find in every kernel, or its silence says little."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .collect import Source
from .manifest import Dispatch

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
# A kernel beside others in its file which have some.
WITHOUT_BARRIERS = {"apply_causal_mask"}
# Half of the lanes of a SIMD group, by gpu_headers/__msl_engine.h.
DIVERGENT = f"if (__gpu_lane() % 2 == 0) {{ {BARRIER} }}"


@dataclass(frozen=True)
class TextFault:
    """A change of a kernel's text, and the tool that finds it."""

    tool: str
    what: str
    old: str
    new: str

    def plant(self, source: Source) -> Source | None:
        """The faulty source, or None if there is nothing to change."""
        if self.old not in source.text or source.kernel in WITHOUT_BARRIERS:
            return None
        return replace(source, text=source.text.replace(self.old, self.new))


TEXT_FAULTS = (
    TextFault("racecheck", "no barriers of the threadgroup", BARRIER, ""),
    TextFault("synccheck", "barriers in half of the lanes", BARRIER, DIVERGENT),
)


@dataclass(frozen=True)
class MemoryFault:
    """A tensor that is not what the kernel expects: too short, or never written."""

    tool: str
    what: str


SHORT = MemoryFault("memcheck", "half of the memory of a result")
UNWRITTEN = MemoryFault("initcheck", "an input that nothing has been written to")


def memory_faults(
    dispatch: Dispatch, inputs: set[str], outputs: set[str]
) -> Iterator[tuple[MemoryFault, str]]:
    """The faults of one launch, each with the name of its tensor."""
    bound = [name for name, _ in dispatch.buffers.values()]
    for fault, among in ((SHORT, outputs), (UNWRITTEN, inputs - outputs)):
        found = [name for name in bound if name in among]
        if found:
            yield fault, found[0]
