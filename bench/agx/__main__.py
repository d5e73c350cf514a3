"""Print tables of the default specialisations and of the peers' kernels on Apple's G13.

Registers are of 32 bits, as many as a thread needs to spill nothing; a thread has 128. Cycles are a
product of 8x8 matrices, of a SIMD unit.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bench.front_end import Source, source_of
from bench.specialisations import peer_kernels, specialisations
from bench.tables import print_table

from . import model
from .lens import Compiled, Failure, compile_all
from .listing import PRODUCT_CYCLES

HEADINGS = (
    *("kernel", "dtype", "D", "feature", "tile", "registers", "spills", "in the loop"),
    *("SIMD groups by registers", "by threadgroup memory", "products", "other arithmetic"),
    *("integer and complex", "threadgroup memory", "cycles", "model", "loop bytes"),
)
SUMMARY_HEAD_DIMS = (64, 128, 256)
PEERS = ("MLX 0.32.4 steel_attention", "torch 2.15.0 prefill_attention")


@dataclass(frozen=True)
class Row:
    """One kernel, and what became of it."""

    kernel: str
    dtype: torch.dtype
    head_dim: int
    feature: str
    tile: str
    found: Compiled | Failure

    def cells(self) -> list[Any]:
        """In the order of HEADINGS."""
        about = [self.kernel, self.dtype, self.head_dim, self.feature, self.tile]
        found = self.found
        if not isinstance(found, Compiled):
            return [*about, str(found).strip().split("\n")[-1][:60]]
        cells = [f"{found.demand:g}", f"{found.spills}:{found.fills}", found.spills_in_loop]
        cells += [found.resident_by_registers, found.resident_by_threadgroup_memory]
        loop = found.main
        if loop is None:
            return about + cells
        each = (loop.arithmetic - PRODUCT_CYCLES * loop.products, loop.complex, loop.threadgroup)
        cells += [loop.products, *(f"{cycles / loop.products:.1f}" for cycles in each)]
        return [*about, *cells, f"{found.cycles:.1f}", _cycles(found), loop.code]

    def summary(self) -> str:
        """Time by the model, registers, SIMD groups of a core, and spills if any.

        Of products: cycles and the share of the limit. Of decoding: bytes a cycle and core.
        """
        found = self.found
        if not isinstance(found, Compiled) or found.main is None:
            return "not compiled"
        time = f"{_cycles(found)}, {100 * model.share_of_limit(found):.0f} %"
        if self.kernel == "flash_decode":
            time = f"{model.bytes_a_cycle(found):.1f} bytes"
        spills = [f"spills {found.spills}"] if found.spills else []
        return ", ".join([time, f"{found.demand:g}", str(found.resident), *spills])


def _cycles(found: Compiled) -> str:
    return f"{model.cycles_a_product(found):.1f}"


def _is_class_of(row: Row) -> str:
    if row.kernel == "flash_decode":
        return "decoding"
    if row.head_dim >= 192:
        return "head dim 192 and above"
    return "plain and causal" if row.feature in ("none", "causal") else "with a feature"


def rows(only: str, workers: int) -> Iterator[Row]:
    """Those of this project whose name has `only`, each specialisation once, then the peers'."""
    seen = set()
    ours, theirs = [], []
    for one in specialisations():
        key = (one.kernel, tuple(one.defines.items()))
        if only in one.name and key not in seen:
            seen.add(key)
            ours.append(one)
    for name, dtype, head_dim, arguments in peer_kernels():
        if only in f"{name} {str(dtype).removeprefix('torch.')} D{head_dim}":
            theirs.append((name, dtype, head_dim, arguments))
    jobs = [Source(source_of(one.kernel, one.defines), one.kernel, one.threads) for one in ours]
    jobs += [Source(**arguments) for *_, arguments in theirs]
    about = [(one.kernel, one.dtype, one.head_dim, one.feature, one.tile()) for one in ours]
    about += [(*peer[:3], "none", "") for peer in theirs]
    for words, found in zip(about, compile_all(jobs, workers), strict=True):
        yield Row(*words, found)


def print_summary(found: list[Row]) -> None:
    """The plain forward beside the peers', the other kernels, and how many spill."""
    by_name = {(row.kernel, row.dtype, row.head_dim, row.feature): row for row in found}

    def cells(dtype: torch.dtype, head_dim: int, *kernels: tuple[str, str]) -> list[Any]:
        keys = [(kernel, dtype, head_dim, feature) for kernel, feature in kernels]
        return [dtype, head_dim, *(by_name[k].summary() if k in by_name else "" for k in keys)]

    problems = [
        (dtype, head_dim)
        for dtype in (torch.float16, torch.bfloat16, torch.float32)
        for head_dim in SUMMARY_HEAD_DIMS
    ]
    print(
        "Cycles a product by the model and share of the limit, or of decoding bytes of device\n"
        "memory a cycle and core; registers of a thread; SIMD groups of a core.\n"
    )
    forward = [("flash_fwd", "none"), *((name, "none") for name in PEERS)]
    print_table(("dtype", "D", "flash_fwd", *PEERS), (cells(*one, *forward) for one in problems))
    others = [("flash_fwd", "causal"), ("flash_bwd_dq", "none"), ("flash_bwd_dkv", "none")]
    others += [("flash_decode", f"{heads} KV heads, none") for heads in (32, 2)]
    headings = ("dtype", "D", "causal", "dq", "dk and dv", "decode, 32 KV heads", "2 KV heads")
    print_table(headings, (cells(*one, *others) for one in problems))
    count, spilling = Counter[str](), Counter[str]()
    for row in found:
        if row.kernel not in PEERS:
            count[_is_class_of(row)] += 1
            spilling[_is_class_of(row)] += isinstance(row.found, Compiled) and row.found.spills > 0
    print_table(
        ("defaults", "of them spill"), ([f"{n} {c}", spilling[c]] for c, n in count.items())
    )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="kernels whose name has this text")
    parser.add_argument("--workers", type=int, default=1, help="compilers at a time (default: 1)")
    arguments = parser.parse_args()
    found: list[Row] = []

    def printed() -> Iterator[list[Any]]:
        for row in rows(arguments.only, arguments.workers):
            found.append(row)
            yield row.cells()

    print_table(HEADINGS, printed())
    if not arguments.only:
        print_summary(found)


if __name__ == "__main__":
    main()
