"""Cases of copy_pages, and of quantise and dequantise."""

import random
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from torch_metal_attn.quantisation import BLOCK, FORMATS, dequantise, quantise, shared_columns
from torch_metal_attn.testing.case import Case, Prepared, call, field, layout, one_of
from torch_metal_attn.testing.judge import Measure, same_bits, worst
from torch_metal_attn.testing.tensors import DTYPES, Memory, dtype_of, numbers


def _shape(r: random.Random, case: "Copy") -> tuple[int, ...]:
    rest = (r.choice((1, 2, 7, 16, 33)) for _ in range(r.choice((1, 2, 3))))
    return (r.choice((1, 2, 7, 9)), *rest)


def _copies(r: random.Random, case: "Copy") -> tuple[tuple[int, int], ...]:
    pages = case.shape[0]
    places = r.sample(range(pages), pages)
    count = r.randint(0, pages // 2)
    return tuple(zip(places[:count], places[count : 2 * count], strict=True))


@dataclass(frozen=True)
class Copy(Case):
    """Copies of pages of a cache. copies: pairs of source and target page."""

    call: str = call("copy_pages")
    dtype: str = field("float32", one_of(*DTYPES, "int8", "uint8", "int32", "int64", "bool"))
    shape: tuple[int, ...] = field((2, 8), _shape, varied=True)
    copies: tuple[tuple[int, int], ...] = field(((0, 1),), _copies, varied=True)
    index_dtype: str = field("int64", one_of("int32", "int64"))
    layout: tuple[str, ...] = layout(("padded 3",), ("order 10",), ("order 021", "padded 8"))

    UNREAD_ON_MPS: ClassVar[tuple[str, ...]] = ("a page beyond the cache",)

    def conflicts(self) -> dict[str, Any]:
        sources, targets = {a for a, _ in self.copies}, {b for _, b in self.copies}
        ordered = any("order 021" in word for word in self.layout)
        return {
            "shape needs two dimensions": len(self.shape) < 2,
            "two copies have the same target": len(targets) < len(self.copies),
            "a source is also a target": sources & targets,
            "this layout needs three dimensions": ordered and len(self.shape) < 3,
        }

    def illegal(self) -> dict[str, Any]:
        pages = {n for pair in self.copies for n in pair}
        return {"a page beyond the cache": any(not 0 <= n < self.shape[0] for n in pages)}

    def wrong(self) -> list[dict[str, Any]]:
        return [{"copies": ((0, self.shape[0]),)}]


def prepare_copy(case: Copy, device: torch.device) -> Prepared:
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
    arguments = {"cache": placed, "src": memory.place("src", src), "dst": memory.place("dst", dst)}

    def judge(_: Any) -> list[Measure]:
        return [same_bits("cache", placed, expected)]

    return Prepared(torch.ops.metal_attn.copy_pages, arguments, judge, memory, ("cache",))


@dataclass(frozen=True)
class Quantised(Case):
    """Quantises and dequantises values. scale: used by fp8_e4m3 only."""

    call: str = call(*FORMATS)
    rows: int = field(1, one_of(0, 1, 5, 40))
    columns: int = field(BLOCK, one_of(32, 64, 128, 8))
    exponent: int = field(0, lambda r, case: r.randint(-20, 12), varied=True)
    scale: float = field(1.0, one_of(0.01, 1.0, 30.0))
    values: str = field("normal", one_of("normal", "zeros", "constant"))

    def illegal(self) -> dict[str, Any]:
        return {"columns that are not whole blocks": self.columns % shared_columns(self.call)}

    def wrong(self) -> list[dict[str, Any]]:
        return [{"columns": 33}]


def prepare_quantised(case: Quantised, device: torch.device) -> Prepared:
    """The call, with the bounds of docs/numerics.md."""
    memory = Memory(device)
    size = (case.rows, 1, case.columns)
    x = numbers(*size, kind=case.values, seed=case.seed, dtype=torch.float32) * 2.0**case.exponent
    x = x.to(dtype_of(case.dtype))
    scale = torch.full((1,), case.scale) if case.call == "fp8_e4m3" else None

    def function(x: Tensor) -> Tensor:
        data, scales = quantise(x, case.call, None if scale is None else scale.to(x.device))
        return dequantise(data, scales, torch.float32)

    return Prepared(function, {"x": memory.place("x", x)}, partial(_judge, case, x.float()), memory)


def _judge(case: Quantised, x: Tensor, actual: Tensor) -> list[Measure]:
    actual = actual.cpu()
    error = (actual - x).abs().double()
    if case.call == "fp8_e4m3":
        kept = x.abs() <= 448 * case.scale
        bound = (x.abs() / 16).clamp_min(case.scale * 2**-10).double() * (1 + 2**-20)
        error = error.masked_fill(~kept, 0.0)
    else:
        blocks = x.double().unflatten(-1, (-1, shared_columns(case.call)))
        amax = blocks.abs().amax(-1, keepdim=True)
        if "_g" in case.call:
            extent = blocks.amax(-1, keepdim=True) - blocks.amin(-1, keepdim=True)
            codes = 2 ** int(case.call[1]) - 1
            bound = extent / (2 * codes) * (1 + 2**-7) + amax * 2**-10 + 2**-21
        elif case.call == "q8_0":
            bound = amax / 254 * (1 + 2**-10) + 2**-18
        else:
            largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
            near = (blocks.sign() == largest.sign()) | (blocks.abs() <= amax * 15 / 16)
            bound = amax / 16 * (1 + 2**-7) + 2**-22
            bound = torch.where(near, bound, 2 * bound)
        bound = bound.expand_as(blocks).flatten(-2)
    return [worst("values", error, bound)]
