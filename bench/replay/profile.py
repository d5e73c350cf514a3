"""Each kernel of FOLDER once at 128 registers, for a profiler such as NVIDIA's `ncu`; no times.

Decoding runs on the part of the GPU that it was chosen for.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from . import attention, decode, manifest, timing
from .driver import Programs, part_of_gpu, synchronise
from .manifest import OURS_FLOAT, Candidate, Problem

WHOLE = decode.PARTS[-1]


def run(programs: Programs, candidate: Candidate, tensors: Mapping[str, Tensor], part: int) -> None:
    """The candidate's launches, on so many multiprocessors."""
    scratch = {
        name: torch.empty(max(size, 16), dtype=torch.uint8, device="cuda")
        for name, size in candidate.scratch.items()
    }
    pointers = {name: tensor.data_ptr() for name, tensor in {**tensors, **scratch}.items()}
    stream = part_of_gpu(part) if part < WHOLE else None
    for launch in timing.launches(programs, candidate, timing.M1_REGISTERS, pointers):
        launch.enqueue(stream)
    synchronise(stream)


def decoding(programs: Programs, problem: Problem, parts: list[int]) -> None:
    """What the op chooses for each part."""
    copies, exact = decode.make(problem.sizes)
    results = {"out": torch.empty_like(exact).half(), "lse": exact.new_empty(len(exact)).float()}
    for candidate in problem.candidates:
        for part in parts:
            if candidate.label == f"{decode.CHOSEN} {part} cores":
                run(programs, candidate, copies[-1] | results, part)


def main() -> None:
    """Run everything that the folder has."""
    parser = argparse.ArgumentParser(prog="bench.replay.profile", description=__doc__)
    parser.add_argument("folder", type=Path, help="with the programs, assembled")
    parser.add_argument("--parts", type=int, nargs="*", default=[16, WHOLE], help="of decoding")
    arguments = parser.parse_args()
    torch.zeros(1, device="cuda")
    contents = manifest.read(arguments.folder)
    programs = Programs(arguments.folder, contents)
    for problem in contents.problems:
        if problem.kind == "decode":
            decoding(programs, problem, arguments.parts)
        elif problem.kind != "copy":
            tensors = attention.make(problem.sizes)
            for candidate in problem.candidates:
                if candidate.party != OURS_FLOAT:
                    run(programs, candidate, tensors, WHOLE)
        print(problem.name, flush=True)


if __name__ == "__main__":
    main()
