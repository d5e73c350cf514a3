"""The file for the machine with the GPU: programs, launches, contents and faults, as plain data."""

import lzma
import pickle
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Program:
    """One kernel. slots: the [[buffer(i)]] of each of the entry's parameters."""

    ptx: str
    entry: str
    slots: list[int]


@dataclass(frozen=True)
class Dispatch:
    """One launch. buffers: {slot: (tensor, offset in bytes)}. constants: {slot: bytes}."""

    program: str
    threadgroups: tuple[int, ...]
    group_size: tuple[int, ...]
    buffers: dict[int, tuple[str, int]]
    constants: dict[int, bytes]


@dataclass(frozen=True)
class Noise:
    """Numbers from -2 to 2 that both machines make from a seed, to keep the file small."""

    seed: int
    dtype: str
    count: int

    def data(self) -> bytes:
        """The numbers. The stream of RandomState is the same in every version of numpy."""
        steps = np.random.RandomState(self.seed).randint(-(2**15), 2**15, self.count, np.int16)
        numbers = (steps / 2**14).astype(np.float32)
        if self.dtype == "bfloat16":
            return (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        return numbers.astype(self.dtype).tobytes()


@dataclass(frozen=True)
class Fault:
    """tensor: the tensor that is too short (memcheck) or never written (initcheck)."""

    tool: str
    what: str
    tensor: str = ""


@dataclass(frozen=True)
class Problem:
    """expected: dtype and bytes of each result. scratch: bytes of each tensor without contents."""

    name: str
    dtype: str
    dispatches: list[Dispatch]
    inputs: dict[str, bytes | Noise]
    expected: dict[str, tuple[str, bytes]]
    scratch: dict[str, int]
    kernel: str = ""
    fault: Fault | None = None


@dataclass
class Packed:
    programs: dict[str, Program] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def write(self, path: Path) -> None:
        with lzma.open(path, "wb") as file:
            pickle.dump(self, file)


def read(path: Path) -> Packed:
    """The contents of the decompressed file. Every run of a tool reads it again."""
    packed = pickle.loads(path.read_bytes())
    assert isinstance(packed, Packed)
    return packed
