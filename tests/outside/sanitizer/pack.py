"""Writes the small problems to a file: programs, inputs, expected results and planted faults."""

import argparse
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor

from bench.front_end import Source, clang, front_end, source_of
from torch_metal_attn import simulate
from torch_metal_attn.simulator import RecordedLaunch

from . import cases, faults
from .packed import Dispatch, Noise, Packed, Problem, Program

PTX = ["--target=nvptx64-nvidia-cuda", "-march=sm_90", "-nocudalib"]
PTX += ["-Xclang", "-target-feature", "-Xclang", "+ptx80"]


def compile_ptx(source: Source) -> Program:
    """PTX for sm_90: one entry, with a 64-bit device address for each buffer."""
    ir, entry = front_end(source, "nvptx_kernel, flatten", PTX)
    # Buffers in constant memory are passed by address, like other buffers.
    ir = ir.replace("addrspace(4)", "addrspace(1)")
    ptx = clang([*PTX, "-x", "ir", "-O3", "-S", "-", "-o", "-"], ir)
    # LLVM writes a modifier that ptxas refuses with this type.
    ptx = re.sub(r"(setp\.\w+)\.ftz(\.bf16)", r"\1\2", ptx)
    ptx, count = re.subn(
        rf"(\.entry {entry.symbol}\([^)]*\)\s*(?://[^\n]*\n\s*)?)\{{",
        lambda match: f"{match.group(1)}\n.maxntid {source.threads}, 1, 1\n{{",
        ptx,
    )
    assert count == 1, "the PTX must have exactly one entry of the kernel"
    return Program(ptx, entry.symbol, entry.buffers)


def contents(tensor: Tensor) -> bytes:
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return whole.numpy().tobytes()


def names_of_storages(tensors: Mapping[str, Tensor]) -> dict[int, str]:
    return {tensor.untyped_storage().data_ptr(): name for name, tensor in tensors.items()}


def inputs(tensors: Mapping[str, Tensor]) -> dict[str, bytes | Noise]:
    """The bytes of each storage. Seeded noise replaces random inputs, which do not compress."""
    stored: dict[str, bytes | Noise] = {}
    for name in names_of_storages(tensors).values():
        tensor = tensors[name]
        whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        stored[name] = contents(tensor)
        if whole.is_floating_point() and whole.itemsize > 1 and len(whole) > 256:
            if abs(whole.float().mean()) < 0.2 and 0.7 < whole.float().std() < 1.3:
                noise = Noise(len(stored) - 1, str(whole.dtype).removeprefix("torch."), len(whole))
                data = torch.frombuffer(bytearray(noise.data()), dtype=torch.uint8)
                whole.view(torch.uint8).copy_(data)
                stored[name] = noise
    return stored


def dispatch(
    launch: RecordedLaunch, names: dict[int, str], sizes: dict[str, int], sources: dict[str, Source]
) -> Dispatch:
    """names: {address: storage}. New storages are added to it, and all bytes to `sizes`."""
    buffers = {}
    for buffer in launch.buffers:
        storage = buffer.storage.untyped_storage()
        name = names.setdefault(storage.data_ptr(), f"scratch{len(names)}")
        sizes[name] = storage.nbytes()
        buffers[buffer.slot] = name, buffer.offset
    x, y, z = launch.group_size
    # Kernels with incomplete SIMD groups do not multiply matrices.
    extra = {} if x % 32 == 0 else {"MSL_LANES_AS_THEY_ARE": 1}
    text = source_of(launch.family, launch.defines)
    source = Source(text, launch.kernel, x * y * z, extra, lines=True)
    sources[source.name] = source
    constants = {} if launch.params_slot is None else {launch.params_slot: launch.params}
    return Dispatch(source.name, launch.threadgroups, launch.group_size, buffers, constants)


def problem(case: cases.Case, sources: dict[str, Source]) -> Problem:
    begin = inputs(case.tensors)
    # deepcopy keeps shared memory shared, such as values inside keys.
    before, after = deepcopy(case.tensors), deepcopy(case.tensors)
    expected = {f"result{i}": t for i, t in enumerate(cases.results(case.call(**after)))}
    with simulate(record=True) as run:
        returned = cases.results(case.call(**case.tensors))
    results = {f"result{i}": tensor for i, tensor in enumerate(returned)}
    for name, tensor in results.items():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, f"{case.name}: gaps in {name}"
        assert tensor.stride() == expected[name].stride(), f"{case.name}: strides of {name}"
    sizes = {name: tensor.nbytes for name, tensor in results.items()}
    names = names_of_storages({**results, **case.tensors})
    dispatches = [dispatch(launch, names, sizes, sources) for launch in run.recorded]
    written = {name for d in dispatches for name, _ in d.buffers.values()}
    # An op that works in place changes an input.
    changed = {n: t for n, t in {**expected, **after}.items() if n in written}
    outputs = {
        name: (str(t.dtype).removeprefix("torch."), contents(t))
        for name, t in changed.items()
        if name not in before or contents(before[name]) != contents(t)
    }
    scratch = {name: size for name, size in sizes.items() if name not in begin}
    return Problem(case.name, case.dtype, dispatches, begin, outputs, scratch)


def pack(only: str, workers: int) -> Packed:
    sources: dict[str, Source] = {}
    packed = Packed(problems=[problem(case, sources) for case in cases.cases(only)])
    with ThreadPoolExecutor(workers) as pool:

        def compile_new() -> None:
            new = [source for name, source in sources.items() if name not in packed.programs]
            compiled = pool.map(compile_ptx, new)
            packed.programs |= {s.name: p for s, p in zip(new, compiled, strict=True)}

        compile_new()
        packed.problems += faults.plant(packed, sources)
        compile_new()
    return packed


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.outside.sanitizer.pack", description=__doc__)
    parser.add_argument("file", type=Path, help="where to write")
    parser.add_argument("--only", default="", help="a regular expression of names of problems")
    parser.add_argument("--workers", type=int, default=1, help="compilers at a time (default: 1)")
    arguments = parser.parse_args()
    packed = pack(arguments.only, arguments.workers)
    packed.write(arguments.file)
    print(f"{len(packed.problems)} problems, {len(packed.programs)} programs")


if __name__ == "__main__":
    main()
