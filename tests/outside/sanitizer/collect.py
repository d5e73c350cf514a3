"""From recorded launches to a folder of PTX, for NVIDIA's driver, with its manifest."""

import hashlib
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from bench.front_end import clang, front_end, source_of
from torch_metal_attn.simulator import RecordedLaunch

from .manifest import Dispatch, Manifest, Program

PTX = ["--target=nvptx64-nvidia-cuda", "-march=sm_90", "-nocudalib"]
PTX += ["-Xclang", "-target-feature", "-Xclang", "+ptx80"]


@dataclass(frozen=True)
class Source:
    """What a program is compiled from: a kernel of a Metal text.

    threads: of a threadgroup. defines: how matrix products are computed, see
    `gpu_headers/__msl_product.h`.
    """

    text: str
    kernel: str
    threads: int
    defines: Mapping[str, object] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The kernel's name and what tells this source from others."""
        digest = hashlib.sha256(repr((self.text, self.threads, self.defines)).encode())
        return f"{self.kernel}-{digest.hexdigest()[:10]}"

    def compile(self) -> tuple[str, Program]:
        """PTX for sm_90 with line numbers and every load as it is in the text, and its program."""
        attributes = "nvptx_kernel, flatten"
        ir, entry = front_end(
            self.text, self.kernel, attributes, PTX, self.defines, None, (), lines=True
        )
        # Buffers in constant memory are passed by address, like the others.
        ir = ir.replace("addrspace(4)", "addrspace(1)")
        ptx = clang([*PTX, "-x", "ir", "-O3", "-S", "-", "-o", "-"], ir)
        # LLVM writes a modifier that ptxas refuses with this type.
        ptx = re.sub(r"(setp\.\w+)\.ftz(\.bf16)", r"\1\2", ptx)
        ptx, found = re.subn(
            rf"(\.entry {entry.symbol}\([^)]*\)\s*(?://[^\n]*\n\s*)?)\{{",
            lambda match: f"{match.group(1)}\n.maxntid {self.threads}, 1, 1\n{{",
            ptx,
        )
        assert found == 1, "the entry of the kernel"
        return ptx, Program(self.name, entry.symbol, entry.buffers)


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

    def add(self, source: Source) -> str:
        """The name of the source's program, which is added if it is not there yet."""
        self.sources[source.name] = source
        self.manifest.programs.setdefault(source.name, Program(source.name))
        return source.name

    def recorded(
        self, launch: RecordedLaunch, names: Names, defines: Mapping[str, object]
    ) -> Dispatch:
        """A launch of this project's. defines: how it is compiled."""
        x, y, z = launch.group_size
        text = source_of(launch.family, launch.defines)
        source = Source(text, launch.kernel, x * y * z, defines)
        constants = {} if launch.params_slot is None else {launch.params_slot: launch.params.hex()}
        return Dispatch(
            self.add(source),
            list(launch.threadgroups),
            list(launch.group_size),
            {b.slot: (names.of(b.storage), b.offset) for b in launch.buffers},
            constants,
        )

    def write(self, folder: Path, workers: int) -> None:
        """Compile every program that is new into the folder, and write the manifest."""
        folder.mkdir(parents=True, exist_ok=True)
        programs = self.manifest.programs

        def compiled(source: Source) -> None:
            ptx, programs[source.name] = source.compile()
            (folder / f"{source.name}.ptx").write_text(ptx)

        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(compiled, [s for n, s in self.sources.items() if not programs[n].entry]))
        self.manifest.write(folder)
