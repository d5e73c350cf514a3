"""Cases of rotary embeddings: rope, rope_ and flash-attn's functions, and their gradients."""

import dataclasses
import random
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from torch_metal_attn.flash_attn.layers import rotary
from torch_metal_attn.reference import rotate
from torch_metal_attn.testing import spoiling, tensors
from torch_metal_attn.testing.case import Case, Prepared
from torch_metal_attn.testing.judge import Measure, near, normal, worst_of
from torch_metal_attn.testing.tensors import Layout, Memory, dtype_of, numbers

_CALLS = ("rope", "rope_", "rope", "apply_rotary_emb", "apply_rotary_emb_qkv_")
_LAYOUTS: tuple[Layout, ...] = (
    (),
    ("order 021",),
    ("padded 3",),
    ("order 210", "padded 8"),
    ("repeated 0",),
)


@dataclass(frozen=True)
class Rotation(Case):
    """A rotation of q, and of k with other heads.

    Attributes: columns: the number that is rotated. place: how positions are given: "" (from 0),
        "offset", "offsets" (one per sequence), "positions" or "positions of each". table_dtype: of
        cos and sin. tables_by_sequence: cos and sin have a batch dimension. alone: without k.
    """

    call: str = "rope"
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    length: int = 1
    head_dim: int = 8
    columns: int = 2
    interleaved: bool = False
    conjugate: bool = False
    place: str = ""
    table_dtype: str = "float32"
    tables_by_sequence: bool = False
    alone: bool = False
    backward: bool = False
    values: str = "normal"
    layout: Layout = ()

    WAYS: ClassVar[tuple[str, ...]] = spoiling.ways(("q", "cos", "sin"), ())

    def meaningless(self) -> str:
        if self.call not in ("rope", "rope_"):
            if self.place.startswith("positions") or self.conjugate or self.tables_by_sequence:
                return "flash-attn's functions do not have that"
            if self.spoilt:
                return "what is spoilt is not there"
        if self.call == "apply_rotary_emb" and not self.alone:
            return "it rotates one tensor"
        if self.call == "apply_rotary_emb_qkv_" and (
            self.alone or self.heads != self.kv_heads or self.layout
        ):
            return "q, k and v are in one tensor"
        if self.backward and self.call != "rope":
            return "gradients are of what is not in place"
        if self.call == "rope_" and any(word.startswith("repeated") for word in self.layout):
            return "what shares memory cannot be written"
        if self.columns < 0 or self.columns % 2:
            return "columns are rotated in pairs"
        if self.spoilt and self.spoilt not in self.WAYS:
            return "what is spoilt is not there"
        return ""

    def refused(self) -> str:
        if self.columns > self.head_dim:
            return "more rotated columns than there are"
        return super().refused()


def draw(r: random.Random) -> Rotation:
    """Any meaningful case. One of twelve must be refused."""
    while True:
        head_dim = r.choice((2, 8, 7, 32, 64, 64, 80, 128, 256))
        call = r.choice(_CALLS)
        heads, kv_heads = r.choice(((1, 1), (4, 1), (4, 2), (3, 3), (1, 5)))
        case = Rotation(
            call=call,
            seed=r.randrange(2**31),
            spoilt=r.choice(Rotation.WAYS) if r.random() < 1 / 16 else "",
            dtype=r.choice(tensors.DTYPES),
            batch=r.choice((0, 1, 1, 2, 3)),
            heads=heads,
            kv_heads=heads if "qkv" in call else kv_heads,
            length=r.choice((0, 1, 1, 2, 7, 33, 65)),
            head_dim=head_dim,
            columns=r.choice((0, 2, head_dim // 4 * 2, head_dim // 2 * 2, head_dim // 2 * 2)),
            interleaved=r.random() < 0.5,
            conjugate=r.random() < 0.3,
            place=r.choice(("", "offset", "offsets", "positions", "positions of each")),
            table_dtype=r.choice(tensors.DTYPES),
            tables_by_sequence=r.random() < 0.3,
            alone=call == "apply_rotary_emb" or ("qkv" not in call and r.random() < 0.3),
            backward=r.random() < 0.3,
            values=r.choice(tensors.KINDS) if r.random() < 0.3 else "normal",
            layout=r.choice(_LAYOUTS),
        )
        if not case.meaningless() and (not case.refused() or case.spoilt or r.random() < 0.5):
            return case


def vary(case: Rotation, r: random.Random) -> Rotation:
    """Another length, batch and place."""
    other = draw(r)
    changes: dict[str, Any] = {"length": other.length, "batch": other.batch}
    varied = dataclasses.replace(case, **changes, place=other.place, seed=other.seed)
    same = not varied.meaningless() and bool(varied.refused()) == bool(case.refused())
    return varied if same else dataclasses.replace(case, seed=other.seed)


def prepare(case: Rotation, device: torch.device) -> Prepared:
    """The call, with tables that have a few rows more than the last position."""
    memory, dtype = Memory(device), dtype_of(case.dtype)
    generator = torch.Generator().manual_seed(case.seed)
    rows = case.length + 11
    table = (case.batch, rows) if case.tables_by_sequence else (rows,)
    angles = 3 * normal(*table, case.columns // 2, seed=case.seed + 1)
    cos, sin = (x.to(dtype_of(case.table_dtype)) for x in (angles.cos(), angles.sin()))
    chosen = torch.arange(case.length).expand(case.batch, -1)
    options: dict[str, Any] = {}
    if case.place == "offset":
        options["seqlen_offset"] = 9
        chosen = chosen + 9
    elif case.place == "offsets":
        firsts = torch.randint(0, 10, (case.batch,), generator=generator)
        options["seqlen_offsets"] = memory.place("seqlen_offsets", firsts.int())
        chosen = chosen + firsts[:, None]
    elif case.place:
        count = case.batch if "each" in case.place else 1
        chosen = torch.randint(0, rows, (count, case.length), generator=generator)
        positions = chosen if "each" in case.place else chosen[0]
        options["positions"] = memory.place("positions", positions)
        chosen = chosen.expand(case.batch, -1)
    sides = {}
    for seed, (name, heads) in enumerate((("q", case.heads), ("k", case.kv_heads))):
        shape = (case.batch, heads, case.length, case.head_dim)
        x = numbers(*shape, kind=case.values, seed=case.seed + 2 + seed, dtype=dtype)
        sides[name] = tensors.expanded(x, case.layout)
    if case.alone:
        del sides["k"]
    tables = {"cos": memory.place("cos", cos), "sin": memory.place("sin", sin)}
    judge = partial(_judge, case, sides, cos, sin, chosen)
    written: tuple[str, ...] = ()
    if case.call == "apply_rotary_emb_qkv_":
        three = [x.transpose(1, 2) for x in (*sides.values(), sides["q"])]
        qkv = memory.place("qkv", torch.stack(three, 2))
        options["seqlen_offsets"] = options.pop("seqlen_offset", options.get("seqlen_offsets", 0))

        def packed(**given: Any) -> Any:
            out = rotary.apply_rotary_emb_qkv_(**given, interleaved=case.interleaved)
            return [x.transpose(1, 2) for x in out.unbind(2)[:2]], []

        return Prepared(packed, {"qkv": qkv, **tables, **options}, judge, memory, ("qkv",))
    placed = {n: memory.place(n, x, case.layout) for n, x in sides.items()}
    if case.call == "apply_rotary_emb":
        options["seqlen_offsets"] = options.pop("seqlen_offset", options.get("seqlen_offsets", 0))
        arguments = {"x": placed["q"].transpose(1, 2), **tables, **options}

        def one(**given: Any) -> Any:
            out = rotary.apply_rotary_emb(**given, interleaved=case.interleaved)
            return [out.transpose(1, 2)], []

        return Prepared(one, arguments, judge, memory)
    options |= {"interleaved": case.interleaved, "conjugate": case.conjugate}
    if case.call == "rope_":
        written = tuple(placed)
    arguments = {**placed, "k": placed.get("k"), **tables, **options}
    return Prepared(partial(_run, case), arguments, judge, memory, written)


def _run(case: Rotation, **arguments: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The rotated tensors, and gradients of a loss whose own gradients are these tensors."""
    names = [n for n in ("q", "k") if arguments[n] is not None]
    if case.call == "rope_":
        torch.ops.metal_attn.rope_(**arguments)
        return [arguments[n] for n in names], []
    leaves = [arguments[n].detach().requires_grad_(case.backward) for n in names]
    found = torch.ops.metal_attn.rope(**arguments | dict(zip(names, leaves, strict=True)))
    found = list(found[: len(names)])
    grads: tuple[Tensor, ...] = ()
    if case.backward:
        grads = torch.autograd.grad(found, leaves, [x.detach() for x in leaves])
    return [x.detach() for x in found], list(grads)


def _judge(
    case: Rotation, sides: dict[str, Tensor], cos: Tensor, sin: Tensor, chosen: Tensor, results: Any
) -> list[Measure]:
    found, grads = results
    b = torch.arange(case.batch)[:, None]
    cos, sin = (x[b, chosen] if case.tables_by_sequence else x[chosen] for x in (cos, sin))
    sin = -sin if case.conjugate else sin
    measures = []
    for suffix, tensors_found, sine in (("", found, sin), (" (gradient)", grads, -sin)):
        for (name, x), rotated in zip(sides.items(), tensors_found, strict=False):
            exact, own = x.double(), x
            if case.columns:  # the reference rotates some
                exact = rotate(exact, cos.double(), sine.double(), case.interleaved)
                own = rotate(x, cos.to(x.dtype), sine.to(x.dtype), case.interleaved)
            measures.append(near(name + suffix, rotated, exact, worst_of([(own, exact)])))
    return measures


@dataclass(frozen=True)
class Tables(Case):
    """cos and sin of every position below a length, base 10000. They are not drawn."""

    call: str = "rope_tables"
    length: int = 300
    head_dim: int = 64


def prepare_tables(case: Tables, device: torch.device) -> Prepared:
    """The call, judged by torch's own cos and sin of float32 angles."""
    memory = Memory(device)
    pairs = torch.arange(0, case.head_dim, 2, dtype=torch.float64) / case.head_dim
    inv_freq, positions = (10000.0**-pairs).float(), torch.arange(case.length)
    exact = positions.double()[:, None] * 10000.0**-pairs
    own = positions[:, None] * inv_freq

    def judge(tables: Any) -> list[Measure]:
        return [
            near(
                function.__name__,
                table,
                function(exact),
                worst_of([(function(own), function(exact))]),
            )
            for table, function in zip(tables, (torch.cos, torch.sin), strict=True)
        ]

    placed = [memory.place("inv_freq", inv_freq), memory.place("positions", positions)]
    run = partial(torch.ops.metal_attn.rope_tables, *placed, dtype=dtype_of(case.dtype))
    return Prepared(run, {}, judge, memory)
