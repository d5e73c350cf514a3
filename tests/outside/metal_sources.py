"""Runs unmodified kernels of MLX and PyTorch in the simulator, and torch for comparison."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torch_metal_attn.simulator import compile_shader
from torch_metal_attn.simulator.library import ShaderLibrary

from . import peers

FOLDERS = {peers.MLX: "mlx/backend/metal/kernels", peers.TORCH: "c10/metal"}
UTILS = ("defines.h", "utils.h")
GEMM = (*UTILS, "steel/gemm/gemm.h")
QUANTIZED = (*GEMM, "quantized_utils.h")
CONV = (*UTILS, "steel/gemm/mma.h", "steel/conv/conv.h", "steel/conv/params.h")
REDUCE = (*UTILS, "atomic.h", "reduction/ops.h", "reduce.h")
FFT = "fft<64, complex_t<float>, complex_t<float>>"
FFT_CONSTANTS = dict.fromkeys(range(3, 23), 0) | {0: False, 1: True, 2: 8, 6: 2, 22: False}
IGAMMA = """
kernel void k0(const device float* x, device float* out, uint i [[thread_position_in_grid]]) {
  out[i] = c10::metal::igamma(x[i], x[i] + 1);
}"""

Outcome = tuple[Tensor, Tensor]
FAMILIES: dict[str, Callable[[], Outcome]] = {}


def family(
    name: str,
    headers: tuple[str, ...],
    kernel: str,
    wheel: str = peers.MLX,
    constants: Mapping[Any, bool | int] | None = None,
) -> Callable[[Callable[[ShaderLibrary], Outcome]], None]:
    """Adds a family, whose library has `kernel` (an instance of a template or a text) as k0."""
    lines = ["#include <metal_stdlib>", "#include <metal_simdgroup>", "using namespace metal;"]
    lines += [f'#include "{FOLDERS[wheel]}/{header}"' for header in headers]
    template = f'template [[host_name("k0")]] [[kernel]] decltype({kernel}) {kernel};'
    source = "\n".join([*lines, kernel if wheel == peers.TORCH else template])

    def add(run: Callable[[ShaderLibrary], Outcome]) -> None:
        def compiled_and_run() -> Outcome:
            folders = [peers.include_dir(wheel)]
            return run(
                compile_shader(source, include_dirs=folders, constants=constants, check=True)
            )

        FAMILIES[name] = compiled_and_run

    return add


@family("unary", (*UTILS, "unary_ops.h", "unary.h"), "unary_v<complex64_t, complex64_t, Exp>")
def _(library: ShaderLibrary) -> Outcome:
    x = torch.randn(33, dtype=torch.complex64)
    out = torch.empty_like(x)
    library.k0(x, out, 33, threads=33, group_size=32, arg_casts="int32")
    return out, torch.exp(x)


@family("copy", (*UTILS, "copy.h"), "copy_g<float, bfloat16_t, 1, int64_t>")
def _(library: ShaderLibrary) -> Outcome:
    x, out = torch.randn(5, 7), torch.empty(7, 5, dtype=torch.bfloat16)
    shape, strides = torch.tensor([7, 5], dtype=torch.int32), torch.tensor([1, 7])
    library.k0(x, out, shape, strides, None, 2, threads=(5, 7, 1), group_size=(5, 1, 1),
               arg_casts={5: "int32"})  # fmt: skip
    return out, x.T.bfloat16()


@family("reduce", REDUCE, "all_reduce<float, float, Sum<float>>")
def _(library: ShaderLibrary) -> Outcome:
    x, out = torch.randn(1000), torch.empty(1)
    library.k0(x, out, 1000, 1000, threads=(64, 1, 1), group_size=(64, 1, 1))
    return out[0], x.sum()


@family("scan", (*UTILS, "scan.h"), "contiguous_scan<float, float, CumSum<float>, 4, true, false>")
def _(library: ShaderLibrary) -> Outcome:
    x = torch.randn(3, 300)
    out = torch.empty_like(x)
    library.k0(x, out, 300, threads=(1024, 3, 1), group_size=(1024, 1, 1))
    return out, x.cumsum(1)


@family("sort", (*UTILS, "sort.h"), "block_sort<float, float, false, 32, 4>")
def _(library: ShaderLibrary) -> Outcome:
    x = torch.randn(2, 100)
    out = torch.empty_like(x)
    library.k0(x, out, 100, 1, 1, 100, 100, threads=(32, 2, 1), arg_casts="int32",
               group_size=(32, 1, 1))  # fmt: skip
    return out, x.sort(1).values


@family(
    "gemv",
    ("gemv.h",),
    "gemv<float, 1, 1, 1, 32, 4, 4, false, false>",
    constants={"gemv_wide_do_axpby": False},
)
def _(library: ShaderLibrary) -> Outcome:
    matrix, x, out = torch.randn(40, 70), torch.randn(70), torch.empty(40)
    one, strides = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    casts = {4: "int32", 5: "int32", 6: "int32", 9: "int32", 14: "int32"}
    library.k0(matrix, x, x, out, 70, 40, 70, 1.0, 0.0, 1, one, strides, strides, strides, 1,
               threads=(10 * 32, 1, 1), group_size=(32, 1, 1), arg_casts=casts)  # fmt: skip
    return out, matrix @ x


@family("fft", ("defines.h", "fft.h"), FFT, constants=FFT_CONSTANTS)
def _(library: ShaderLibrary) -> Outcome:
    x = torch.randn(64, dtype=torch.complex64)
    out = torch.empty_like(x)
    library.k0(x, out, 64, 1, threads=(1, 1, 8), group_size=(1, 1, 8), arg_casts="int32")
    return torch.view_as_real(out), torch.view_as_real(torch.fft.fft(x))


@family("quantized", (*QUANTIZED, "quantized.h"), "affine_dequantize<float, 64, 4>")
def _(library: ShaderLibrary) -> Outcome:
    codes = torch.randint(0, 16, (4, 64))
    packed = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)
    scales, biases = torch.rand(4), torch.randn(4)
    out = torch.empty(4, 64)
    library.k0(packed, scales, biases, out, threads=(128, 1), group_size=(32, 1))
    return out, codes * scales[:, None] + biases[:, None]


@family("fp_quantized", (*QUANTIZED, "fp_quantized.h"), "fp_dequantize<bfloat16_t, 32, 8, false>")
def _(library: ShaderLibrary) -> Outcome:
    values = torch.randn(64).to(torch.float8_e4m3fn)
    exponents = torch.tensor([126, 129], dtype=torch.uint8)
    out, scale = torch.empty(64, dtype=torch.bfloat16), torch.ones(1)
    library.k0(values.view(torch.uint8), exponents, scale, out, threads=(64, 1), group_size=(32, 1))
    return out, values.float() * (exponents.float() - 127).exp2().repeat_interleave(32)


@family(
    "steel gemm, fused",
    (*GEMM, "steel/gemm/kernels/steel_gemm_fused.h"),
    "gemm<half, 32, 32, 16, 2, 2, false, true, float>",
    constants=dict.fromkeys(("has_batch", "use_out_source", "do_axpby"), False)
    | dict.fromkeys(("align_M", "align_N", "align_K"), True),
)
def _(library: ShaderLibrary) -> Outcome:
    a, b = torch.randn(32, 48).half(), torch.randn(32, 48).half()
    out = torch.empty(32, 32).half()
    params = peers.params(("8i", (32, 32, 48, 48, 48, 32, 1, 1)), ("3q", (0, 0, 0)),
                          ("3i", (0, 3, 1)))  # fmt: skip
    library.k0(a, b, None, out, params, threads=(32, 2, 2), group_size=(32, 2, 2))
    return out, a @ b.T


@family(
    "steel conv",
    (*CONV, "steel/conv/kernels/steel_conv.h"),
    "implicit_gemm_conv_2d<half, 32, 32, 16, 2, 2, 0, false>",
)
def _(library: ShaderLibrary) -> Outcome:
    """A padded 3x3 convolution of 6x6 pixels, from 16 channels to 32."""
    x, weight = torch.randn(1, 6, 6, 16).half(), torch.randn(32, 3, 3, 16).half()
    out = torch.empty(1, 6, 6, 32).half()
    params = peers.params(
        ("3i", (1, 16, 32)), ("14i", (6, 6, 3, 3, 6, 6, 1, 1, 1, 1, 1, 1, 1, 1)), ("i", (0,)),
        ("4q", x.stride()), ("4q", weight.stride()), ("4q", out.stride()), ("2i", (1, 0)),
    )  # fmt: skip
    row, pixel = x.stride()[1:3]
    gemm = peers.params(("10i", (36, 32, 144, 9, pixel, row - 2 * pixel, 16 - 2 * row - 2 * pixel,
                                 1, 2, 0)))  # fmt: skip
    library.k0(x, weight, out, params, gemm, threads=(32, 4, 2), group_size=(32, 2, 2))
    expected = functional.conv2d(x.permute(0, 3, 1, 2), weight.permute(0, 3, 1, 2), padding=1)
    return out, expected.permute(0, 2, 3, 1)


@family("c10: igamma", ("special_math.h", "igamma.h"), IGAMMA, wheel=peers.TORCH)
def _(library: ShaderLibrary) -> Outcome:
    x, out = torch.rand(50) * 4 + 0.1, torch.empty(50)
    library.k0(x, out)
    return out, torch.special.gammainc(x, x + 1)
