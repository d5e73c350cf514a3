"""One launch of a kernel of each family in metal_sources.py: what it wrote, and what torch says."""

import math

import torch
from torch import Tensor
from torch.nn import functional

from torch_metal_attn.simulator.library import ShaderLibrary

from . import peers

Outcome = tuple[Tensor, Tensor]


def unary(library: ShaderLibrary) -> Outcome:
    x, out = torch.rand(70) - 0.5, torch.empty(70)
    library.k0(x, out, 70, threads=70, group_size=32, arg_casts="int32")
    return out, torch.erf(x)


def complex_unary(library: ShaderLibrary) -> Outcome:
    x = torch.randn(33, dtype=torch.complex64)
    out = torch.empty_like(x)
    library.k0(x, out, 33, threads=33, group_size=32, arg_casts="int32")
    return out, torch.exp(x)


def binary(library: ShaderLibrary) -> Outcome:
    x, y = torch.randn(2, 67)
    out = torch.empty(67)
    library.k0(x, y, out, 67, threads=67, group_size=32, arg_casts="int32")
    return out, torch.maximum(x, y)


def ternary(library: ShaderLibrary) -> Outcome:
    which, x, y = torch.rand(67) > 0.5, *torch.randn(2, 67)
    out = torch.empty(67)
    library.k0(which, x, y, out, 67, threads=67, group_size=32, arg_casts="int32")
    return out, torch.where(which, x, y)


def copy(library: ShaderLibrary) -> Outcome:
    x, out = torch.randn(5, 7), torch.empty(7, 5, dtype=torch.bfloat16)
    shape, strides = torch.tensor([7, 5], dtype=torch.int32), torch.tensor([1, 7])
    library.k0(x, out, shape, strides, None, 2, threads=(5, 7, 1), group_size=(5, 1, 1),
               arg_casts={5: "int32"})  # fmt: skip
    return out, x.T.bfloat16()


def arange(library: ShaderLibrary) -> Outcome:
    out = torch.empty(40)
    library.k0(2.0, 0.5, out, threads=40)
    return out, torch.arange(40) * 0.5 + 2


def reduce(library: ShaderLibrary) -> Outcome:
    x, out = torch.randn(1000), torch.empty(1)
    library.k0(x, out, 1000, 1000, threads=(64, 1, 1), group_size=(64, 1, 1))
    return out[0], x.sum()


def scan(library: ShaderLibrary) -> Outcome:
    x = torch.randn(3, 300)
    out = torch.empty_like(x)
    library.k0(x, out, 300, threads=(1024, 3, 1), group_size=(1024, 1, 1))
    return out, x.cumsum(1)


def sort(library: ShaderLibrary) -> Outcome:
    x = torch.randn(2, 100)
    out = torch.empty_like(x)
    library.k0(x, out, 100, 1, 1, 100, 100, threads=(32, 2, 1), arg_casts="int32",
               group_size=(32, 1, 1))  # fmt: skip
    return out, x.sort(1).values


def gemv(library: ShaderLibrary) -> Outcome:
    matrix, x, out = torch.randn(40, 70), torch.randn(70), torch.empty(40)
    one, strides = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    casts = {4: "int32", 5: "int32", 6: "int32", 9: "int32", 14: "int32"}
    library.k0(matrix, x, x, out, 70, 40, 70, 1.0, 0.0, 1, one, strides, strides, strides, 1,
               threads=(10 * 32, 1, 1), group_size=(32, 1, 1), arg_casts=casts)  # fmt: skip
    return out, matrix @ x


def logsumexp(library: ShaderLibrary) -> Outcome:
    x, out = torch.randn(3, 100), torch.empty(3)
    library.k0(x, out, 100, threads=3 * 32, group_size=32, arg_casts="int32")
    return out, x.logsumexp(1)


def gemm(library: ShaderLibrary) -> Outcome:
    a, b, out = torch.randn(32, 48), torch.randn(48, 32), torch.empty(2, 32, 32)
    params = peers.params(("5i", (32, 32, 48, 48, 32)), ("6i", (32, 1, 1, 2, 1024, 16)),
                          ("2i", (0, 1)))  # fmt: skip
    library.k0(a, b, out, params, threads=(32, 2, 4), group_size=(32, 2, 2))
    return out.sum(0), a @ b


def dequantize(library: ShaderLibrary) -> Outcome:
    codes = torch.randint(0, 16, (4, 64))
    packed = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)
    scales, biases = torch.rand(4), torch.randn(4)
    out = torch.empty(4, 64)
    library.k0(packed, scales, biases, out, threads=(128, 1), group_size=(32, 1))
    return out, codes * scales[:, None] + biases[:, None]


def gather(library: ShaderLibrary) -> Outcome:
    x, indices = torch.randn(9, 6), torch.tensor([3, -1, 0, 8], dtype=torch.int32)
    out = torch.empty(4, 6)
    library.k0(x, indices, out, 6, 9, threads=(3, 4), group_size=(3, 1), arg_casts={4: "int32"})
    return out, x[indices.long()]


def searchsorted(library: ShaderLibrary) -> Outcome:
    edges, x = torch.randn(50).sort().values, torch.randn(20)
    out = torch.empty(20, dtype=torch.int32)
    library.k0(edges, x, out, 50, 1, threads=20, arg_casts={3: "int32"})
    return out, torch.searchsorted(edges, x, out_int32=True)


def cross_entropy(library: ShaderLibrary) -> Outcome:
    x, out = torch.randn(3, 100), torch.empty(3)
    targets = torch.tensor([5, 99, 0], dtype=torch.int32)
    library.k0(x, targets, out, 100, threads=3 * 32, group_size=32, arg_casts="int32")
    return out, functional.cross_entropy(x, targets.long(), reduction="none")


def special(library: ShaderLibrary) -> Outcome:
    x, out = torch.rand(50) * 4 + 0.1, torch.empty(50)
    library.special(x, out)
    return out, torch.lgamma(x) + torch.special.i0(x) + torch.erf(x)


def igamma(library: ShaderLibrary) -> Outcome:
    x, out = torch.rand(50) * 4 + 0.1, torch.empty(50)
    library.igamma(x, out)
    return out, torch.special.gammainc(x, x + 1)


def reduction(library: ShaderLibrary) -> Outcome:
    x, out = torch.randn(1024), torch.empty(1)
    library.total(x, out)
    return out[0], x.sum()


def binary_two(library: ShaderLibrary) -> Outcome:
    x, y = torch.rand(2, 67) + 0.5
    quotient, rest = torch.empty(2, 67)
    library.k0(x, y, quotient, rest, 67, threads=67, group_size=32, arg_casts="int32")
    return torch.stack([quotient, rest]), torch.stack([(x / y).trunc(), x.fmod(y)])


def softmax(library: ShaderLibrary) -> Outcome:
    x = torch.randn(3, 100).half()
    out = torch.empty_like(x)
    library.k0(x, out, 100, threads=3 * 32, group_size=32, arg_casts="int32")
    return out, x.softmax(1)


def fft(library: ShaderLibrary) -> Outcome:
    x = torch.randn(64, dtype=torch.complex64)
    out = torch.empty_like(x)
    library.k0(x, out, 64, 1, threads=(1, 1, 8), group_size=(1, 1, 8), arg_casts="int32")
    return torch.view_as_real(out), torch.view_as_real(torch.fft.fft(x))


def fp_dequantize(library: ShaderLibrary) -> Outcome:
    values = torch.randn(64).to(torch.float8_e4m3fn)
    exponents = torch.tensor([126, 129], dtype=torch.uint8)
    out, scale = torch.empty(64, dtype=torch.bfloat16), torch.ones(1)
    library.k0(values.view(torch.uint8), exponents, scale, out, threads=(64, 1), group_size=(32, 1))
    return out, values.float() * (exponents.float() - 127).exp2().repeat_interleave(32)


def fused_gemm(library: ShaderLibrary) -> Outcome:
    a, b = torch.randn(32, 48).half(), torch.randn(32, 48).half()
    out = torch.empty(32, 32).half()
    params = peers.params(("8i", (32, 32, 48, 48, 48, 32, 1, 1)), ("3q", (0, 0, 0)),
                          ("3i", (0, 3, 1)))  # fmt: skip
    library.k0(a, b, None, out, params, threads=(32, 2, 2), group_size=(32, 2, 2))
    return out, a @ b.T


def conv(library: ShaderLibrary) -> Outcome:
    """3x3, 16 channels in and 32 out, 6x6 pixels, padded."""
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


def rms_norm(library: ShaderLibrary) -> Outcome:
    x, weight = torch.randn(3, 100), torch.randn(100)
    out = torch.empty_like(x)
    library.rmsfloat32(x, weight, out, 1e-5, 100, 1, threads=3 * 32, group_size=32,
                       arg_casts={4: "int32", 5: "int32"})  # fmt: skip
    return out, functional.rms_norm(x, (100,), weight, 1e-5)


def layer_norm(library: ShaderLibrary) -> Outcome:
    x, weight, bias = torch.randn(3, 256), torch.randn(256), torch.randn(256)
    out = torch.empty_like(x)
    library.layer_normfloat32(x, weight, bias, out, 1e-5, 256, 1, 1, threads=3 * 32, group_size=32,
                              arg_casts={5: "int32", 6: "int32", 7: "int32"})  # fmt: skip
    return out, functional.layer_norm(x, (256,), weight, bias, 1e-5)


def rope(library: ShaderLibrary) -> Outcome:
    x = torch.randn(2, 5, 8)
    out = torch.empty_like(x)
    offset, strides = torch.tensor([3], dtype=torch.int32), torch.tensor(x.stride())
    library.rope_float32(x, out, offset, 1.0, strides, strides, 0, 2, None, None, math.log2(1e4),
                         threads=(4, 5, 1), arg_casts={7: "int32"})  # fmt: skip
    angles = torch.outer(torch.arange(3, 8), 1e4 ** -(torch.arange(4) / 4))
    cos, sin = angles.cos(), angles.sin()
    first, second = x.chunk(2, -1)
    return out, torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


def arg_reduce(library: ShaderLibrary) -> Outcome:
    x, out = torch.randn(3, 50), torch.empty(3, dtype=torch.int32)
    shape, strides = torch.tensor([3], dtype=torch.int32), torch.tensor([50])
    library.argmax_float32(x, out, shape, strides, torch.tensor([1]), 1, 1, 50,
                           threads=(32, 3, 1), group_size=(32, 1, 1))  # fmt: skip
    return out, x.argmax(1).int()


def random(library: ShaderLibrary) -> Outcome:
    key, out = torch.tensor([7, 9], dtype=torch.int32), torch.empty(16, dtype=torch.int8)
    library.rbitsc(key, out, False, 16, threads=(1, 2))
    words = [threefry((7, 9), (i, i + 2)) for i in range(2)]
    expected = torch.tensor([pair[i] for i in range(2) for pair in words])
    return out.view(torch.int32).long() & 0xFFFFFFFF, expected


def threefry(key: tuple[int, int], count: tuple[int, int]) -> list[int]:
    """The two words of Threefry-2x32 with 20 rounds."""
    keys = [*key, key[0] ^ key[1] ^ 0x1BD11BDA]
    x, y = (count[0] + keys[0]) % 2**32, (count[1] + keys[1]) % 2**32
    for group in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x = (x + y) % 2**32
            y = (y << turn | y >> (32 - turn)) % 2**32 ^ x
        x = (x + keys[(group + 1) % 3]) % 2**32
        y = (y + keys[(group + 2) % 3] + group + 1) % 2**32
    return [x, y]


def hadamard(library: ShaderLibrary) -> Outcome:
    x = torch.randn(2, 64)
    out = torch.empty_like(x)
    library.k0(x, out, 0.125, threads=(8, 2, 1), group_size=(8, 1, 1))
    matrix = torch.ones(1, 1)
    for _ in range(6):
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return out, x @ matrix / 8
