"""What Mesa's compiler for Apple's G13 (M1; M2's G14 is alike) makes of a kernel of Metal text."""

import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bench.front_end import source_of
from torch_metal_attn.simulator.build import ShaderCompileError
from torch_metal_attn.simulator.cache import default_dir
from torch_metal_attn.simulator.constants import ConstantValue

from . import listing, spirv
from .listing import LANES, Loop

# Where setup.sh puts the driver; AGX_LENS names another place.
DRIVER = Path(os.environ.get("AGX_LENS") or default_dir() / "agx" / "agx_lens")
# Of a core, as measured by others: 52 to 60 KB (docs/design/tiles.md has the sources).
THREADGROUP_MEMORY = 60 * 1024
REGISTERS = 128  # of a thread, of 32 bits
STATISTICS = re.compile(
    r"(\d+) inst, .* (\d+) bytes, \d+ regs, .* (\d+) scratch, (\d+) threads, "
    r"\d+ loops, (\d+):(\d+) spills:fills"
)


class LensError(RuntimeError):
    """The driver is not built, or Mesa cannot compile the kernel."""


@dataclass(frozen=True)
class Compiled:
    """What became of a kernel.

    Attributes: demand: registers of 32 bits that a thread needs to spill nothing. threads: that a
    core holds with the registers given. threads_per_group: of a threadgroup. spills, fills: stores
    and loads of spilled values. scratch: bytes of private memory of a thread. code: bytes.
    threadgroup: bytes of threadgroup memory. loops: all of them.
    """

    demand: float
    threads: int
    threads_per_group: int
    spills: int
    fills: int
    scratch: int
    code: int
    instructions: int
    threadgroup: int
    loops: list[Loop]

    @property
    def resident(self) -> int:
        """SIMD groups that a core holds, by registers and threadgroup memory."""
        groups = self.threads // self.threads_per_group
        if self.threadgroup:
            groups = min(groups, THREADGROUP_MEMORY // self.threadgroup)
        return groups * self.threads_per_group // LANES

    @property
    def main(self) -> Loop | None:
        """The outermost loop with matrix products: that over the keys, or over the queries."""
        found = [loop for loop in self.loops if loop.products]
        return max(found, key=lambda loop: (loop.products, len(loop.blocks)), default=None)

    @property
    def loop_code(self) -> int:
        """Bytes of the main loop's code, by its part of the instructions."""
        return self.code * self.main.instructions // self.instructions if self.main else 0

    @property
    def spills_in_loop(self) -> int:
        """Stores and loads of spilled values in the main loop."""
        return (
            sum(self.main.opcodes[f"stack_{way}"] for way in ("load", "store")) if self.main else 0
        )

    @property
    def cycles(self) -> float:
        """Of the main loop's busiest unit, a matrix product."""
        return self.main.cycles / self.main.products if self.main else 0.0


def compile_agx(
    text: str,
    kernel: str,
    threads: int,
    *,
    defines: Mapping[str, object] | None = None,
    constants: Mapping[int | str, ConstantValue] | None = None,
    include_dirs: Sequence[str | Path] = (),
) -> Compiled:
    """Compile one kernel of a Metal text.

    text: Metal, as `source_of` gives this project's. kernel: its name (host_name, if it has one).
    threads: of a threadgroup. defines, constants: macros, and values of function constants.
    Raises ShaderCompileError with clang's message, or LensError.
    """
    given = {"defines": defines, "constants": constants, "include_dirs": include_dirs}
    ir, symbol = spirv.llvm_ir(text, kernel, threads, **given)
    return _statistics(run_driver(ir, symbol, threads), threads)


class Job(NamedTuple):
    """One specialisation of this project's kernels."""

    kernel: str
    defines: Mapping[str, object]
    threads: int


def compile_job(job: Job) -> Compiled | LensError | ShaderCompileError:
    """A failure is returned, not raised: most tiles of a table's candidates do not compile."""
    try:
        return compile_agx(source_of(job.kernel, job.defines), job.kernel, job.threads)
    except (LensError, ShaderCompileError) as error:
        return error


def compile_all(
    jobs: Iterable[Job], workers: int = 1
) -> Iterator[Compiled | LensError | ShaderCompileError]:
    """Compile many, `workers` at a time, and yield them in their order."""
    if workers == 1:
        yield from map(compile_job, jobs)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        yield from pool.map(compile_job, jobs)


def run_driver(ir: str, symbol: str, threads: int, **environment: str) -> str:
    """What the driver prints for LLVM IR. Raises LensError."""
    if not DRIVER.exists():
        raise LensError(f"{DRIVER} is not there: build it with bench/agx/setup.sh")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.spv")
        file.write_bytes(spirv.compile_spirv(ir))
        done = subprocess.run(
            [DRIVER, file, symbol, str(threads)],
            env=os.environ | {"AGX_MESA_DEBUG": "shaders", "LENS_DEMAND": "1"} | environment,
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise LensError((done.stderr or done.stdout)[-600:])
    return done.stdout


def _statistics(printed: str, threads: int) -> Compiled:
    found = STATISTICS.search(printed)
    assert found, printed[-600:]
    before = printed[: found.start()]
    instructions, code, scratch, resident, spills, fills = (int(n) for n in found.groups())
    (demand,) = re.findall(r"^demand (\d+) of", before, re.M)
    (threadgroup,) = re.findall(r"^threadgroup memory (\d+)", printed, re.M)
    return Compiled(
        demand=int(demand) / 2,
        threads=resident,
        threads_per_group=threads,
        spills=spills,
        fills=fills,
        scratch=scratch,
        code=code,
        instructions=instructions,
        threadgroup=int(threadgroup),
        loops=listing.loops(before[before.rindex("\nblock0 {") + 1 :]),
    )
