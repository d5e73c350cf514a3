"""Cases of copy_pages, and of quantise and dequantise."""

import dataclasses
import random
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from torch_metal_attn.quantisation import BLOCK, FORMATS, dequantise, quantise
from torch_metal_attn.testing import tensors
from torch_metal_attn.testing.case import Case, Prepared
from torch_metal_attn.testing.judge import Measure, same_bits
from torch_metal_attn.testing.tensors import Layout, Memory, dtype_of, numbers

_LAYOUTS: tuple[Layout, ...] = ((), ("padded 3",), ("order 10",), ("order 021", "padded 8"))
_DTYPES = (*tensors.DTYPES, "int8", "uint8", "int32", "int64", "bool")


@dataclass(frozen=True)
class Copy(Case):
    """Some pages of a cache, copied to others.

    Attributes: shape: the cache's, pages first. copies: for each copy the source and target page.
    """

    call: str = "copy_pages"
    shape: tuple[int, ...] = (2, 8)
    copies: tuple[tuple[int, int], ...] = ((0, 1),)
    index_dtype: str = "int64"
    layout: Layout = ()

    UNREAD_ON_MPS: ClassVar[tuple[str, ...]] = ("a page that is not there",)

    def meaningless(self) -> str:
        if len({b for _, b in self.copies}) < len(self.copies):
            return "two pages go to one place"
        if {a for a, _ in self.copies} & {b for _, b in self.copies}:
            return "a page that is copied is written too"
        if any("order 021" in word for word in self.layout) and len(self.shape) < 3:
            return "an order of three dimensions"
        return ""

    def refused(self) -> str:
        if any(not 0 <= n < self.shape[0] for pair in self.copies for n in pair):
            return "a page that is not there"
        return super().refused()


def draw_copy(r: random.Random) -> Copy:
    """Any meaningful case. A few must be refused."""
    while True:
        pages = r.choice((1, 2, 7, 9))
        places = r.sample(range(pages), pages)
        count = r.randint(0, pages // 2)
        copies = list(zip(places[:count], places[count : 2 * count], strict=True))
        if r.random() < 0.05:
            copies.append((0, pages))
        case = Copy(
            seed=r.randrange(2**31),
            dtype=r.choice(_DTYPES),
            shape=(pages, *(r.choice((1, 2, 7, 16, 33)) for _ in range(r.choice((1, 2, 3))))),
            copies=tuple(copies),
            index_dtype=r.choice(("int32", "int64")),
            layout=r.choice(_LAYOUTS),
        )
        if not case.meaningless():
            return case


def vary_copy(case: Copy, r: random.Random) -> Copy:
    """Other pages."""
    return dataclasses.replace(draw_copy(r), dtype=case.dtype)


def prepare_copy(case: Copy, device: torch.device) -> Prepared:
    """The call, with a cache of random bits."""
    memory, dtype = Memory(device), dtype_of(case.dtype)
    generator = torch.Generator().manual_seed(case.seed)
    if dtype == torch.bool:
        cache = torch.randint(0, 2, case.shape, generator=generator).bool()
    else:
        size = (*case.shape[:-1], case.shape[-1] * dtype.itemsize)
        cache = torch.randint(0, 256, size, generator=generator).byte().view(dtype)
    src, dst = (
        torch.tensor([pair[i] for pair in case.copies], dtype=dtype_of(case.index_dtype))
        for i in range(2)
    )
    expected = cache.clone()
    if not case.refused():
        bits = expected.view(torch.uint8)
        bits[dst.long()] = cache.view(torch.uint8)[src.long()]
    placed = memory.place("cache", cache, case.layout)
    arguments = {
        "cache": placed,
        "src": memory.place("src", src),
        "dst": memory.place("dst", dst),
    }

    def judge(_: Any) -> list[Measure]:
        return [same_bits("cache", placed, expected)]

    return Prepared(torch.ops.metal_attn.copy_pages, arguments, judge, memory, ("cache",))


@dataclass(frozen=True)
class Quantised(Case):
    """Values that are quantised and dequantised. scale: for fp8_e4m3."""

    call: str = "q8_0"
    rows: int = 1
    columns: int = BLOCK
    exponent: int = 0
    scale: float = 1.0
    values: str = "normal"

    def refused(self) -> str:
        if self.call != "fp8_e4m3" and self.columns % BLOCK:
            return "columns that fill no block"
        return super().refused()


def draw_quantised(r: random.Random) -> Quantised:
    """Any case. A few must be refused."""
    call = r.choice(FORMATS)
    return Quantised(
        call=call,
        seed=r.randrange(2**31),
        dtype=r.choice(tensors.DTYPES),
        rows=r.choice((0, 1, 5, 40)),
        columns=r.choice((32, 64, 128, 8) if r.random() < 0.9 else (33,)),
        exponent=r.randint(-20, 12),
        scale=r.choice((0.01, 1.0, 30.0)),
        values=r.choice(("normal", "zeros", "constant")),
    )


def vary_quantised(case: Quantised, r: random.Random) -> Quantised:
    """Other values."""
    return dataclasses.replace(case, seed=r.randrange(2**31), exponent=r.randint(-20, 12))


def prepare_quantised(case: Quantised, device: torch.device) -> Prepared:
    """The call, with the bounds of docs/numerics.md."""
    memory = Memory(device)
    size = (case.rows, 1, case.columns)
    x = numbers(*size, kind=case.values, seed=case.seed, dtype=torch.float32) * 2.0**case.exponent
    x = x.to(dtype_of(case.dtype))
    scale = torch.full((1,), case.scale) if case.call == "fp8_e4m3" else None

    def function(x: Tensor) -> Tensor:
        data, found = quantise(x, case.call, None if scale is None else scale.to(x.device))
        return dequantise(data, found, torch.float32)

    return Prepared(function, {"x": memory.place("x", x)}, partial(_judge, case, x.float()), memory)


def _judge(case: Quantised, x: Tensor, found: Tensor) -> list[Measure]:
    found = found.cpu()
    error = (found - x).abs().double()
    if case.call == "fp8_e4m3":
        kept = x.abs() <= 448 * case.scale
        bound = (x.abs() / 16).clamp_min(case.scale * 2**-10).double() * (1 + 2**-20)
        error = error.masked_fill(~kept, 0.0)
    else:
        blocks = x.double().unflatten(-1, (-1, BLOCK))
        amax = blocks.abs().amax(-1, keepdim=True)
        if case.call == "q8_0":
            bound = amax / 254 * (1 + 2**-10) + 2**-18
        else:
            largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
            alike = (blocks.sign() == largest.sign()) | (blocks.abs() <= amax * 15 / 16)
            bound = amax / 16 * (1 + 2**-7) + 2**-22
            bound = torch.where(alike, bound, 2 * bound)
        bound = bound.expand_as(blocks).flatten(-2)
    if not x.numel():
        return [Measure("values", 0.0, 0.0)]
    place = (error / bound).argmax()
    return [Measure("values", error.flatten()[place].item(), bound.flatten()[place].item())]
