"""What is packed for the machine with the GPU, as plain data: programs, dispatches and problems."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

NO_LIMIT = 255  # of registers a thread may use

OURS = "this project"  # a party


@dataclass
class Program:
    """One PTX file with one kernel.

    slots: the [[buffer(i)]] of each of the entry's parameters.
    limits: the numbers of registers to assemble it for.
    """

    name: str
    entry: str
    slots: list[int]
    limits: list[int]


@dataclass
class Dispatch:
    """One launch.

    buffers: for each slot the name of the tensor and the byte at which the argument begins.
    constants: for each slot the bytes of the argument, in hexadecimal digits.
    """

    program: str
    threadgroups: list[int]
    group_size: list[int]
    buffers: dict[int, tuple[str, int]]
    constants: dict[int, str] = field(default_factory=dict)


@dataclass
class Candidate:
    """One way to solve a problem: dispatches in order.

    party: whose kernels. label: which of the party's ways. scratch: bytes of each tensor that only
    the dispatches use.
    """

    party: str
    label: str
    dispatches: list[Dispatch]
    scratch: dict[str, int] = field(default_factory=dict)


@dataclass
class Problem:
    """What all candidates compute, from tensors of the same names: q, k, v, out and so on."""

    name: str
    kind: str
    sizes: dict[str, Any]
    candidates: list[Candidate] = field(default_factory=list)


@dataclass
class Manifest:
    """All of a folder."""

    programs: dict[str, Program] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """To FOLDER/manifest.json."""
        (folder / "manifest.json").write_text(json.dumps(asdict(self), indent=1))


def _dispatch(data: dict[str, Any]) -> Dispatch:
    buffers = {int(slot): (name, offset) for slot, (name, offset) in data["buffers"].items()}
    constants = {int(slot): digits for slot, digits in data["constants"].items()}
    return Dispatch(**{**data, "buffers": buffers, "constants": constants})


def _candidate(data: dict[str, Any]) -> Candidate:
    return Candidate(**{**data, "dispatches": [*map(_dispatch, data["dispatches"])]})


def read(folder: Path) -> Manifest:
    """From FOLDER/manifest.json."""
    data = json.loads((folder / "manifest.json").read_text())
    problems = [
        Problem(**{**problem, "candidates": [*map(_candidate, problem["candidates"])]})
        for problem in data["problems"]
    ]
    programs = {name: Program(**program) for name, program in data["programs"].items()}
    return Manifest(programs, problems)
