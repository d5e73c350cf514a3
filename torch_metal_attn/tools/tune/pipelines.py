"""What torch tells of a kernel that Metal compiled."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from torch_metal_attn.runtime import shaders

# Our kernels promise how many threads they are launched with, which Metal then reports.
_PROMISE = re.compile(r",\s*max_total_threads_per_threadgroup\(THREADS\)")

# In the order of Pipeline's.
_TOLD = (
    "max_threads_per_threadgroup",
    "thread_execution_width",
    "static_thread_group_memory_length",
)


@dataclass(frozen=True)
class Pipeline:
    """A compiled kernel.

    Attributes: max_threads: the most that a threadgroup of it can have, without the promise of its
        size; it falls as a thread takes more registers. width: threads of a SIMD group.
        threadgroup_bytes: its own threadgroup memory.
    """

    max_threads: int
    width: int
    threadgroup_bytes: int

    def __str__(self) -> str:
        return (
            f"at most {self.max_threads} threads, SIMD groups of {self.width}, "
            f"{self.threadgroup_bytes} bytes of threadgroup memory"
        )


def compiled(kernel: str, defines: Mapping[str, str], *, promise: bool = False) -> Pipeline | None:
    """Compile one of our kernels for mps. None if this torch tells nothing of it.

    promise: with its promised number of threads, as it is launched. Raises RuntimeError if it does
    not compile.
    """
    if not hasattr(torch.mps, "compile_shader"):
        return None
    text = shaders.with_defines(shaders.source(kernel), defines)
    try:
        found = getattr(
            torch.mps.compile_shader(text if promise else _PROMISE.sub("", text)), kernel
        )
    except (RuntimeError, SyntaxError, AttributeError) as error:
        raise RuntimeError(f"it does not compile: {str(error).splitlines()[0]}") from error
    if not all(hasattr(found, name) for name in _TOLD):
        return None
    return Pipeline(*(getattr(found, name) for name in _TOLD))


def inspect(kernel: str, defines: Mapping[str, str], threads: int) -> tuple[Pipeline | None, str]:
    """A kernel's pipeline, and why it cannot be launched with so many threads; "" if it can."""
    try:
        pipeline = compiled(kernel, defines)
        if pipeline is None or pipeline.max_threads >= threads:
            return pipeline, ""
        # With the promise the compiler may take fewer registers.
        promised = compiled(kernel, defines, promise=True)
    except RuntimeError as error:
        return None, str(error)
    if promised is None or promised.max_threads >= threads:
        return pipeline, ""
    most = promised.max_threads
    return pipeline, f"a threadgroup of it has {threads} threads and can have at most {most}"
