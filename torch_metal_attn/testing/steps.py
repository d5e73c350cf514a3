"""Cases that write a cache: append_kv, decode_step and flash_attn_with_kvcache with new rows."""

import dataclasses
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from torch_metal_attn.quantisation import BLOCK, FORMATS, dequantise, quantise
from torch_metal_attn.reference import attention
from torch_metal_attn.testing import spoiling, tensors
from torch_metal_attn.testing.case import Case, Prepared, shorter
from torch_metal_attn.testing.judge import (
    ROUNDING,
    Measure,
    ints,
    near,
    near_statistic,
    normal,
    same_bits,
    worst_of,
)
from torch_metal_attn.testing.oracle import torch_error
from torch_metal_attn.testing.rounding import out_errors, score_errors
from torch_metal_attn.testing.tensors import Layout, Memory, dtype_of, numbers
from torch_metal_attn.with_kvcache import flash_attn_with_kvcache

_CALLS = ("append_kv", "decode_step", "flash_attn_with_kvcache")
_LAYOUTS: tuple[Layout, ...] = ((), ("order 021",), ("padded 8",), ("order 021", "padded 3"))
_ATTENDING = ("q_length", "causal", "window_size_left", "softcap", "learnable_sink", "num_splits")


@dataclass(frozen=True)
class Step(Case):
    """New rows for a cache, and attention to it.

    Attributes: lengths: the rows that each sequence has before the call. length: the number of new
        rows. capacity: rows of each sequence, a multiple of page if the cache is paged.
        rotary_columns: 0 for no rotation. by_token: rotate each query by its own row. backward: the
        new rows and the queries require grad, and `backward` must raise. The others are those of
        `Attention`.
    """

    call: str = "append_kv"
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 8
    v_head_dim: int = 8
    lengths: tuple[int, ...] = (0,)
    length: int = 1
    capacity: int = 64
    q_length: int = 1
    cache: str = ""
    page: int = 16
    format: str = ""
    cache_dtype: str = ""
    leftpad_k: tuple[int, ...] | None = None
    rotary_columns: int = 0
    rotary_interleaved: bool = False
    by_token: bool = True
    rotary_from_leftpad: bool = True
    causal: bool = False
    window_size_left: int = -1
    softcap: float = 0.0
    learnable_sink: str = ""
    num_splits: int = 0
    backward: bool = False
    values: str = "normal"
    layout: Layout = ()
    cache_layout: Layout = ()

    UNREAD_ON_MPS: ClassVar[tuple[str, ...]] = ("a length without room for the new rows",)
    WAYS: ClassVar[tuple[str, ...]] = spoiling.ways(("k", "v", "k_cache", "v_cache"), ("k", "v"))

    def meaningless(self) -> str:
        if self.call == "append_kv":
            for field in dataclasses.fields(self):
                if field.name in _ATTENDING and getattr(self, field.name) != field.default:
                    return f"append_kv has no {field.name}"
        if self.leftpad_k is not None:
            if len(self.leftpad_k) != len(self.lengths):
                return "there is one length for each sequence"
            if any(pad > n for pad, n in zip(self.leftpad_k, self.lengths, strict=True)):
                return "a padding ends before the new rows"
        if self.call == "flash_attn_with_kvcache":
            if not self.rotary_from_leftpad:
                return "the function rotates by the rows of the cache"
            if self.by_token != (self.causal or self.window_size_left >= 0):
                return "the function decides how queries are rotated"
        if not self.rotary_columns and not self.rotary_from_leftpad:
            return "nothing is rotated"
        if not self.rotary_columns and (self.rotary_interleaved or not self.by_token):
            if self.call != "flash_attn_with_kvcache":
                return "nothing is rotated"
        if self.rotary_columns and self.by_token and self.q_length > self.length:
            return "queries before the first row of the tables"
        if self.format and self.format != "fp8_e4m3":
            if self.head_dim % BLOCK or self.v_head_dim % BLOCK:
                return f"{self.format} has blocks of {BLOCK} columns"
        if self.cache_dtype and (self.dtype != "float32" or self.format):
            return "only float32 rows have a cache of another dtype"
        if self.cache == "paged" and (self.page < 1 or self.capacity % self.page):
            return "pages are whole"
        if self.heads % self.kv_heads or not self.lengths:
            return "there is a KV head for some heads"
        if self.spoilt and (self.spoilt not in self.WAYS or self.head_dim == 1):
            return "what is spoilt is not there"
        return ""

    def refused(self) -> str:
        if any(not 0 <= n <= self.capacity - self.length for n in self.lengths):
            return "a length without room for the new rows"
        if self.rotary_columns > self.head_dim:
            return "rotated columns"
        return super().refused()

    def smaller(self) -> Iterator["Step"]:
        for b in range(len(self.lengths) if len(self.lengths) > 1 else 0):
            changes: dict[str, Any] = {"lengths": self.lengths[:b] + self.lengths[b + 1 :]}
            if self.leftpad_k is not None:
                changes["leftpad_k"] = self.leftpad_k[:b] + self.leftpad_k[b + 1 :]
            yield dataclasses.replace(self, **changes)
        for lengths in shorter(self.lengths):
            yield dataclasses.replace(self, lengths=lengths)
        for columns in (8, 32):
            if columns < max(self.head_dim, self.v_head_dim):
                yield dataclasses.replace(
                    self,
                    head_dim=columns,
                    v_head_dim=columns,
                    rotary_columns=min(self.rotary_columns, columns),
                )
        yield dataclasses.replace(self, heads=1, kv_heads=1)
        yield dataclasses.replace(self, q_length=1, length=1)


def draw(r: random.Random) -> Step:
    """Any meaningful case. One of twelve must be refused."""
    while True:
        case = _any(r)
        if case.meaningless() or case.refused():
            continue
        if r.random() < 1 / 12:
            changes = r.choice(
                (
                    {"spoilt": r.choice(Step.WAYS)},
                    {"lengths": tuple(case.capacity - case.length + 1 for _ in case.lengths)},
                    {"lengths": (-1,) * len(case.lengths), "leftpad_k": None},
                    {"rotary_columns": case.head_dim + 2 + case.head_dim % 2},
                )
            )
            bad = dataclasses.replace(case, **changes)
            case = case if bad.meaningless() or not bad.refused() else bad
        return case


def vary(case: Step, r: random.Random) -> Step:
    """Other values and lengths."""
    changes: dict[str, Any] = {"seed": r.randrange(2**31), "values": _values(r)}
    if not case.refused():
        most = case.capacity - case.length
        changes["lengths"] = tuple(r.randint(0, most) for _ in range(r.randint(1, 3)))
        if case.leftpad_k is not None:
            changes["leftpad_k"] = tuple(r.randint(0, n) for n in changes["lengths"])
    return dataclasses.replace(case, **changes)


def _any(r: random.Random) -> Step:
    call = r.choice(_CALLS)
    head_dim = r.choice((8, 32, 64, 64, 96, 128, 7, 40, 160))
    kv_heads, group = r.choice(((1, 1), (2, 1), (1, 4), (2, 3)))
    page, length = r.choice((1, 3, 5, 8, 16, 24)), r.choice((1, 1, 1, 2, 5, 9, 20))
    rotary = r.random() < 0.4
    fields: dict[str, Any] = {
        "dtype": r.choice(tensors.DTYPES),
        "heads": kv_heads * group,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "v_head_dim": head_dim if r.random() < 0.8 else 32,
        "length": length,
        "capacity": -(-r.choice((24, 64, 160)) // page) * page,
        "cache": r.choice(("", "paged", "paged", "indexed")),
        "page": page,
        "format": r.choice(FORMATS) if r.random() < 0.4 else "",
        "rotary_columns": r.choice((2, head_dim // 4 * 2, head_dim // 2 * 2)) if rotary else 0,
        "rotary_interleaved": rotary and r.random() < 0.5,
        "backward": r.random() < 0.1,
        "layout": r.choice(_LAYOUTS),
        "cache_layout": r.choice(_LAYOUTS),
    }
    if fields["dtype"] == "float32" and not fields["format"] and r.random() < 0.4:
        fields["cache_dtype"] = r.choice(tensors.DTYPES[1:])
    if rotary and call != "flash_attn_with_kvcache":
        fields["rotary_from_leftpad"] = r.random() < 0.5
    most = max(fields["capacity"] - length, 0)
    fields["lengths"] = tuple(r.randint(0, most) for _ in range(r.choice((1, 2, 3))))
    if r.random() < 0.25:
        fields["leftpad_k"] = tuple(r.randint(0, n) for n in fields["lengths"])
    if call != "append_kv":
        fields |= {
            "q_length": r.choice((length, length, length, 1, 17)),
            "causal": r.random() < 0.6,
            "window_size_left": r.choice((-1, -1, 5, 40)),
            "softcap": r.choice((0.0, 0.0, 20.0)),
            "learnable_sink": r.choice(("", "", "", "float32", "bfloat16")),
            "num_splits": r.choice((0, 0, 1, 2, 3)),
        }
    by_token = not rotary or r.random() < 0.7
    if call == "flash_attn_with_kvcache":
        by_token = fields["causal"] or fields["window_size_left"] >= 0
    return Step(call=call, **fields, by_token=by_token, values=_values(r), seed=r.randrange(2**31))


def _values(r: random.Random) -> str:
    return r.choice(tensors.KINDS) if r.random() < 0.4 else "normal"


def prepare(case: Step, device: torch.device) -> Prepared:
    """The call that writes new rows, with caches whose rows are NaN where they belong to nobody."""
    memory, dtype = Memory(device), dtype_of(case.dtype)
    batch = len(case.lengths)

    def made(*shape: int, seed: int, values: bool = False) -> Tensor:
        seed += case.seed
        return numbers(*shape, kind=case.values, seed=seed, dtype=dtype, values=values)

    rows, places = case.capacity, batch
    where: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(case.seed)
    if case.cache == "paged":
        blocks = case.capacity // case.page
        rows, places = case.page, batch * blocks + 2
        table = torch.randperm(places, generator=generator)[: batch * blocks]
        where["block_table"] = table.view(batch, blocks).int()
    elif case.cache == "indexed":
        places = batch + 1
        where["cache_batch_idx"] = torch.randperm(places, generator=generator)[:batch].int()
    new = {
        "k": made(batch, case.kv_heads, case.length, case.head_dim, seed=1),
        "v": made(batch, case.kv_heads, case.length, case.v_head_dim, seed=2, values=True),
    }
    caches: dict[str, Tensor] = {}
    for seed, (name, columns) in enumerate((("k", case.head_dim), ("v", case.v_head_dim))):
        old = made(places, case.kv_heads, rows, columns, seed=3 + seed, values=name == "v")
        if case.format:
            by_head = case.format == "fp8_e4m3"
            given = torch.linspace(0.02, 0.03, case.kv_heads) if by_head else None
            data, scale = quantise(old, case.format, given)
            old = data.view(torch.uint8) if by_head else data
            assert scale is not None
            caches[f"{name}_scale"] = scale
        elif case.cache_dtype:
            old = old.to(dtype_of(case.cache_dtype))
        caches[f"{name}_cache"] = old
    options: dict[str, Any] = {"leftpad_k": ints(*case.leftpad_k)} if case.leftpad_k else {}
    if case.rotary_columns:
        angles = 3 * normal(case.capacity, case.rotary_columns // 2, seed=case.seed + 5)
        options |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    q = made(batch, case.heads, case.q_length, case.head_dim, seed=7)
    sink = {}
    if case.learnable_sink:
        sink["learnable_sink"] = normal(
            case.heads, seed=case.seed + 11, dtype=dtype_of(case.learnable_sink)
        )
    expected = partial(_expected, case, device, caches, where, new, options)
    in_sequence = partial(_in_sequence, case, device, where)

    placed = {n: memory.place(n, x, case.layout) for n, x in new.items()}
    placed |= {
        n: memory.place(n, x, case.cache_layout if x.dim() == 4 else ()) for n, x in caches.items()
    }
    placed["cache_seqlens"] = memory.place("cache_seqlens", ints(*case.lengths))
    placed |= {n: memory.place(n, x) for n, x in (where | options | sink).items()}
    written = tuple(n for n in caches if not (case.format == "fp8_e4m3" and "scale" in n))
    if case.call != "append_kv" or (case.rotary_columns and case.by_token):
        placed["q"] = memory.place("q", q, case.layout)
        written += ("q",) if case.call == "append_kv" else ()
    function, arguments = _call(case, placed)
    if case.backward:
        function = partial(_without_gradient, case, function)
    held = {n: placed[n] for n in (*caches, "q") if n in placed}
    judge = partial(_judge, case, held, q, sink, expected, in_sequence)
    return Prepared(function, arguments, judge, memory, written)


def _without_gradient(case: Step, function: Callable[..., Any], **given: Any) -> Any:
    """The call with new rows that require grad, where `backward` must raise."""
    names = ("k", "v") if case.call == "append_kv" else ("q", "k", "v")
    leaves = {n: given[n].detach().requires_grad_() for n in names}
    results = function(**(given | leaves))
    written = (given["k_cache"], given["v_cache"]) if results is None else results[:1]
    for x in written:
        if x.is_floating_point():
            try:
                # Not autograd.grad: written rows have no edge to where they come from.
                x.backward(torch.ones_like(x))
            except NotImplementedError:
                continue
            raise AssertionError("a call without a gradient returned one")
    return results


def _call(case: Step, placed: dict[str, Tensor]) -> tuple[Any, dict[str, Any]]:
    arguments: dict[str, Any] = dict(placed)
    if case.call != "flash_attn_with_kvcache":
        if case.rotary_columns:
            arguments["rotary_interleaved"] = case.rotary_interleaved
            arguments["rotate_q_by_token"] = case.by_token
            arguments["rotary_from_leftpad"] = case.rotary_from_leftpad
        if case.call == "append_kv":
            return torch.ops.metal_attn.append_kv, arguments
        names = ("causal", "window_size_left", "softcap", "num_splits")
        return torch.ops.metal_attn.decode_step, arguments | {n: getattr(case, n) for n in names}
    arguments = {n: x.transpose(1, 2) if x.dim() == 4 else x for n, x in arguments.items()}
    if "leftpad_k" in arguments:
        arguments["cache_leftpad"] = arguments.pop("leftpad_k")
    arguments |= {
        "causal": case.causal,
        "window_size": (case.window_size_left, -1),
        "softcap": case.softcap,
        "num_splits": case.num_splits,
        "rotary_interleaved": case.rotary_interleaved,
    }

    def run(**given: Any) -> tuple[Tensor, Tensor]:
        out, lse = flash_attn_with_kvcache(**given, return_softmax_lse=True)
        return out.transpose(1, 2), lse

    return run, arguments


def _expected(
    case: Step,
    device: torch.device,
    caches: dict[str, Tensor],
    where: dict[str, Tensor],
    new: dict[str, Tensor],
    options: dict[str, Tensor],
    q: Tensor,
) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
    """The caches afterwards, the rotated q, and k and v of the sequences, (B, H, rows, D)."""
    first = torch.tensor(case.lengths)
    if case.leftpad_k and case.rotary_from_leftpad and case.call != "flash_attn_with_kvcache":
        first = first - torch.tensor(case.leftpad_k)
    new = dict(new)
    if case.rotary_columns:
        tables = [options[f"rotary_{name}"].to(device) for name in ("cos", "sin")]

        def rotated(x: Tensor, by_token: bool) -> Tensor:
            steps = torch.arange(x.shape[2]) * by_token
            rows = (first[:, None] + steps).to(device)
            rotated, _ = torch.ops.metal_attn.rope(
                x.to(device), None, *tables, positions=rows, interleaved=case.rotary_interleaved
            )
            result: Tensor = rotated.cpu()
            return result

        new["k"], q = rotated(new["k"], True), rotated(q, case.by_token)
    after = {n: x.clone() for n, x in caches.items()}
    dense = []
    for name in ("k", "v"):
        cache, scale = after[f"{name}_cache"], after.get(f"{name}_scale")
        data, new_scale = new[name], None
        if case.format:
            given = scale if case.format == "fp8_e4m3" else None
            data, new_scale = quantise(new[name], case.format, given)
            data = data.view(cache.dtype)
        data = data.to(cache.dtype)
        whole = cache.new_zeros(len(case.lengths), cache.shape[1], case.capacity, cache.shape[3])
        by_row = scale is not None and scale.dim() == 4
        scales = scale
        if by_row:
            assert scale is not None
            scales = scale.new_zeros(*whole.shape[:3], scale.shape[3])
        for b, start in enumerate(case.lengths):
            for row in range(start + case.length):
                place, line = _place(case, where, b, row)
                if row >= start:
                    cache[place, :, line] = data[b, :, row - start]
                    if by_row:
                        assert scale is not None
                        assert new_scale is not None
                        scale[place, :, line] = new_scale[b, :, row - start]
                whole[b, :, row] = cache[place, :, line]
                if by_row:
                    assert scale is not None
                    assert scales is not None
                    scales[b, :, row] = scale[place, :, line]
        dense.append(dequantise(whole, scales, torch.float32) if case.format else whole.to(q.dtype))
    return after, q, dense[0], dense[1]


def _place(case: Step, where: dict[str, Tensor], b: int, row: int) -> tuple[int, int]:
    if case.cache == "paged":
        return int(where["block_table"][b, row // case.page]), row % case.page
    return int(where["cache_batch_idx"][b]) if case.cache else b, row


def _in_sequence(
    case: Step,
    device: torch.device,
    where: dict[str, Tensor],
    after: dict[str, Tensor],
    rotated: Tensor,
    options: dict[str, Any],
) -> Any:
    """What `flash_decode` gives for the caches afterwards, as `rope` and `append_kv` leave them."""
    given = {n.removesuffix("_cache"): x for n, x in after.items()} | where | options
    there = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in given.items()}
    op = torch.ops.metal_attn.flash_decode
    return op(rotated.to(device), **there, num_splits=case.num_splits)


@torch.no_grad()
def _judge(
    case: Step,
    placed: dict[str, Tensor],
    q: Tensor,
    sink: dict[str, Tensor],
    expected: Any,
    in_sequence: Any,
    results: Any,
) -> list[Measure]:
    after, rotated, k, v = expected(q)
    measures = [same_bits(name, placed[name], x) for name, x in after.items()]
    if case.call == "append_kv":
        return measures + ([same_bits("q", placed["q"], rotated)] if "q" in placed else [])
    options: dict[str, Any] = {
        "causal": case.causal,
        "window_size_left": case.window_size_left,
        "softcap": case.softcap,
        "seqused_k": ints(*(n + case.length for n in case.lengths)),
    }
    if case.leftpad_k is not None:
        options["leftpad_k"] = ints(*case.leftpad_k)
    options |= sink
    if case.strict and case.call == "decode_step":
        both = zip(results, in_sequence(after, rotated, options), strict=True)
        return measures + [
            same_bits(name, *pair) for name, pair in zip(("out", "softmax_lse"), both, strict=True)
        ]
    exact, exact_lse = attention(rotated, k, v, **options, compute_dtype=torch.float64)
    composed, _ = attention(rotated, k, v, **options)
    error = max(torch_error(rotated, k, v, options), worst_of([(composed, exact)]))
    # Of the formats, fp8 is rounded to q's dtype, and the scales of the others are applied late.
    operands = ROUNDING[q.dtype] if case.format else 0.0
    scale = case.head_dim**-0.5
    errors = score_errors(rotated, k, scale, operands, case.softcap)

    def attend(values: Tensor) -> Tensor:
        return attention(rotated, k, values, **options, compute_dtype=torch.float64)[0]

    slack = out_errors(attend, v, errors, case.capacity, dropout_p=0.0)
    slack = slack + operands * attend(v.double().abs())
    return [
        *measures,
        near("out", results[0], exact, error, slack),
        near_statistic("softmax_lse", results[1], exact_lse, 1e-5, errors),
    ]
