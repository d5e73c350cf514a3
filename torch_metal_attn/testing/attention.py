"""Cases of attention: calls of all its ops and functions, forward and backward."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch_metal_attn.quantisation import FORMATS
from torch_metal_attn.testing import invalidation
from torch_metal_attn.testing.case import (
    Case,
    Draw,
    call,
    chance,
    field,
    kinds,
    layout,
    one_of,
    value_formats,
    with_metadata,
)
from torch_metal_attn.testing.tensors import DTYPES, partial_groups, rotated_blocks, wrong_rotation

_PACKED_FUNCTIONS = (
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
)
_DENSE_FUNCTIONS = ("flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func")
_FUNCTIONS = (*_DENSE_FUNCTIONS, *_PACKED_FUNCTIONS)
_FORWARDS = ("flash_fwd", "flash_varlen_fwd")
_BACKWARDS = ("flash_bwd", "flash_varlen_bwd")
OPS = (*_FORWARDS, "flash_decode", *_BACKWARDS)
_WITH_KVCACHE, _SDPA = "flash_attn_with_kvcache", "scaled_dot_product_attention"
CALLS = (*OPS, *_FUNCTIONS, _WITH_KVCACHE, _SDPA)

_PACKED = ("flash_varlen_fwd", "flash_varlen_bwd", *_PACKED_FUNCTIONS)
_DENSE = tuple(call for call in CALLS if call not in _PACKED)
_DECODES = ("flash_decode", _WITH_KVCACHE)
# Calls with quantised formats, with caches, with rotation, and with options that change scores.
_STORED = (*_FORWARDS, *_DECODES)
_CACHED = (*_STORED, "flash_attn_varlen_func")
_ROTATED = (*_FORWARDS, "flash_decode")
_SCORED = tuple(call for call in CALLS if call != _SDPA)
# Calls that take q, k and v in separate tensors.
_SEPARATE = tuple(call for call in CALLS if "packed_func" not in call)

# Head dims that are a multiple of 8, and others, some of which need the widest tiles.
_HEAD_DIMS = (8, 16, 32, 40, 64, 64, 72, 80, 96, 128)
_RARE_HEAD_DIMS = (1, 3, 7, 33, 100, 192, 256, 320, 512, 576)
_LENGTHS = (0, 1, 2, 7, 8, 9, 16, 31, 32, 33, 63, 64, 65, 100)
_POISONS = ("nan in q", "nan in k", "nan in v", "inf in k", "nan in attn_bias", "inf in attn_bias")


def _head_dim(r: random.Random, case: "Attention") -> int:
    if case.values_in_keys and r.random() < 0.2:
        return 576
    dim = r.choice(_RARE_HEAD_DIMS if r.random() < 0.15 else _HEAD_DIMS)
    return min(dim, 512) if case.in_one_tensor else dim


def _v_head_dim(r: random.Random, case: "Attention") -> int:
    if case.values_in_keys:
        return min(r.choice((case.head_dim, max(case.head_dim - 32, 1))), 512)
    if r.random() < 0.1 and not case.in_one_tensor:
        return r.choice(_HEAD_DIMS)
    return min(case.head_dim, 512)


def _length(r: random.Random) -> int:
    return r.choice(_LENGTHS) if r.random() < 0.6 else r.randint(1, 90)


def _queries(r: random.Random, case: "Attention") -> int:
    if case.call in _DECODES and r.random() < 0.8:
        return r.choice((1, 1, 2, 5, 16))
    return _length(r)


def _keys(r: random.Random, case: "Attention", queries: int) -> int:
    if "qkvpacked" in case.call:
        return queries
    return r.randint(1, 300) if case.call in _DECODES and r.random() < 0.5 else _length(r)


def _pairs(r: random.Random, case: "Attention") -> tuple[tuple[int, int], ...]:
    queries = [_queries(r, case) for _ in range(r.choice((1, 1, 2, 3)))]
    return tuple((n, _keys(r, case, n)) for n in queries)


def _some_keys(r: random.Random, case: "Attention") -> tuple[int, ...]:
    return tuple(r.randint(0, n) for _, n in case.sequences)


def _limit(least: int) -> Draw:
    return lambda r, case: r.randint(least, max(case.longest[1], 4))


def _mask(*dtypes: str) -> Draw:
    def draw(r: random.Random, case: Any) -> str:
        return f"{r.choice(dtypes)} {''.join(letter for letter in 'bhqk' if r.random() < 0.6)}"

    return draw


def _tree(r: random.Random, case: "Attention") -> str:
    possible = case.listed is None and not any(case.tree_conflicts().values())
    return r.choice(("parents", "tree_mask")) if possible else ""


def _columns(r: random.Random, case: "Attention") -> int:
    return max(2, r.choice((2, case.head_dim // 4 * 2, case.head_dim // 2 * 2)))


_LAYOUTS = one_of(
    *((), (), ("padded 3",), ("padded 8",), ("order 021",), ("order 021", "padded 8")),
    *(("order 210", "padded 5"), ("order 120",), ("repeated 0",), ("repeated 1", "padded 8")),
)
_ROW_LAYOUTS = one_of((), ("padded 3",), ("order 10",), ("order 10", "padded 8"), ("repeated 1",))
_if_rotated = partial(field, calls=_ROTATED, when=lambda case: case.rotary)
_if_listed = partial(field, calls=("flash_decode",), when=lambda case: case.listed is not None)


def _operand_layout(
    packed: Callable[["Attention"], Any] = lambda case: case.is_packed and not case.cache,
    when: Callable[["Attention"], Any] = lambda case: True,
) -> Any:
    def draw(r: random.Random, case: "Attention") -> Any:
        return (_ROW_LAYOUTS if packed(case) else _LAYOUTS)(r, case)

    return field((), draw, calls=_SEPARATE, when=when)


@dataclass(frozen=True)
class Attention(Case):
    """One call of attention.

    Attributes: packed: the numbers of queries and keys of each sequence, for calls with packed
        sequences; then batch, q_length and kv_length are not used. q_lengths: the queries of each
        sequence if only queries are packed; then q_length is not used. spare_rows: packed rows
        after the last sequence. attn_mask, attn_bias: a dtype, and the dimensions among b, h, q and
        k whose size is not 1, such as "bool hqk". alibi_slopes: "h" or "bh". learnable_sink: a
        dtype. rotary: the rotated tensors: "q", "k" or "qk". cache: "", "paged" or "indexed".
        format: "" or the format of a quantised cache, whose rows are rotated in blocks of
        `hadamard` columns. cache_dtype: the dtype of k and v, "" for that of q. values_in_keys: v
        is the first columns of k, as in MLA. listed: entries of each list of keys, of which one in
        five is -1. list_dims: those of "bh" along which lists differ. tree: "", or the argument
        that describes a random tree of the queries. tree_by_sequence: each sequence has a different
        tree. causal_bias: "", "upper_left" or "lower_right", an attn_mask of
        torch.nn.attention.bias. backward: also check the gradients, or that `backward` raises if
        the call has none. values: one of `tensors.KINDS`. poison: NaN or infinity in one element of
        a tensor. q_layout, ...: see `tensors`.
    """

    # Ops are drawn twice as often as functions.
    call: str = call(*OPS, *CALLS)
    batch: int = field(1, one_of(*[1, 1, 2, 3] * 12, 0), calls=_DENSE, varied=True)
    kv_heads: int = field(1, one_of(1, 1, 1, 2, 2))
    heads: int = field(
        1,
        lambda r, case: (
            case.kv_heads
            if "qkvpacked" in case.call
            else r.choice((1, 1, 1, 2, 3, 8 // case.kv_heads)) * case.kv_heads
        ),
    )
    q_lengths: tuple[int, ...] = field(
        (),
        lambda r, case: tuple(_queries(r, case) for _ in range(case.batch)),
        share=0.25,
        calls=_DECODES,
        varied=True,
    )
    q_length: int = field(1, _queries, calls=_DENSE, when=lambda c: not c.q_lengths, varied=True)
    kv_length: int = field(1, lambda r, c: _keys(r, c, c.q_length), calls=_DENSE, varied=True)
    values_in_keys: bool = field(False, chance(0.1), calls=_DECODES)
    head_dim: int = field(8, _head_dim)
    v_head_dim: int = field(8, _v_head_dim)
    packed: tuple[tuple[int, int], ...] = field((), _pairs, calls=_PACKED, varied=True)
    spare_rows: int = field(
        0, one_of(0, 0, 3), calls=(*_PACKED, *_DECODES), when=lambda case: case.packs_queries
    )
    softmax_scale: float | None = field(None, one_of(None, None, 0.3, 1.0, 0.0, -0.2))
    causal: bool = field(False, chance(0.5))
    causal_bias: str = field("", one_of("upper_left", "lower_right"), share=0.2, calls=(_SDPA,))
    window_size_left: int = field(-1, _limit(0), share=0.25, calls=_SCORED, varied=True)
    window_size_right: int = field(-1, _limit(0), share=0.25, calls=_SCORED, varied=True)
    attention_chunk: int = field(0, _limit(1), share=0.25, calls=_SCORED, varied=True, least=0)
    q_offset: int | None = field(
        None,
        lambda r, case: r.randint(-case.longest[1] // 2 - 2, case.longest[1] + 2),
        share=0.25,
        calls=OPS,
        varied=True,
    )
    softcap: float = field(
        0.0, one_of(0.0, 0.0, 0.0, 1.5, 30.0), calls=_SCORED, least=0, feature=2.0
    )
    seqused_k: tuple[int, ...] | None = field(
        None, _some_keys, share=0.3, calls=(*OPS, *_PACKED_FUNCTIONS, _WITH_KVCACHE), varied=True
    )
    leftpad_k: tuple[int, ...] | None = field(
        None, _some_keys, share=0.2, calls=(*OPS, _WITH_KVCACHE), varied=True
    )
    attn_mask: str = field("", _mask("bool", "bool", *DTYPES), share=0.25, calls=(*OPS, _SDPA))
    attn_bias: str = field("", _mask(*DTYPES), share=0.2, calls=OPS)
    alibi_slopes: str = field("", one_of("h", "bh"), share=0.15, calls=_SCORED)
    learnable_sink: str = field("", one_of(*DTYPES), share=0.15, calls=_SCORED)
    rotary: str = field("", one_of("q", "k", "qk"), share=0.2, calls=_ROTATED)
    rotary_columns: int = _if_rotated(2, _columns)
    rotary_interleaved: bool = _if_rotated(False, chance(0.5))
    rotary_by_sequence: bool = _if_rotated(False, chance(0.4))
    dropout_p: float = field(
        0.0,
        one_of(*[0.0] * 6, 0.1, 0.6, 1.0),
        calls=tuple(call for call in CALLS if call not in _DECODES),
    )
    num_splits: int = field(0, one_of(0, 0, 1, 2, 3, 7, 40), calls=_DECODES)
    cache: str = field("", one_of("paged", "paged", "indexed"), share=0.5, calls=_CACHED)
    page: int = field(
        16, one_of(1, 3, 5, 8, 16, 24, 64), calls=_CACHED, when=lambda case: case.cache
    )
    format: str = field("", one_of(*FORMATS), share=0.5, calls=_STORED)
    v_format: str = value_formats(calls=_STORED)
    hadamard: int = field(0, rotated_blocks, share=0.3, calls=_DECODES)
    cache_dtype: str = field(
        "",
        one_of(*DTYPES[1:]),
        share=0.4,
        calls=_STORED,
        when=lambda case: case.dtype == "float32" and not case.format,
    )
    listed: int | None = field(
        None, one_of(0, 1, 3, 8, 17, 40, 70), share=0.3, calls=("flash_decode",)
    )
    kv_block_size: int = _if_listed(1, one_of(1, 1, 1, 5, 8, 32, 128))
    q_block_size: int = _if_listed(
        1, lambda r, case: 1 if case.q_lengths else r.choice((1, 1, 2, 7))
    )
    list_dims: str = _if_listed(
        "", lambda r, case: "h" if case.q_lengths else r.choice(("bh", "b", "h"))
    )
    tree: str = field("", _tree, share=0.3, calls=_DECODES)
    tree_by_sequence: bool = field(
        False, chance(0.5), calls=_DECODES, when=lambda case: case.tree and not case.q_lengths
    )
    backward: bool = field(
        False,
        lambda r, case: "bwd" in case.call or r.random() < (0.5 if case.differentiable else 0.1),
    )
    through_lse: bool = field(
        False, chance(0.4), calls=OPS, when=lambda case: case.backward and case.differentiable
    )
    exact_delta: bool = field(False, chance(0.7), calls=_BACKWARDS)
    values: str = kinds()
    poison: str = field(
        "",
        one_of(*_POISONS),
        share=0.2,
        calls=tuple(call for call in CALLS if call not in _BACKWARDS),
        when=lambda case: not case.backward,
        varied=True,
    )
    q_layout: tuple[str, ...] = _operand_layout(lambda case: case.packs_queries)
    k_layout: tuple[str, ...] = _operand_layout()
    v_layout: tuple[str, ...] = _operand_layout(when=lambda case: not case.values_in_keys)
    mask_layout: tuple[str, ...] = layout(
        *(("padded 3",), ("order 0132",), ("order 3210", "padded 1")),
        calls=(*OPS, _SDPA),
        when=lambda case: case.attn_mask or case.attn_bias,
    )

    ALSO_RAISES: ClassVar[dict[str, tuple[type[Exception], ...]]] = {_SDPA: (RuntimeError,)}
    UNREAD_ON_MPS: ClassVar[tuple[str, ...]] = ("lengths", "a tree of more tokens than keys")
    OF_SEQUENCES: ClassVar[tuple[str, ...]] = (
        *("batch", "packed", "q_lengths", "seqused_k", "leftpad_k"),
    )
    SIZES: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("heads", "kv_heads"),
        ("head_dim", "v_head_dim", "rotary_columns"),
        ("head_dim", "v_head_dim"),
        ("q_length", "kv_length"),
    )

    @property
    def is_packed(self) -> bool:
        return self.call in _PACKED

    @property
    def packs_queries(self) -> bool:
        """True if queries are packed, with their keys or alone."""
        return self.is_packed or bool(self.q_lengths)

    @property
    def in_one_tensor(self) -> bool:
        """True if the call takes k and v, or q, k and v, in one tensor."""
        return self.call not in _SEPARATE

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        if self.is_packed:
            return self.packed
        return tuple((n, self.kv_length) for n in self.q_lengths or (self.q_length,) * self.batch)

    @property
    def longest(self) -> tuple[int, int]:
        """The largest number of queries and of keys of a sequence."""
        sequences = self.sequences or ((self.q_length, self.kv_length),)
        queries, keys = zip(*sequences, strict=True)
        return max(queries), max(keys)

    @property
    def differentiable(self) -> bool:
        """True if the call has gradients; if not, `backward` raises."""
        cached = self.cache or self.format or self.cache_dtype
        listed = self.listed is not None and not self.q_lengths
        return not cached and (self.call not in _DECODES or listed)

    def conflicts(self) -> dict[str, Any]:
        layouts = (*self.q_layout, *self.k_layout, *self.v_layout)
        poisoned = self.poison.partition(" in ")[2]
        return {
            "calls with packed sequences need packed, other calls do not take it": self.is_packed
            != bool(self.packed),
            "keys and values in one tensor need one head dim": self.in_one_tensor
            and self.v_head_dim != self.head_dim,
            "queries and keys in one tensor need the same heads and lengths": "qkvpacked"
            in self.call
            and (self.kv_heads != self.heads or any(q != k for q, k in self.sequences)),
            "seqused_k and leftpad_k need one length for each sequence": any(
                lengths is not None and len(lengths) != len(self.sequences)
                for lengths in (self.seqused_k, self.leftpad_k)
            ),
            "q_lengths needs one length for each sequence": self.q_lengths
            and len(self.q_lengths) != self.batch,
            "lists of packed queries have no batch": self.q_lengths and "b" in self.list_dims,
            "kv_heads must be at least 1 and at most heads": 0 < self.heads
            and not 1 <= self.kv_heads <= self.heads,
            "page must be at least 1": self.page < 1,
            "packed keys without a cache have no format": self.format
            and not self.cache
            and self.is_packed,
            "flash_attn_varlen_func has no cache_batch_idx": self.call == "flash_attn_varlen_func"
            and self.cache == "indexed",
            "values in keys must not be wider than keys, nor poisoned alone": self.values_in_keys
            and (self.v_head_dim > self.head_dim or poisoned == "v"),
            "causal_bias takes the place of attn_mask": self.causal_bias and self.attn_mask,
            "lists need queries and keys": (self.listed or 0) > 0 and min(self.longest) == 0,
            **partial_groups(self),
            "torch's masks are of bool, float32 or the queries' dtype": self.call == _SDPA
            and self.attn_mask
            and self.attn_mask.split()[0] not in ("bool", "float32", self.dtype),
            "a backward op needs backward": "bwd" in self.call and not self.backward,
            "the poisoned tensor has no elements": poisoned and not self._has_elements(poisoned),
            "the cache would spread a poisoned value to others": (
                poisoned == "v" or (poisoned == "k" and self.values_in_keys)
            )
            and (self.format or (self.cache and self.is_packed)),
            "repeated tensors cannot be poisoned in one element": poisoned
            and any(word.startswith("repeated") for word in layouts),
        }

    def _has_elements(self, name: str) -> bool:
        """True if q, k, v or attn_bias has elements for every sequence."""
        if name == "attn_bias":
            sizes = [self.heads, len(self.sequences), *(min(pair) for pair in self.sequences)]
            return self.attn_bias != "" and all(sizes)
        lengths = [pair[name != "q"] for pair in self.sequences]
        return all([self.heads, len(lengths), *lengths])

    def ways(self) -> tuple[str, ...]:
        if self.in_one_tensor:
            return ()
        names = {_SDPA: ("query", "key", "value"), _WITH_KVCACHE: ("q", "k_cache", "v_cache")}
        tensors = names.get(self.call, ("q", "k", "v"))
        dense = self.head_dim > 1 and self.v_head_dim > 1 and self.format == ""
        # Strides are ignored if there are no elements.
        rows = tuple(name for name in tensors if dense and self._has_elements(name[0]))
        ways = invalidation.ways(tensors, rows)
        if self.call == _SDPA:  # it takes any number of dimensions
            ways = tuple(way for way in ways if not way.startswith("dimensions"))
        return ways

    def tree_conflicts(self) -> dict[str, Any]:
        """Reasons why the fields are illegal with a tree, and whether each holds."""
        ends = self.seqused_k or [keys for _, keys in self.sequences]
        pads = self.leftpad_k or [0] * len(self.sequences)
        return {
            "a tree of queries at an offset": self.q_offset is not None,
            "slopes with a tree": self.alibi_slopes,
            "a tree of too many tokens": self.longest[0] > 64,
            "a tree of more tokens than keys": any(
                end - pad < queries
                for (queries, _), end, pad in zip(self.sequences, ends, pads, strict=False)
            ),
        }

    def illegal(self) -> dict[str, Any]:
        keys = self.longest[1]
        capacity = -(-keys // self.page) * self.page if self.cache == "paged" else keys
        return {
            "heads that kv_heads does not divide": self.heads % max(self.kv_heads, 1),
            "head dim": not (1 <= self.head_dim <= 576 and 1 <= self.v_head_dim <= 512),
            "dtype": self.dtype not in DTYPES,
            **{
                f"{name} below {least}": getattr(self, name) < least
                for name, least in with_metadata(Attention, "least").items()
            },
            "dropout_p": not 0 <= self.dropout_p <= 1,
            "num_splits": not 0 <= self.num_splits <= 1024,
            "rotated columns": self.rotary and not 2 <= self.rotary_columns <= self.head_dim,
            "causal with window_size_right": self.causal
            and self.window_size_right > 0
            and self.call in OPS,
            "an additive mask with a bias": self.attn_bias
            and self.attn_mask
            and not self.attn_mask.startswith("bool"),
            "rotated keys in a format or another dtype": (self.format or self.cache_dtype)
            and "k" in self.rotary,
            **wrong_rotation(self),
            "lists of keys with a mask, a bias or slopes": self.listed is not None
            and (self.attn_mask or self.attn_bias or self.alibi_slopes),
            "lists of keys with a tree": self.listed is not None and self.tree,
            **(self.tree_conflicts() if self.tree else {}),
            "block sizes of lists": not 1 <= self.kv_block_size <= 128
            or self.q_block_size < 1
            or (self.q_lengths and self.q_block_size > 1),
            "rotated keys in a decode": self.call == "flash_decode" and "k" in self.rotary,
            "a mask with is_causal": self.call == _SDPA
            and self.causal
            and (self.attn_mask or self.causal_bias),
            "lengths": any(
                not 0 <= n <= (k if self.is_packed else capacity)
                for lengths in (self.seqused_k, self.leftpad_k)
                for n, (_, k) in zip(lengths or (), self.sequences, strict=False)
            ),
        }

    def wrong(self) -> list[dict[str, Any]]:
        def of_each(name: str, length: int) -> dict[str, Any]:
            return {name: (length,) * len(self.sequences)}

        changes: list[dict[str, Any]] = [
            {"heads": 5, "kv_heads": 2},
            {"dtype": "float64"},
            {"head_dim": 577},
            {"v_head_dim": 513},
            *({name: x - 1} for name, x in with_metadata(Attention, "least").items()),
            {"dropout_p": 1.5},
            {"num_splits": 1025},
            {"num_splits": -1},
            {"hadamard": 16},
            {"hadamard": 64, "format": ""},
            {"rotary": "q", "rotary_columns": 0},
            {"rotary": "q", "rotary_columns": 400, "head_dim": 64},
            {"causal": True, "window_size_right": 3},
            {"attn_mask": "float32 qk", "attn_bias": "float32 qk"},
            {"causal": True, "attn_mask": "bool qk"},
            {"causal": True, "causal_bias": "upper_left"},
            {"cache_dtype": "float16", "rotary": "k"},
            {"listed": 3, "attn_mask": "bool qk"},
            {"listed": 3, "alibi_slopes": "h"},
            {"listed": 3, "kv_block_size": 129},
            {"listed": 3, "q_block_size": 0},
            {"tree": "parents", "q_offset": 1},
            {"tree": "parents", "alibi_slopes": "h"},
            {"tree": "parents", "listed": 3},
            {"tree": "tree_mask", "q_length": 65},
            {"tree": "parents", "q_length": 65, "batch": 0},
            {"tree": "tree_mask", "q_length": 9, "kv_length": 8, "seqused_k": None},
            {"rotary": "k"},
            *(of_each(name, n) for name in ("seqused_k", "leftpad_k") for n in (-1, 100000)),
        ]
        return [change | {"poison": ""} for change in changes]
