"""Cases of rotary embeddings: rope, rope_ and flash-attn's functions, and their gradients."""

import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.flash_attn.layers import rotary
from torch_metal_attn.reference import rotate
from torch_metal_attn.testing import invalidation
from torch_metal_attn.testing.case import Case, Prepared, call, chance, field, kinds, layout, one_of
from torch_metal_attn.testing.judge import Measure, near, normal, worst_of
from torch_metal_attn.testing.tensors import DTYPES, Memory, dtype_of, expanded, numbers

_OPS, _FUNCTIONS = ("rope", "rope_"), ("apply_rotary_emb", "apply_rotary_emb_qkv_")


def _columns(r: random.Random, case: "Rotation") -> int:
    half = case.head_dim // 2 * 2
    return r.choice((0, 2, case.head_dim // 4 * 2, half, half))


def _place(r: random.Random, case: "Rotation") -> str:
    places = ("", "offset", "offsets", "positions", "positions of each")
    return r.choice(places if case.call in _OPS else places[:3])


@dataclass(frozen=True)
class Rotation(Case):
    """A rotation of q, and of k with a different number of heads.

    Attributes: columns: the number of rotated columns. place: the form of the positions: "" (from
        0), "offset", "offsets" (one per sequence), "positions" or "positions of each". table_dtype:
        of cos and sin. tables_by_sequence: cos and sin have a batch dimension. alone: without k.
    """

    call: str = call("rope", *_OPS, *_FUNCTIONS)
    batch: int = field(1, one_of(0, 1, 1, 2, 3), varied=True)
    heads: int = field(1, one_of(1, 4, 4, 3, 1))
    kv_heads: int = field(
        1, lambda r, case: case.heads if "qkv" in case.call else r.choice((1, 2, 3, 5))
    )
    length: int = field(1, one_of(0, 1, 1, 2, 7, 33, 65), varied=True)
    head_dim: int = field(8, one_of(2, 8, 7, 32, 64, 64, 80, 128, 256))
    columns: int = field(2, _columns)
    interleaved: bool = field(False, chance(0.5))
    conjugate: bool = field(False, chance(0.3), calls=_OPS)
    place: str = field("", _place, varied=True)
    table_dtype: str = field("float32", one_of(*DTYPES))
    tables_by_sequence: bool = field(False, chance(0.3), calls=_OPS)
    alone: bool = field(
        False,
        lambda r, case: case.call == "apply_rotary_emb" or r.random() < 0.3,
        calls=(*_OPS, "apply_rotary_emb"),
    )
    backward: bool = field(False, chance(0.3), calls=("rope",))
    values: str = kinds()
    layout: tuple[str, ...] = layout(
        *(("order 021",), ("padded 3",), ("order 210", "padded 8"), ("repeated 0",)),
        calls=(*_OPS, "apply_rotary_emb"),
    )

    def ways(self) -> tuple[str, ...]:
        return invalidation.ways(("q", "cos", "sin"), ()) if self.call in _OPS else ()

    def conflicts(self) -> dict[str, Any]:
        in_one_tensor = self.call == "apply_rotary_emb_qkv_"
        return {
            "flash-attn's functions take no positions": self.call in _FUNCTIONS
            and self.place.startswith("positions"),
            "apply_rotary_emb takes no k": self.call == "apply_rotary_emb" and not self.alone,
            "q and k in one tensor need equal heads": in_one_tensor and self.heads != self.kv_heads,
            "repeated tensors cannot be written": self.call == "rope_"
            and any(word.startswith("repeated") for word in self.layout),
            "columns must be even and not negative": self.columns < 0 or self.columns % 2,
        }

    def illegal(self) -> dict[str, Any]:
        return {"more rotated columns than the head dim": self.columns > self.head_dim}

    def wrong(self) -> list[dict[str, Any]]:
        return [{"columns": self.head_dim + 2 + self.head_dim % 2}]


def prepare(case: Rotation, device: torch.device) -> Prepared:
    """The call. Its tables have a few more rows than positions need."""
    memory, dtype = Memory(device), dtype_of(case.dtype)
    generator = torch.Generator().manual_seed(case.seed)
    rows = case.length + 11
    table = (case.batch, rows) if case.tables_by_sequence else (rows,)
    angles = 3 * normal(*table, case.columns // 2, seed=case.seed + 1)
    cos, sin = (x.to(dtype_of(case.table_dtype)) for x in (angles.cos(), angles.sin()))
    positions = torch.arange(case.length).expand(case.batch, -1)
    options: dict[str, Any] = {}
    if case.place == "offset":
        options["seqlen_offset"] = 9
        positions = positions + 9
    elif case.place == "offsets":
        firsts = torch.randint(0, 10, (case.batch,), generator=generator)
        options["seqlen_offsets"] = memory.place("seqlen_offsets", firsts.int())
        positions = positions + firsts[:, None]
    elif case.place:
        each = "each" in case.place
        size = (case.batch if each else 1, case.length)
        positions = torch.randint(0, rows, size, generator=generator)
        options["positions"] = memory.place("positions", positions if each else positions[0])
        positions = positions.expand(case.batch, -1)
    arguments: dict[str, Any]
    written: tuple[str, ...]
    sides = {}
    for seed, (name, heads) in enumerate((("q", case.heads), ("k", case.kv_heads))):
        shape = (case.batch, heads, case.length, case.head_dim)
        x = numbers(*shape, kind=case.values, seed=case.seed + 2 + seed, dtype=dtype)
        sides[name] = expanded(x, case.layout)
    if case.alone:
        del sides["k"]
    tables = {"cos": memory.place("cos", cos), "sin": memory.place("sin", sin)}
    judge = partial(_judge, case, sides, cos, sin, positions)
    if case.call in _FUNCTIONS:
        options["seqlen_offsets"] = options.pop("seqlen_offset", options.get("seqlen_offsets", 0))
        together = case.call == "apply_rotary_emb_qkv_"
        if together:
            three = [x.transpose(1, 2) for x in (*sides.values(), sides["q"])]
            arguments = {"qkv": memory.place("qkv", torch.stack(three, 2))}
        else:
            arguments = {"x": memory.place("q", sides["q"], case.layout).transpose(1, 2)}

        def function(**operands: Any) -> Any:
            out = getattr(rotary, case.call)(**operands, interleaved=case.interleaved)
            return [x.transpose(1, 2) for x in (out.unbind(2)[:2] if together else [out])], []

        written = ("qkv",) if together else ()
        return Prepared(function, arguments | tables | options, judge, memory, written)
    placed = {n: memory.place(n, x, case.layout) for n, x in sides.items()}
    options |= {"interleaved": case.interleaved, "conjugate": case.conjugate}
    written = tuple(placed) if case.call == "rope_" else ()
    arguments = {**placed, "k": placed.get("k"), **tables, **options}
    return Prepared(partial(_run, case), arguments, judge, memory, written)


def _run(case: Rotation, **arguments: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The rotated tensors, and the gradients if q and k serve as the incoming gradients."""
    names = [n for n in ("q", "k") if arguments[n] is not None]
    if case.call == "rope_":
        torch.ops.metal_attn.rope_(**arguments)
        return [arguments[n] for n in names], []
    leaves = [arguments[n].detach().requires_grad_(case.backward) for n in names]
    actual = torch.ops.metal_attn.rope(**arguments | dict(zip(names, leaves, strict=True)))
    actual = list(actual[: len(names)])
    grads: tuple[Tensor, ...] = ()
    if case.backward:
        grads = torch.autograd.grad(actual, leaves, [x.detach() for x in leaves])
    return [x.detach() for x in actual], list(grads)


def _judge(
    case: Rotation, sides: dict[str, Tensor], cos: Tensor, sin: Tensor, place: Tensor, results: Any
) -> list[Measure]:
    actual, grads = results
    b = torch.arange(case.batch)[:, None]
    cos, sin = (x[b, place] if case.tables_by_sequence else x[place] for x in (cos, sin))
    sin = -sin if case.conjugate else sin
    measures = []
    for suffix, tensors, sine in (("", actual, sin), (" (gradient)", grads, -sin)):
        for (name, x), rotated in zip(sides.items(), tensors, strict=False):
            exact, rounded = x.double(), x
            if case.columns:  # the reference needs at least one pair
                exact = rotate(exact, cos.double(), sine.double(), case.interleaved)
                rounded = rotate(x, cos.to(x.dtype), sine.to(x.dtype), case.interleaved)
            measures.append(near(name + suffix, rotated, exact, worst_of([(rounded, exact)])))
    return measures


@dataclass(frozen=True)
class Tables(Case):
    """cos and sin of every position below a length, base 10000. They are not drawn."""

    call: str = call("rope_tables")
    length: int = 300
    head_dim: int = 64


def prepare_tables(case: Tables, device: torch.device) -> Prepared:
    """The call, judged by torch's own cos and sin of float32 angles."""
    memory = Memory(device)
    pairs = torch.arange(0, case.head_dim, 2, dtype=torch.float64) / case.head_dim
    inv_freq, positions = (10000.0**-pairs).float(), torch.arange(case.length)
    exact = positions.double()[:, None] * 10000.0**-pairs
    angles = positions[:, None] * inv_freq

    def judge(tables: Any) -> list[Measure]:
        return [
            near(
                function.__name__,
                table,
                function(exact),
                worst_of([(function(angles), function(exact))]),
            )
            for table, function in zip(tables, (torch.cos, torch.sin), strict=True)
        ]

    placed = [memory.place("inv_freq", inv_freq), memory.place("positions", positions)]
    run = partial(torch.ops.metal_attn.rope_tables, *placed, dtype=dtype_of(case.dtype))
    return Prepared(run, {}, judge, memory)
