"""From recorded launches and kernels' texts to a folder of PTX with its manifest."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from bench.front_end import Source, source_of
from torch_metal_attn.simulator import RecordedLaunch

from .manifest import NO_LIMIT, Dispatch, Manifest, Program
from .ptx import compile_ptx

# An argument of a launch: a tensor, or the bytes of a constant. None: it is not given.
Argument = Tensor | bytes | None


class Names:
    """Names of storages: those of the tensors that are given, and scratch0, scratch1 and so on."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._names = {_address(tensor): name for name, tensor in tensors.items()}
        self.scratch: dict[str, int] = {}

    def of(self, storage: Tensor) -> str:
        """The name of the storage that this tensor is of."""
        address = _address(storage)
        if address not in self._names:
            name = f"scratch{len(self.scratch)}"
            self._names[address] = name
            self.scratch[name] = storage.untyped_storage().nbytes()
        return self._names[address]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@dataclass
class Collection:
    """What a folder will hold."""

    manifest: Manifest = field(default_factory=Manifest)
    sources: dict[str, Source] = field(default_factory=dict)

    def add(self, source: Source, limits: Sequence[int] = (NO_LIMIT,)) -> str:
        """The name of the source's program, which is added if it is not there yet."""
        self.sources[source.name] = source
        program = Program(source.name, "", [], [])
        program = self.manifest.programs.setdefault(source.name, program)
        program.limits = sorted({*program.limits, *limits})
        return source.name

    def launch(
        self,
        source: Source,
        threadgroups: Sequence[int],
        group_size: Sequence[int],
        arguments: Sequence[Argument],
        names: Names,
        limits: Sequence[int] = (NO_LIMIT,),
    ) -> Dispatch:
        """A launch of any kernel, with its arguments in the order of the slots."""
        given = dict(enumerate(arguments))
        return Dispatch(
            self.add(source, limits),
            list(threadgroups),
            list(group_size),
            {
                slot: (names.of(tensor), int(tensor.storage_offset()) * tensor.element_size())
                for slot, tensor in given.items()
                if isinstance(tensor, Tensor)
            },
            {slot: data.hex() for slot, data in given.items() if isinstance(data, bytes)},
        )

    def recorded(
        self,
        launch: RecordedLaunch,
        names: Names,
        limits: Sequence[int] = (NO_LIMIT,),
        extra: Mapping[str, object] | None = None,
        lines: bool = False,
    ) -> Dispatch:
        """A launch of this project's. extra: more macros, which say how it is compiled."""
        x, y, z = launch.group_size
        text = source_of(launch.family, launch.defines)
        source = Source(text, launch.kernel, x * y * z, extra or {}, lines=lines)
        constants = {} if launch.params_slot is None else {launch.params_slot: launch.params.hex()}
        return Dispatch(
            self.add(source, limits),
            list(launch.threadgroups),
            list(launch.group_size),
            {b.slot: (names.of(b.storage), b.offset) for b in launch.buffers},
            constants,
        )

    def keep_used(self) -> None:
        """Forget the programs that no problem of the manifest uses."""
        used = {
            dispatch.program
            for problem in self.manifest.problems
            for candidate in problem.candidates
            for dispatch in candidate.dispatches
        }
        self.sources = {name: source for name, source in self.sources.items() if name in used}
        self.manifest.programs = {name: self.manifest.programs[name] for name in self.sources}

    def write(self, folder: Path, workers: int) -> None:
        """Compile every program that is new into the folder, and write the manifest."""
        folder.mkdir(parents=True, exist_ok=True)

        def compiled(source: Source) -> None:
            ptx = compile_ptx(source)
            (folder / f"{source.name}.ptx").write_text(ptx.text)
            program = self.manifest.programs[source.name]
            program.entry, program.slots = ptx.symbol, ptx.buffers

        with ThreadPoolExecutor(workers) as pool:
            programs = self.manifest.programs
            list(pool.map(compiled, [s for n, s in self.sources.items() if not programs[n].entry]))
        self.manifest.write(folder)
