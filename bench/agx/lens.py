"""Compiles a Metal kernel with Mesa's compiler for Apple's G13 (M1; M2's G14 is similar)."""

import hashlib
import multiprocessing
import os
import pickle
import resource
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.front_end import Source
from torch_metal_attn.simulator.build import ShaderCompileError
from torch_metal_attn.simulator.cache import default_dir

from . import listing, spirv
from .listing import LANES, Loop
from .spirv import LensError

# setup.sh installs the driver here; AGX_LENS is another path.
DRIVER = Path(os.environ.get("AGX_LENS") or default_dir() / "agx" / "agx_lens")
# Bytes per core. Published measurements are 52 to 60 KB (sources: docs/design/tiles.md).
THREADGROUP_MEMORY = 60 * 1024
MOST_RESIDENT = 32  # SIMD groups per core, whatever their registers
# Limits of a run of the driver, which takes a few seconds and less than 100 MB.
TIMEOUT_SECONDS, MEMORY = 600, 2**30


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel.

    Attributes: demand: registers of 32 bits per thread without spilling. threads: threads per core,
    limited by the registers. threads_per_group: threads of a threadgroup. spills: stores of spilled
    values. threadgroup: bytes of threadgroup memory. main: the outermost loop with matrix products,
    over the keys or over the queries.
    """

    demand: float
    threads: int
    threads_per_group: int
    spills: int
    threadgroup: int
    main: Loop | None

    @property
    def resident(self) -> int:
        """SIMD groups that a core holds, in whole threadgroups."""
        groups = self.threads // self.threads_per_group  # limited by registers
        if self.threadgroup:
            groups = min(groups, THREADGROUP_MEMORY // self.threadgroup)
        return min(groups * self.threads_per_group // LANES, MOST_RESIDENT)


def compile_agx(source: Source) -> Compiled:
    """Compile a kernel. Raises ShaderCompileError with clang's message, or LensError."""
    ir, symbol = spirv.llvm_ir(source)
    result = listing.parse(run_driver(ir, symbol, source.threads))
    with_products = [loop for loop in result.loops() if loop.products]
    return Compiled(
        demand=result.halves / 2,
        threads=result.threads,
        threads_per_group=source.threads,
        spills=result.opcodes()["stack_store"],
        threadgroup=result.threadgroup,
        main=max(with_products, key=lambda loop: (loop.products, len(loop.blocks)), default=None),
    )


Failure = LensError | ShaderCompileError


def attempt(source: Source) -> Compiled | Failure:
    """Like `compile_agx`, but returns errors, because some candidate tiles do not compile."""
    try:
        return compile_agx(source)
    except (LensError, ShaderCompileError) as error:
        return error


def compile_all(
    sources: Iterable[Source], workers: int = 1, store: Path | None = None
) -> Iterator[Compiled | Failure]:
    """Compile sources in order, in `workers` processes; the folder `store` keeps the results."""
    if store is None:
        one = attempt
    else:
        store.mkdir(parents=True, exist_ok=True)
        one = partial(_stored, store, hashlib.sha256(DRIVER.read_bytes()).hexdigest())
    if workers == 1:
        yield from map(one, sources)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        yield from pool.map(one, sources)


def _stored(store: Path, driver: str, source: Source) -> Compiled | Failure:
    path = store / hashlib.sha256(f"{driver} {source.name}".encode()).hexdigest()
    if path.exists():
        kept: Compiled = pickle.loads(path.read_bytes())
        return kept
    result = attempt(source)
    if isinstance(result, Compiled):
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(pickle.dumps(result))
        unfinished.replace(path)
    return result


def run_driver(ir: str, symbol: str, threads: int) -> str:
    if not DRIVER.exists():
        raise LensError(f"{DRIVER} does not exist; build it with bench/agx/setup.sh")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.spv")
        file.write_bytes(spirv.compile_spirv(ir))
        try:
            done = subprocess.run(
                [DRIVER, file, symbol, str(threads)],
                capture_output=True,
                text=True,
                timeout=TIMEOUT_SECONDS,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY)),
            )
        except subprocess.TimeoutExpired as error:
            raise LensError(str(error)) from None
    if done.returncode:
        raise LensError(f"exit status {done.returncode}: {(done.stderr or done.stdout)[-600:]}")
    return done.stdout
