"""MLX's and PyTorch's kernel families in the simulator: which compile, and run right when checked.

`python -m tests.outside.metal_sources --mlx FOLDER` rewrites bench/results/metal_sources.md. The
headers come from the wheels on PyPI, which have no `.metal` files. FOLDER is a clone of MLX, for
the families that are only there.
"""

import argparse
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from torch_metal_attn.simulator import compile_shader
from torch_metal_attn.simulator.build import ShaderCompileError
from torch_metal_attn.simulator.library import ShaderLibrary

from . import metal_runs as runs
from . import peers

RESULTS = Path(__file__).parents[2] / "bench/results/metal_sources.md"
KERNELS = "mlx/backend/metal/kernels"
UTILS = ("defines.h", "utils.h")
Run = Callable[[ShaderLibrary], runs.Outcome]
Constants = tuple[tuple[int | str, bool | int], ...]


@dataclass(frozen=True)
class Family:
    """A family of kernels: its headers, the kernels to instantiate, and a run of the first one."""

    name: str
    headers: tuple[str, ...]
    kernels: tuple[str, ...]
    run: Run | None = None
    wheel: str = peers.MLX
    constants: Constants = ()

    def source(self) -> str:
        """Metal text with a kernel k0, k1, ... for each instantiation."""
        lines = ["#include <metal_stdlib>", "#include <metal_simdgroup>", "using namespace metal;"]
        folder = f"{KERNELS}/" if self.wheel == peers.MLX else ""
        lines += [f'#include "{folder}{header}"' for header in self.headers]
        for number, kernel in enumerate(self.kernels):
            if kernel.startswith("kernel"):
                lines.append(kernel)
            else:
                lines.append(f'template [[host_name("k{number}")]] [[kernel]]')
                lines.append(f"decltype({kernel}) {kernel};")
        return "\n".join(lines)

    def compiled(self) -> ShaderLibrary:
        """The library with every kernel compiled; raises ShaderCompileError."""
        include = peers.include_dir(self.wheel)
        library = compile_shader(
            self.source(), include_dirs=[include], constants=dict(self.constants), check=True
        )
        for name in dir(library):
            library._program.image(name)
        return library


@dataclass(frozen=True)
class MetalFile:
    """A `.metal` file of MLX's repository, some of its kernels, and a run of the first one."""

    name: str
    kernels: tuple[str, ...]
    run: Run
    constants: Constants = ()

    def compiled(self, mlx: Path) -> ShaderLibrary:
        """The library with these kernels compiled; raises ShaderCompileError."""
        source = (mlx / KERNELS / f"{self.name}.metal").read_text()
        library = compile_shader(
            source, include_dirs=[mlx], constants=dict(self.constants), check=True
        )
        for name in self.kernels:
            library._program.image(name)
        return library


def gemm_headers(kind: str) -> tuple[str, ...]:
    return (*UTILS, "steel/gemm/gemm.h", f"steel/gemm/kernels/steel_gemm_{kind}.h")


CONV_HEADERS = (*UTILS, "steel/gemm/mma.h", "steel/conv/conv.h", "steel/conv/params.h")
INDEXING = tuple(f"indexing/{kind}.h" for kind in
                 ("gather_front", "gather_axis", "scatter_axis", "masked_scatter"))  # fmt: skip
GEMM_CONSTANTS = (("has_batch", False), ("use_out_source", False), ("do_axpby", False),
                  ("align_M", True), ("align_N", True), ("align_K", True))  # fmt: skip
FFT_STEPS = ((6, 2), *((i, 0) for i in range(3, 22) if i != 6))  # 64 = 8 * 8
C10 = "c10/metal/utils.h"
FUNCTION = (
    "kernel void {}(const device float* x, device float* o, uint i [[thread_position_in_grid]])"
)
TOTAL = """kernel void total(const device float* x, device float* o,
    uint i [[thread_position_in_threadgroup]], uint n [[threads_per_threadgroup]]) {
  threadgroup float buffer[32];
  float sum = c10::metal::threadgroup_sum(buffer, x[i], i, n);
  if (i == 0) o[0] = sum;
}"""

FAMILIES = [
    Family("unary", (*UTILS, "unary_ops.h", "unary.h"),
           ("unary_v<float, float, Erf>", "unary_v<bfloat16_t, bfloat16_t, Expm1>",
            "unary_g<half, half, Log1p, 1, int>"), runs.unary),
    Family("unary, complex", (*UTILS, "unary_ops.h", "unary.h"),
           ("unary_v<complex64_t, complex64_t, Exp>",), runs.complex_unary),
    Family("binary", (*UTILS, "binary_ops.h", "binary.h"),
           ("binary_vv<float, float, Maximum>", "binary_g<complex64_t, complex64_t, Multiply>",
            "binary_vv<bfloat16_t, bfloat16_t, LogAddExp>"), runs.binary),
    Family("binary_two", (*UTILS, "binary_ops.h", "binary_two.h"),
           ("binary_vv<float, float, DivMod>", "binary_ss<complex64_t, complex64_t, DivMod>"),
           runs.binary_two),
    Family("ternary", (*UTILS, "ternary_ops.h", "ternary.h"),
           ("ternary_v<float, Select, false, false>", "ternary_g<complex64_t, Select>"),
           runs.ternary),
    Family("copy", (*UTILS, "copy.h"),
           ("copy_g<float, bfloat16_t, 1, int64_t>", "copy_v<complex64_t, half>"), runs.copy),
    Family("arange", (*UTILS, "arange.h"), ("arange<float>", "arange<half>"), runs.arange),
    Family("reduce", (*UTILS, "atomic.h", "reduction/ops.h", "reduce.h"),
           ("all_reduce<float, float, Sum<float>>", "all_reduce<bool, bool, And<bool>>",
            "init_reduce<complex64_t, Prod<complex64_t>>",
            "row_reduce_simple<half, half, Max<half>>"), runs.reduce),
    Family("scan", (*UTILS, "scan.h"),
           ("contiguous_scan<float, float, CumSum<float>, 4, true, false>",
            "strided_scan<complex64_t, complex64_t, CumProd<complex64_t>, 2, false, true>"),
           runs.scan),
    Family("sort", (*UTILS, "sort.h"),
           ("block_sort<float, float, false, 32, 4>", "block_sort<complex64_t, uint, true, 32, 4>",
            "mb_block_merge<half, uint, true, 32, 4>"), runs.sort),
    Family("searchsorted", (*UTILS, "sort.h", "searchsorted.h"),
           ("searchsorted<float, false>",), runs.searchsorted),
    Family("softmax", (*UTILS, "softmax.h"),
           ("softmax_single_row<half, float>", "softmax_looped<bfloat16_t, float>"), runs.softmax),
    Family("logsumexp", (*UTILS, "logsumexp.h"),
           ("logsumexp<float>", "logsumexp_looped<half>"), runs.logsumexp),
    Family("cross_entropy", (*UTILS, "cross_entropy.h"),
           ("cross_entropy<float>",), runs.cross_entropy),
    Family("gemv", ("gemv.h",),
           ("gemv<float, 1, 1, 1, 32, 4, 4, false, false>",
            "gemv_t<bfloat16_t, 1, 2, 8, 4, 4, 4, false, true>",
            "gemv<complex64_t, 1, 1, 1, 32, 4, 4, false, false>"), runs.gemv,
           constants=(("gemv_wide_do_axpby", False),)),
    Family("gemv_masked", (*UTILS, "gemv_masked.h"),
           ("gemv_masked<float, bool, bool, 1, 1, 1, 32, 4, 4, false>",)),
    Family("dot", ("dot.h",), ("dot_product<half, 16, 256, 8>",)),
    Family("hadamard", (*UTILS, "hadamard.h"), ("hadamard_n<float, 64, 8, 4>",), runs.hadamard),
    Family("fft", ("defines.h", "fft.h"),
           ("fft<64, complex_t<float>, complex_t<float>>",
            "fft<64, complex_t<half>, complex_t<half>>"), runs.fft,
           constants=((0, False), (1, True), (2, 8), *FFT_STEPS, (22, False))),
    Family("quantized", (*UTILS, "steel/gemm/gemm.h", "quantized_utils.h", "quantized.h"),
           ("affine_dequantize<float, 64, 4>", "affine_qmv_fast<half, 64, 4, false>",
            "affine_quantize<bfloat16_t, 32, 3>", "affine_qmm_t<half, 64, 8, true, false>"),
           runs.dequantize),
    Family("fp_quantized", (*UTILS, "steel/gemm/gemm.h", "quantized_utils.h", "fp_quantized.h"),
           ("fp_dequantize<bfloat16_t, 32, 8, false>", "fp_quantize<half, 32, 4, false>"),
           runs.fp_dequantize),
    Family("indexing", (*UTILS, "atomic.h", *INDEXING),
           ("gather_front<float, int, int, 2>", "masked_assign_impl<float, true>",
            "gather_axis<complex64_t, int, int64_t, true, true>"), runs.gather),
    Family("steel gemm, split k", gemm_headers("splitk"),
           ("gemm_splitk<float, float, 32, 32, 16, 2, 2, false, false, true, true>",
            "gemm_splitk_accum<float, half>"), runs.gemm),
    Family("steel gemm, fused", gemm_headers("fused"),
           ("gemm<half, 32, 32, 16, 2, 2, false, true, float>",), runs.fused_gemm,
           constants=GEMM_CONSTANTS),
    Family("steel gemm, gather", gemm_headers("gather"),
           ("gather_mm<half, 32, 32, 16, 2, 2, false, true>",)),
    Family("steel gemm, masked", ("steel/defines.h", *gemm_headers("masked")),
           ("block_masked_gemm<half, bool, bool, 32, 32, 16, 2, 2, false, true, true, true>",)),
    Family("steel gemm, segmented", gemm_headers("segmented"),
           ("segmented_mm<bfloat16_t, 32, 32, 16, 2, 2, false, true>",)),
    Family("steel conv", (*CONV_HEADERS, "steel/conv/kernels/steel_conv.h"),
           ("implicit_gemm_conv_2d<half, 32, 32, 16, 2, 2, 0, false>",), runs.conv),
    Family("steel conv, general", (*CONV_HEADERS, "steel/conv/kernels/steel_conv_general.h"),
           ("implicit_gemm_conv_2d_general<float, 32, 32, 16, 2, 2>",)),
    Family("gated_delta", ("gated_delta_update.h",), ()),
    Family("c10: special_math", (C10, "c10/metal/special_math.h"),
           (FUNCTION.format("special") + " { o[i] = c10::metal::log_gamma(x[i]) + "
            "c10::metal::i0(x[i]) + c10::metal::erf(x[i]); }",), runs.special, peers.TORCH),
    Family("c10: igamma", (C10, "c10/metal/special_math.h", "c10/metal/igamma.h"),
           (FUNCTION.format("igamma") + " { o[i] = c10::metal::igamma(x[i], x[i] + 1); }",),
           runs.igamma, peers.TORCH),
    Family("c10: reductions", (C10, "c10/metal/reduction_utils.h"),
           (TOTAL,), runs.reduction, peers.TORCH),
    Family("c10: indexing, random, atomic",
           (C10, *(f"c10/metal/{kind}.h" for kind in ("indexing", "random", "atomic"))),
           (), None, peers.TORCH),
]  # fmt: skip

METAL_FILES = [
    MetalFile("rms_norm", ("rmsfloat32", "rms_loopedbfloat16", "vjp_rmsfloat16"), runs.rms_norm,
              (("has_w", True),)),
    MetalFile("layer_norm", ("layer_normfloat32", "vjp_layer_normbfloat16"), runs.layer_norm,
              (("has_w", True),)),
    MetalFile("rope", ("rope_float32", "rope_single_freqs_float16"), runs.rope,
              (("forward", True), ("traditional", False), ("hs_transpose", False))),
    MetalFile("arg_reduce", ("argmax_float32", "argmin_bool_"), runs.arg_reduce),
    MetalFile("random", ("rbitsc", "rbits"), runs.random),
]  # fmt: skip


def row(name: str, compiled: Callable[[], ShaderLibrary], run: Run | None) -> str:
    """A line of the table."""
    torch.manual_seed(0)
    try:
        library = compiled()
    except ShaderCompileError as error:
        reason = next(line for line in str(error).split("\n") if "error:" in line)
        return f"| {name} | no: {reason.partition('error: ')[2][:80]} | | |"
    if run is None:
        return f"| {name} | yes | | |"
    out, expected = run(library)
    difference = (out.to(expected.dtype) - expected).abs().max().item()
    return f"| {name} | yes | {difference:.1e} | {expected.abs().max().item():.1e} |"


HEADER = f"""# Metal written by others

Last written at {{commit}}.

Families of kernels in the headers of {peers.MLX} and {peers.TORCH}, unmodified, in the simulator
with checks. The error is the largest difference from torch on the CPU; a family without one was
compiled and not run. The last rows are `.metal` files of MLX's repository, which its wheel does not
have. `python -m tests.outside.metal_sources --mlx FOLDER` makes this table. The attention kernels
of both have tests of their own, in `tests/outside/test_peers.py`.

| family | compiles | error | largest value |
| --- | --- | --- | --- |
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mlx", type=Path, required=True, help="a clone of MLX")
    mlx: Path = parser.parse_args().mlx
    lines = [row(family.name, family.compiled, family.run) for family in FAMILIES]
    for file in METAL_FILES:
        lines.append(row(f"{file.name}.metal", partial(file.compiled, mlx), file.run))
    command = ["git", "log", "-1", "--format=%h of %cs"]
    commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    RESULTS.write_text(HEADER.format(commit=commit) + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
