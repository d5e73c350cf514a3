"""The small problems as a folder: programs, contents, what must come out, and planted faults."""

import argparse
import re
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.replay.collect import Collection, Names
from bench.replay.manifest import OURS, Candidate, Problem
from torch_metal_attn import simulate

from . import cases, faults

# Products of float32 as exact as three of tf32 are.
EXACT_PRODUCTS = {"MSL_FLOAT_PRODUCTS": 3}
LANES_AS_THEY_ARE = {"MSL_LANES_AS_THEY_ARE": 1}


def contents(tensor: Tensor) -> np.ndarray:
    """All bytes of the tensor's storage."""
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return whole.numpy().copy()


def copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors in other memory, with their strides and what lies around them.

    Tensors that share memory, as values within keys do, share it there too.
    """
    found: dict[str, Tensor] = {}
    storages: dict[int, torch.UntypedStorage] = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storages:
            storages[storage.data_ptr()] = storage.clone()
        place = tensor.storage_offset(), tensor.shape, tensor.stride()
        copy = storages[storage.data_ptr()]
        found[name] = torch.empty(0, dtype=tensor.dtype).set_(copy, *place)
    return found


def add(collection: Collection, case: cases.Case, data: dict[str, np.ndarray]) -> None:
    """A case as a problem, with its contents in `data`."""
    before = {name: contents(tensor) for name, tensor in case.tensors.items()}
    after = copies(case.tensors)
    expected = {f"result{i}": t for i, t in enumerate(cases.results(case.call(**after)))}
    with simulate(record=True) as run:
        returned = cases.results(case.call(**case.tensors))
    results = {f"result{i}": tensor for i, tensor in enumerate(returned)}
    for name, tensor in results.items():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, f"{case.name}: gaps in {name}"
        assert tensor.stride() == expected[name].stride(), f"{case.name}: strides of {name}"
    names = Names({**results, **case.tensors})
    dispatches = []
    for launch in run.recorded:
        is_whole = launch.group_size[0] % 32 == 0
        products = EXACT_PRODUCTS if launch.defines.get("ELEMENT") == "float" else {}
        extra = {**products, **({} if is_whole else LANES_AS_THEY_ARE)}
        dispatches.append(collection.recorded(launch, names, extra=extra, lines=True))
    written = {name for d in dispatches for name, _ in d.buffers.values()}
    outputs = {n: t for n, t in {**expected, **after}.items() if n in written}
    outputs = {n: t for n, t in outputs.items() if n not in before or changed(before[n], t)}
    dtypes = {n: str(t.dtype).removeprefix("torch.") for n, t in outputs.items()}
    scratch = {**names.scratch, **{n: t.untyped_storage().nbytes() for n, t in results.items()}}
    candidate = Candidate(OURS, "", dispatches, scratch)
    sizes = {"inputs": list(before), "dtype": case.dtype, "dtypes": dtypes}
    collection.manifest.problems.append(Problem(case.name, "small", sizes, [candidate]))
    data |= {f"{case.name}/in/{name}": array for name, array in before.items()}
    data |= {f"{case.name}/out/{name}": contents(tensor) for name, tensor in outputs.items()}


def changed(before: np.ndarray, tensor: Tensor) -> bool:
    """Whether an op has worked in place on a tensor."""
    return not np.array_equal(before, contents(tensor))


def pack(folder: Path, only: str, workers: int) -> Collection:
    """Write FOLDER with all cases whose name the regular expression finds."""
    collection = Collection()
    data: dict[str, np.ndarray] = {}
    for case in cases.cases():
        if re.search(only, case.name):
            add(collection, case, data)
    collection.write(folder, workers)
    faults.plant(collection, folder)
    collection.write(folder, workers)
    with zipfile.ZipFile(folder / "contents.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in data.items():
            with archive.open(f"{name}.npy", "w") as file:
                np.lib.format.write_array(file, array)
    return collection


def main() -> None:
    """Write the folder. Nothing here needs a GPU."""
    parser = argparse.ArgumentParser(prog="tests.outside.sanitizer.pack", description=__doc__)
    parser.add_argument("folder", type=Path, help="where to write; made if it is not there")
    parser.add_argument("--only", default="", help="a regular expression of names of problems")
    parser.add_argument("--workers", type=int, default=1, help="compilers at a time (default: 1)")
    arguments = parser.parse_args()
    packed = pack(arguments.folder, arguments.only, arguments.workers)
    print(f"{len(packed.manifest.problems)} problems, {len(packed.sources)} programs")


if __name__ == "__main__":
    main()
