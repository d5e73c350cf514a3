"""Cases that write a cache: append_kv, decode_step and flash_attn_with_kvcache with new keys."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from torch_metal_attn.call.visibility import depths, tree_rows
from torch_metal_attn.quantisation import FORMATS
from torch_metal_attn.testing import attention_run, invalidation, recent_rows
from torch_metal_attn.testing.attention import Attention
from torch_metal_attn.testing.attention_problem import (
    Problem,
    ends_of,
    options_of,
    parents_of,
    store,
    within_keys,
)
from torch_metal_attn.testing.case import (
    Case,
    Prepared,
    call,
    chance,
    field,
    kinds,
    layout,
    one_of,
    value_formats,
)
from torch_metal_attn.testing.judge import Measure, ints, normal, on, same_bits
from torch_metal_attn.testing.tensors import (
    DTYPES,
    Memory,
    dtype_of,
    impossible_heads,
    numbers,
    rotated_blocks,
    wrong_rotation,
)
from torch_metal_attn.with_kvcache import flash_attn_with_kvcache

_OPS, _FUNCTION = ("append_kv", "decode_step"), "flash_attn_with_kvcache"
_ATTENDING = ("decode_step", _FUNCTION)
_OPTIONS = ("causal", "window_size_left", "softcap", "learnable_sink")
_SHARED = (
    *("dtype", "seed", "heads", "kv_heads", "head_dim", "v_head_dim", "values_in_keys", "q_length"),
    *("tree", "tree_by_sequence", "leftpad_k", "format", "v_format", "hadamard"),
)
_TENSORS = ("leftpad_k", "learnable_sink", "parents", "tree_mask")


_layout = partial(layout, ("order 021",), ("padded 8",), ("order 021", "padded 3"))
_if_rotated = partial(field, when=lambda case: case.rotary_columns)


def _head_dim(r: random.Random, case: "Step") -> int:
    latent = (64, 96, 160, 576)
    return r.choice(latent if case.values_in_keys else (8, 32, 64, 64, 96, 128, 7, 40, 160))


def _v_head_dim(r: random.Random, case: "Step") -> int:
    if case.values_in_keys:
        return case.head_dim - (64 if case.head_dim == 576 else 32)
    return case.head_dim if r.random() < 0.8 else 32


def _most_rotated(case: "Step") -> int:
    return case.head_dim - case.v_head_dim if case.values_in_keys else case.head_dim


def _packed(r: random.Random, case: "Step") -> tuple[tuple[int, int], ...]:
    rows = [r.choice((0, 1, 1, 2, 5, 9, 20)) for _ in range(r.choice((1, 2, 3)))]
    return tuple((r.choice((n, n, r.randint(0, n))), n) for n in rows)


def _lengths(r: random.Random, case: "Step") -> tuple[int, ...]:
    new = [n for _, n in case.packed] or [case.length] * r.choice((1, 2, 3))
    return tuple(r.randint(0, max(case.capacity - n, 0)) for n in new)


def _tree(r: random.Random, case: "Step") -> str:
    each_has_a_query = all(queries == new for queries, new in case.pairs)
    return r.choice(("parents", "tree_mask")) if each_has_a_query else ""


@dataclass(frozen=True)
class Step(Case):
    """New rows for a cache, and attention to it.

    Attributes: lengths: the number of rows that each sequence has before the call. length: the
        number of new rows. packed: the numbers of queries and new rows of each sequence, which are
        packed; then q_length and length are not used. capacity: the maximum number of rows of each
        sequence, a multiple of page if the cache is paged. rotary_columns: 0 for no rotation.
        rotary_last: rotate the last columns. by_token: rotate each query by a separate row of the
        tables. backward: the new rows and the queries require grad, and `backward` must raise.
        recent: call `decode_step` of a cache of `kv_cache` with this number of recent rows.
        values_in_keys: v and v_cache are the first columns of k and k_cache; rotated columns must
        not be among them. For the other fields see `Attention`.
    """

    call: str = call(*_OPS, _FUNCTION)
    kv_heads: int = field(1, one_of(1, 2, 1, 2))
    heads: int = field(1, lambda r, case: r.choice((1, 1, 4, 3)) * case.kv_heads)
    values_in_keys: bool = field(False, chance(0.15))
    head_dim: int = field(8, _head_dim)
    v_head_dim: int = field(8, _v_head_dim)
    cache: str = field("", one_of("", "paged", "paged", "indexed"))
    page: int = field(16, one_of(1, 3, 5, 8, 16, 24), when=lambda case: case.cache)
    packed: tuple[tuple[int, int], ...] = field(
        (), _packed, share=0.25, calls=_ATTENDING, varied=True
    )
    length: int = field(1, one_of(1, 1, 1, 2, 5, 9, 20), when=lambda case: not case.packed)
    capacity: int = field(64, lambda r, case: -(-r.choice((24, 64, 160)) // case.page) * case.page)
    lengths: tuple[int, ...] = field((0,), _lengths, varied=True)
    leftpad_k: tuple[int, ...] | None = field(
        None, lambda r, case: tuple(r.randint(0, n) for n in case.lengths), share=0.25, varied=True
    )
    format: str = field("", one_of(*FORMATS), share=0.4)
    v_format: str = value_formats()
    hadamard: int = field(0, rotated_blocks, share=0.3)
    cache_dtype: str = field(
        "",
        one_of(*DTYPES[1:]),
        share=0.4,
        when=lambda case: case.dtype == "float32" and not case.format,
    )
    rotary_columns: int = field(
        0,
        lambda r, case: r.choice((2, _most_rotated(case) // 4 * 2, _most_rotated(case) // 2 * 2)),
        share=0.4,
    )
    rotary_interleaved: bool = _if_rotated(False, chance(0.5))
    rotary_from_leftpad: bool = _if_rotated(True, chance(0.5), calls=_OPS)
    rotary_last: bool = _if_rotated(
        False, lambda r, case: case.values_in_keys or r.random() < 0.3, calls=_OPS
    )
    q_length: int = field(
        1,
        lambda r, case: r.choice((case.length, case.length, case.length, 1, 17)),
        when=lambda case: not case.packed and (case.call != "append_kv" or case.rotary_columns),
    )
    tree: str = field("", _tree, share=0.4, calls=_ATTENDING)
    tree_by_sequence: bool = field(
        False, chance(0.5), calls=_ATTENDING, when=lambda case: case.tree and not case.packed
    )
    causal: bool = field(False, chance(0.6), calls=_ATTENDING)
    window_size_left: int = field(-1, one_of(-1, -1, 5, 40), calls=_ATTENDING)
    softcap: float = field(0.0, one_of(0.0, 0.0, 20.0), calls=_ATTENDING)
    learnable_sink: str = field("", one_of("", "", "", "float32", "bfloat16"), calls=_ATTENDING)
    num_splits: int = field(0, one_of(0, 0, 1, 2, 3), calls=_ATTENDING)
    # flash_attn_with_kvcache decides by its other arguments how queries are rotated.
    by_token: bool = field(
        True,
        lambda r, case: (
            case.tree != "" or case.causal or case.window_size_left >= 0
            if case.call == _FUNCTION or case.tree
            else not case.rotary_columns or r.random() < 0.7
        ),
    )
    recent: int = field(
        0, one_of(1, 8), share=0.2, calls=("decode_step",), when=lambda case: case.format
    )
    backward: bool = field(False, chance(0.1))
    values: str = kinds()
    layout: tuple[str, ...] = _layout()
    cache_layout: tuple[str, ...] = _layout()

    UNREAD_ON_MPS: ClassVar[tuple[str, ...]] = ("a length without room for the new rows",)
    OF_SEQUENCES: ClassVar[tuple[str, ...]] = ("packed", "lengths", "leftpad_k")
    SIZES: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("heads", "kv_heads"),
        ("head_dim", "v_head_dim", "rotary_columns"),
        ("q_length", "length"),
    )

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """The number of queries and new rows of each sequence."""
        return self.packed or ((self.q_length, self.length),) * len(self.lengths)

    @property
    def lengths_after(self) -> tuple[int, ...]:
        return tuple(n + new for n, (_, new) in zip(self.lengths, self.pairs, strict=False))

    def ways(self) -> tuple[str, ...]:
        tensors = ("k", "v") if self.recent else ("k", "v", "k_cache", "v_cache")
        return invalidation.ways(tensors, ("k", "v")) if self.head_dim > 1 else ()

    def conflicts(self) -> dict[str, Any]:
        by_token = self.tree != "" or self.causal or self.window_size_left >= 0
        pads = self.lengths if self.leftpad_k is None else self.leftpad_k
        return {
            "each sequence needs one entry of lengths, leftpad_k and packed": len(pads)
            != len(self.lengths)
            or len(self.pairs) != len(self.lengths),
            "a tree needs by_token": self.tree and not self.by_token,
            "leftpad_k must not exceed lengths": any(
                pad > n for pad, n in zip(pads, self.lengths, strict=False)
            ),
            "the function decides how queries are rotated": self.call == _FUNCTION
            and self.by_token != by_token,
            "by_token must be True without a rotation": self.call != _FUNCTION
            and not self.rotary_columns
            and not self.by_token,
            "queries before the first row of the tables": self.rotary_columns
            and self.by_token
            and any(queries > new for queries, new in self.pairs),
            **impossible_heads(self),
            "capacity must be a multiple of page": self.cache == "paged"
            and (self.page < 1 or self.capacity % max(self.page, 1)),
            "there must be a sequence": not self.lengths,
            "caches with recent rows do not have these options": self.recent
            and (
                any(queries != new for queries, new in self.packed)
                or self.leftpad_k is not None
                or self.cache == "indexed"
                or self.window_size_left >= 0
                or self.backward
                or min(self.lengths) < 0
            ),
        }

    def illegal(self) -> dict[str, Any]:
        return {
            "a length without room for the new rows": min(self.lengths, default=0) < 0
            or any(n > self.capacity for n in self.lengths_after),
            "packed without rows": self.packed
            and not all(map(sum, zip(*self.packed, strict=True))),
            "a tree whose tokens are not the new rows": self.tree
            and any(queries != new for queries, new in self.pairs),
            "causal with more queries than new rows and recent rows": self.recent
            and self.causal
            and self.q_length > self.length,
            "a rotated tree with recent rows": self.recent and self.tree and self.rotary_columns,
            "rotated columns": self.rotary_columns > self.head_dim,
            "rotated values": self.values_in_keys
            and self.rotary_columns
            and first_rotated(self) < self.v_head_dim,
            **wrong_rotation(self),
        }

    def wrong(self) -> list[dict[str, Any]]:
        return [
            {"lengths": (self.capacity - self.length + 1,) * len(self.lengths)},
            {"lengths": (-1,) * len(self.lengths), "leftpad_k": None},
            {"rotary_columns": self.head_dim + 2 + self.head_dim % 2},
            {"rotary_last": False},
            {"hadamard": 48},
            {"tree": "parents", "q_length": self.length + 1},
            {"packed": ((0, 1),) * len(self.lengths)},
        ]

    @property
    def attention(self) -> Attention:
        """The attention to the cache after the new rows are written."""
        return Attention(
            call="flash_decode",
            batch=len(self.lengths),
            q_lengths=tuple(queries for queries, _ in self.packed),
            kv_length=self.capacity,
            seqused_k=self.lengths_after,
            **{name: getattr(self, name) for name in (*_SHARED, *_OPTIONS)},
        )


def prepare(case: Step, device: torch.device) -> Prepared:
    """The call. Unused rows of the caches are NaN."""
    memory, dtype = Memory(device), dtype_of(case.dtype)
    batch, attention = len(case.lengths), case.attention

    def make(*shape: int, seed: int, values: bool = False) -> Tensor:
        seed += case.seed
        return numbers(*shape, kind=case.values, seed=seed, dtype=dtype, values=values)

    most_queries, most_new = map(max, zip(*case.pairs, strict=True))
    new, old = (
        [
            make(batch, case.kv_heads, length, case.head_dim, seed=seed),
            make(batch, case.kv_heads, length, case.v_head_dim, seed=seed + 1, values=True),
        ]
        for seed, length in ((1, most_new), (3, case.capacity))
    )
    old = [x.to(dtype_of(case.cache_dtype or case.dtype)) for x in old]
    if case.values_in_keys:
        new[1], old[1] = (x[..., : case.v_head_dim] for x in (new[0], old[0]))
    q = make(batch, case.heads, most_queries, case.head_dim, seed=7)
    tables: dict[str, Tensor] = {}
    if case.rotary_columns:
        angles = 3 * normal(case.capacity, case.rotary_columns // 2, seed=case.seed + 5)
        tables = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    options = options_of(attention, batch, case.capacity)
    caches = _caches(case, old)
    packing: dict[str, Any] = {}
    if case.packed:
        ends_q, ends_k = (ends_of(counts) for counts in zip(*case.packed, strict=True))
        packing = {"cu_seqlens_q": ends_q, "max_seqlen_q": most_queries}

    words = tuple(w.replace("021", "10") for w in case.layout) if case.packed else case.layout
    placed = {
        n: memory.place(n, _packed_rows(case, x, 1), words) for n, x in zip("kv", new, strict=True)
    }
    for name, x in caches.items():
        placed[name] = memory.place(name, x, case.cache_layout if x.dim() == 4 else ())
    more: dict[str, Tensor] = {n: options[n] for n in _TENSORS if n in options}
    more |= tables | {"cache_seqlens": ints(*case.lengths)}
    if case.packed:
        more["cu_seqlens_q"] = ends_q
        if any(queries != new for queries, new in case.packed):
            more["cu_seqlens_k_new"] = ends_k
    placed |= {n: memory.place(n, x) for n, x in more.items()}
    if case.values_in_keys:
        placed["v"] = placed["k"][..., : case.v_head_dim]
        placed = within_keys(case, placed, "_cache")
    written = tuple(n for n, x in caches.items() if n[1:] in ("_cache", "_scale") and x.dim() == 4)
    if case.call != "append_kv" or case.rotary_columns:
        placed["q"] = memory.place("q", _packed_rows(case, q, 0), words)
        written += ("q",) if case.call == "append_kv" else ()
    function, arguments = _call(case, placed)
    if case.recent:
        function, written = partial(recent_rows.step_of_cache, case, device, old), ()
    if case.backward:
        function = partial(_without_gradient, case, function)

    @torch.no_grad()
    def judge(results: Any) -> list[Measure]:
        rotated, k = _rotate_rows(case, device, tables, q, new[0])
        rotated = _packed_rows(case, rotated, 0)
        dense = [x.clone() for x in old]
        for x, rows in zip(dense, (k, new[1]), strict=True):
            for b, (start, end) in enumerate(zip(case.lengths, case.lengths_after, strict=True)):
                x[b, :, start:end] = rows[b, :, : end - start].to(x.dtype)
        after = _caches(case, dense)
        measures = [same_bits(n, placed[n], after[n]) for n in written if n != "q"]
        if case.call == "append_kv":
            return measures + ([same_bits("q", placed["q"], rotated)] if "q" in placed else [])
        # For rotated queries decode_step may have another tile than flash_decode.
        strict = case.strict and not case.recent
        if strict and case.call == "decode_step" and not case.rotary_columns:
            parts = _by_separate_ops(case, device, rotated, after | options | packing)
            both = zip(("out", "softmax_lse"), results, parts, strict=True)
            return measures + [same_bits(*each) for each in both]
        exact, kept, where = store(case, *dense)
        for x, rows in zip(exact, dense, strict=True):
            for b, first in enumerate(recent_rows.first_recent(case)):
                x[b, :, first:] = rows[b, :, first:]
        keys, values = (x.to(dtype) if case.cache_dtype else x for x in exact)
        packed = (ends_q, None, most_queries) if case.packed else ()
        problem = Problem(rotated, keys, values, packed, options, kept, where, None, None, None)
        return measures + attention_run.judge(attention, problem, results)

    return Prepared(function, arguments, judge, memory, written)


def _packed_rows(case: Step, x: Tensor, side: int) -> Tensor:
    """Pack queries (side 0) or new keys (side 1), (B, H, L, D), if the case has packed rows."""
    if not case.packed:
        return x
    return torch.cat([x[b, :, : n[side]].transpose(0, 1) for b, n in enumerate(case.packed)])


def _caches(case: Step, dense: list[Tensor]) -> dict[str, Tensor]:
    _, (k, v), where = store(case, *dense)
    tensors = {n: x for n, x in where.items() if isinstance(x, Tensor)}
    return {"k_cache": k, "v_cache": v, **tensors}


def first_rotated(case: Step) -> int:
    return case.head_dim - case.rotary_columns if case.rotary_last else 0


def _rotate_rows(
    case: Step, device: torch.device, tables: dict[str, Tensor], *rows: Tensor
) -> list[Tensor]:
    """The queries and the new keys, rotated by `rope`. The call must give the same bits."""
    if not tables:
        return list(rows)
    first = torch.tensor(case.lengths)
    if case.leftpad_k and case.rotary_from_leftpad and case.call != _FUNCTION:
        first = first - torch.tensor(case.leftpad_k)
    cos, sin = (x.to(device) for x in tables.values())
    rotated = []
    for x, by_token in zip(rows, (case.by_token, True), strict=True):
        offsets = torch.arange(x.shape[2]) * by_token
        if case.tree:
            seen = tree_rows(parents_of(case.attention), None)
            assert seen is not None
            offsets = depths(seen)
        # The tables lack rows for the padding of shorter packed sequences.
        positions = (first[:, None] + offsets).clamp(max=case.capacity - 1).to(device)
        x = x.to(device, copy=True)
        torch.ops.metal_attn.rope_(
            x[..., first_rotated(case) :],
            None,
            cos,
            sin,
            positions=positions,
            interleaved=case.rotary_interleaved,
        )
        rotated.append(x.cpu())
    return rotated


def _by_separate_ops(
    case: Step, device: torch.device, rotated: Tensor, arguments: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The results of `rope`, `append_kv` and `flash_decode` in sequence."""
    there = on(device, {n.removesuffix("_cache"): x for n, x in arguments.items()})
    results: tuple[Tensor, Tensor] = torch.ops.metal_attn.flash_decode(
        rotated.to(device),
        **within_keys(case, there),
        num_splits=case.num_splits,
        hadamard=case.hadamard,
    )
    return results


def _without_gradient(case: Step, function: Callable[..., Any], **arguments: Any) -> Any:
    """Call with new rows and queries that require grad. `backward` must raise."""
    names = ("k", "v") if case.call == "append_kv" else ("q", "k", "v")
    leaves = {n: arguments[n].detach().requires_grad_() for n in names}
    results = function(**(arguments | leaves))
    written = (arguments["k_cache"], arguments["v_cache"]) if results is None else results[:1]
    for x in written:
        if x.is_floating_point():
            try:
                # Not autograd.grad: the graph has no edge from written rows to the new ones.
                x.backward(torch.ones_like(x))
            except NotImplementedError:
                continue
            raise AssertionError("a call that has no gradient returned one")
    return results


def _call(case: Step, placed: dict[str, Tensor]) -> tuple[Any, dict[str, Any]]:
    numbers = {"hadamard": case.hadamard}
    if case.packed:
        numbers["max_seqlen_q"] = max(queries for queries, _ in case.packed)
    arguments: dict[str, Any] = placed | numbers
    if case.call == _FUNCTION:
        arguments = {n: x.transpose(1, 2) if x.dim() == 4 else x for n, x in placed.items()}
        arguments |= numbers | {"window_size": (case.window_size_left, -1)}
        if "leftpad_k" in arguments:
            arguments["cache_leftpad"] = arguments.pop("leftpad_k")
        for name in ("causal", "softcap", "num_splits", "rotary_interleaved"):
            arguments[name] = getattr(case, name)

        def run(**more: Any) -> tuple[Tensor, Tensor]:
            out, lse = flash_attn_with_kvcache(**more, return_softmax_lse=True)
            return out if case.packed else out.transpose(1, 2), lse

        return run, arguments
    if case.rotary_columns:
        arguments["rotary_interleaved"] = case.rotary_interleaved
        arguments["rotate_q_by_token"] = case.by_token
        arguments["rotary_from_leftpad"] = case.rotary_from_leftpad
        arguments["rotary_first_column"] = first_rotated(case)
    if case.call == "append_kv":
        return torch.ops.metal_attn.append_kv, arguments
    names = ("causal", "window_size_left", "softcap", "num_splits")
    return torch.ops.metal_attn.decode_step, arguments | {n: getattr(case, n) for n in names}
