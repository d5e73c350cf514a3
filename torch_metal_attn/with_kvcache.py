"""flash-attn's `flash_attn_with_kvcache`, on the ops of `metal_attn` that take a cache."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from typing_extensions import Unpack

from torch_metal_attn.call.arguments import (
    NO_WINDOW,
    Window,
    as_bool,
    as_int,
    check_rank,
    first_options,
    lengths_tensor,
    only_given,
    to_bhld,
    window,
)
from torch_metal_attn.call.autocast import autocast
from torch_metal_attn.call.options import NewerOptions, check_newer, named_options, op_options
from torch_metal_attn.ops import fast_path
from torch_metal_attn.ops.differentiation import check_writes, forward_only, forward_refusal
from torch_metal_attn.ops.fast_path import swapped
from torch_metal_attn.ops.names import ArgumentNames
from torch_metal_attn.quantisation import ELEMENTS, check_hadamard, columns
from torch_metal_attn.quantisation import hadamard as rotated_in_blocks

_FLASH_FWD = torch.ops.metal_attn.flash_fwd.default
_FLASH_DECODE = torch.ops.metal_attn.flash_decode.default
_DECODE_STEP = torch.ops.metal_attn.decode_step.default
_APPEND_KV = torch.ops.metal_attn.append_kv.default
_EXPLAIN = torch.ops.metal_attn_explain  # the same ops' checks, without a launch

_FORWARD_ONLY = ("flash_attn_with_kvcache", "use flash_attn_func, or call it under torch.no_grad()")

_CACHE_NAMES = ArgumentNames({"leftpad_k": "cache_leftpad"}, blhd=True)
# For ops whose keys are the cache.
_CACHED_NAMES = ArgumentNames(
    {"k": "k_cache", "v": "v_cache", "seqused_k": "cache_seqlens", **_CACHE_NAMES.names},
    blhd=True,
)

# Calls with one of these options are a step even if there are no new rows.
_STEP_ALONE = frozenset(("cu_seqlens_q", "parents", "tree_mask"))
# Up to this many queries per sequence, reading the keys limits the speed. flash_decode reads each
# key once, and splits the keys over the GPU.
DECODE_QUERIES = 32
# The same limit for attention to a cache, as in the verification of speculative decoding.
VERIFY_QUERIES = 64
# flash_fwd may split the keys of calls with at most so many queries and at least so many keys.
SPLIT_QUERIES, SPLIT_KEYS = 512, 2048
_MAX_SPLITS = 1024  # kMaxSplits of csrc/


@named_options
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    parents: Tensor | None = None,
    tree_mask: Tensor | None = None,
    hadamard: int = 0,
    **newer: Unpack[NewerOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention to a cache, with the arguments of `flash_attn.flash_attn_with_kvcache` (2.x).

    If k and v are passed, they are first written IN PLACE after each sequence's keys. With up to 64
    queries per sequence the call is one dispatch, or two if the keys are split over the GPU. The
    last query is at the last key, including new keys: query i is at key index i + length - Lq.

    Args:
        q: (B, Lq, Hq, D) in float32, float16 or bfloat16.
        k_cache: (Bc, Lk, Hkv, D), or with block_table (pages, page, Hkv, D). It has q's dtype, is
            float16 or bfloat16 with q in float32 (then `out` is float32, and k and v are rounded as
            they are written), or is quantised: int8, uint8 or float8_e4m3fn, see `quantisation`.
            Autocast casts q, k and v, and no cache: it must have autocast's dtype.
        v_cache: as k_cache, with Dv.
        k: (B, Lnew, Hkv, D) in q's dtype, or None.
        v: (B, Lnew, Hkv, Dv), or None.
        rotary_cos, rotary_sin: (rows, R/2), R <= D, only with k: k is rotated by the rows from
            cache_seqlens on, even if cache_leftpad is given. If causal or with a window, q
            is rotated by the same rows; otherwise all of q is rotated by the first of them.
        cache_seqlens: int or (B,) int32: the number of keys in the cache before the call. None is
            the entire cache, and is not allowed with k.
        cache_batch_idx: (B,) int32: the row of the cache of each sequence.
        cache_leftpad: (B,) int32: the number of keys to skip at the start. With attention_chunk the
            first chunk begins after them.
        block_table: (B, max_blocks) int32: key i of sequence b is row i % page of page
            block_table[b, i // page].
        rotary_interleaved: columns (2c, 2c + 1) form a pair, otherwise (c, c + R/2).
        num_splits: number of parts that the keys are split into, in 1..1024; 0 lets the op choose.
        return_softmax_lse: also return the log-sum-exp.
        k_scale, v_scale: scales of a quantised cache: (Bc, Lk, Hkv, D/32), or for fp8_e4m3 (Hkv,)
            or (B, Hkv).
        cu_seqlens_q: (B + 1,) int32: the sequences' numbers of queries differ, and queries are
            packed: q is (T, Hq, D), and k and v are (Tnew, Hkv, D). Sequence b has the rows from
            cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1, and may be empty.
        cu_seqlens_k_new: (B + 1,) int32: the same for k and v. None: they are packed as q is.
        max_seqlen_q: the most queries of a sequence, with cu_seqlens_q.
        parents: (Lq,) or (B, Lq) int32, or packed like q, (T,): the queries belong to the last
            keys, including new ones, and form a tree. Each query sees all keys before the tree,
            itself and its ancestors. A parent is an earlier query of the sequence, or -1. A
            sequence has at most 64 queries.
        tree_mask: (Lq, Lq) or (B, Lq, Lq) bool, or packed (T, max_seqlen_q), instead of parents:
            the last keys that a query sees: itself, and all that its parent sees. New tokens of a
            tree are rotated by their depth, and windows count by depth. `causal` has no effect.
        hadamard: 32, 64 or 128: rows of the quantised cache, including new ones, are rotated in
            blocks of this many columns; see `quantisation`. 0: they are not rotated.
        The other arguments are those of `flash_attn_func`.

    Returns:
        out (B, Lq, Hq, Dv); with return_softmax_lse also softmax_lse (B, Hq, Lq), float32. With
        cu_seqlens_q they are (T, Hq, Dv) and (Hq, T).

    Raises: as `flash_attn_func`. There is no backward through a cache. If a tensor requires grad,
        `backward` raises NotImplementedError. The call itself raises it under torch.compile, in
        torch.func's transforms, and if new rows require grad and autograd cannot track the cache: a
        leaf that requires grad, or a view made by `unbind` or under `torch.no_grad()`. All checks
        precede the first write. Lengths, indices and pages are checked on the CPU, including that
        no row is written by one sequence and written or read by another. On mps, invalid ones give
        NaN rows, and no memory outside the cache is read or written. If a sequence writes a row
        that another one uses, the row has the value of either.
    """
    # Plain calls run an op with fewer arguments. A function for this test would cost time.
    one_length = None is cu_seqlens_q is cu_seqlens_k_new and max_seqlen_q is None
    no_tree = None is parents is tree_mask
    no_scores = not newer and alibi_slopes is None and type(softcap) is float and softcap == 0.0
    same_places = None is cache_batch_idx is cache_leftpad
    no_codes = None is k_scale is v_scale and type(hadamard) is int and hadamard == 0
    no_splits = type(num_splits) is int and num_splits == 0
    plain = one_length and no_tree and no_scores and same_places and no_codes and no_splits
    if plain and return_softmax_lse is False:
        try:
            out = _fast_with_kvcache(
                (q, k_cache, v_cache),
                () if k is None and v is None else (k, v),
                () if rotary_cos is None and rotary_sin is None else (rotary_cos, rotary_sin),
                *(cache_seqlens, block_table),
                first_options(softmax_scale, causal, window_size),
                rotary_interleaved,
            )
            if out is not None:
                return out
        except Exception as error:
            if not fast_path.refused(error):
                raise
    if newer:
        check_newer("flash_attn_with_kvcache", newer)
    query = _checked_query(q, k_cache, v_cache, cu_seqlens_q)
    packed = cu_seqlens_q is not None
    seqlens = lengths_tensor(cache_seqlens, q if cu_seqlens_q is None else cu_seqlens_q[1:])
    causal, limits = as_bool("causal", causal), window(window_size)
    return_softmax_lse = as_bool("return_softmax_lse", return_softmax_lse)
    score = {"softcap": softcap, "alibi_slopes": alibi_slopes, **newer}
    tree = only_given(parents=parents, tree_mask=tree_mask)
    options = op_options(q, 0.0, softmax_scale, causal, limits, score) | tree
    appends = k is not None or v is not None
    options |= _packing(cu_seqlens_q, max_seqlen_q, appends, cu_seqlens_k_new)
    call = _Call(
        (query, k_cache, v_cache),
        seqlens,
        few=packed or bool(tree) or q.shape[1] <= VERIFY_QUERIES,
        options=options,
        cache=only_given(
            leftpad_k=cache_leftpad,
            block_table=block_table,
            cache_batch_idx=cache_batch_idx,
            k_scale=to_bhld("k_scale", k_scale),
            v_scale=to_bhld("v_scale", v_scale),
        ),
        hadamard=as_int("hadamard", hadamard),
        num_splits=as_int("num_splits", num_splits),
    )
    rotates = rotary_cos is not None or rotary_sin is not None
    if appends:
        call.new = _new_rows(k, v, seqlens, packed)
    elif rotates:
        raise ValueError(
            "rotary_cos or rotary_sin is given without k and v; they only rotate new keys"
        )
    if rotates:
        interleaved = as_bool("rotary_interleaved", rotary_interleaved)
        call.rotary = {
            "rotary_cos": rotary_cos,
            "rotary_sin": rotary_sin,
            "rotary_interleaved": rotary_cos is not None and interleaved,
            "rotate_q_by_token": bool(tree) or causal or limits != NO_WINDOW,
        }
        if cache_leftpad is not None:
            call.rotary["rotary_from_leftpad"] = False
    out, lse = call.run()
    return (out, lse) if return_softmax_lse else out


@dataclass
class _Call:
    """A call in the ops' form. few: one op takes all queries and new rows."""

    operands: tuple[Tensor, Tensor, Tensor]
    seqlens: Any  # None only without new rows
    few: bool
    options: dict[str, Any]
    cache: dict[str, Any]
    hadamard: int
    num_splits: int
    new: tuple[Tensor, ...] = ()
    rotary: dict[str, Any] = field(default_factory=dict)

    def run(self) -> tuple[Tensor, Tensor]:
        if not self.few:
            self._check_decode_options()
        if self._is_one_step():
            out, lse = self._step(_DECODE_STEP)
            return swapped(out), lse
        q, seqlens = self.operands[0], self.seqlens
        if self.new:
            seqlens = seqlens + self.new[0].shape[1]
            self._check(seqlens)
            q = q if self.rotary.get("rotary_cos") is None else q.clone()
            self._append(_APPEND_KV, q)
        return self._attend(q, seqlens)

    def _is_one_step(self) -> bool:
        """True if one op appends and attends."""
        if not self.new or not self.few:
            return False
        return self.new[0].numel() > 0 or not _STEP_ALONE.isdisjoint(self.options)

    def _check_decode_options(self) -> None:
        if not 0 <= self.num_splits <= _MAX_SPLITS:
            raise ValueError(
                f"num_splits is {self.num_splits}; it must be 0 (chosen for you) or in "
                f"1..{_MAX_SPLITS}"
            )
        q, k_cache, v_cache = self.operands
        check_hadamard(self.hadamard, {"q": q.shape[-1]})
        if self.hadamard and k_cache.dtype in ELEMENTS:
            raise ValueError(
                f"hadamard is {self.hadamard} and k_cache is not quantised; only rows that are "
                "quantised are rotated"
            )
        if self.hadamard:
            check_hadamard(self.hadamard, {"v_cache": columns(v_cache, self.cache.get("v_scale"))})

    def _check(self, after: Tensor) -> None:
        """Raise what the append, or the attention after it, would raise."""
        q = self.operands[0]
        forward_refusal(*_FORWARD_ONLY, self._named(q))
        if torch.compiler.is_compiling() or isinstance(q, FakeTensor):
            return  # the ops of a graph check shapes while they are traced
        if self.new[0].numel() > 0:
            # Only this op checks that no sequence reads rows that another one writes.
            self._step(_EXPLAIN.decode_step)
        check_writes("append_kv", *self._append(_EXPLAIN.append_kv, q))
        op, cache = self._attention_op()
        self._attention(getattr(_EXPLAIN, op._opname), q, after, cache)

    def _step(self, op: Any) -> Any:
        """Run `decode_step`, or only its checks."""
        q, *caches = self.operands
        options = self.options | self.rotary | self._decode_options()
        return _CACHE_NAMES.run(op, (*map(swapped, (q, *self.new, *caches)), self.seqlens), options)

    def _append(self, op: Any, q: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Run `append_kv`, which rotates q in place, or only its checks. Returns its arguments."""
        arguments = (*map(swapped, (*self.new, *self.operands[1:])), self.seqlens)
        options = self.rotary | self.cache | _unless_zero(hadamard=self.hadamard)
        if self.rotary.get("rotary_cos") is not None:
            options["q"] = swapped(q)
        _CACHE_NAMES.run(op, arguments, options)
        return arguments, options

    def _attend(self, q: Tensor, seqlens: Any) -> tuple[Tensor, Tensor]:
        """Attention to the rows in the cache. q is already rotated."""
        op, cache = self._attention_op()
        blocks = self.hadamard if op is _FLASH_FWD else 0  # flash_decode rotates by itself
        q = rotated_in_blocks(q, blocks) if blocks else q
        out, lse = forward_only(
            *_FORWARD_ONLY, self._named(q), lambda: self._attention(op, q, seqlens, cache)
        )
        return rotated_in_blocks(swapped(out), blocks) if blocks else swapped(out), lse

    def _attention_op(self) -> tuple[Any, dict[str, Any]]:
        """The op and its options of the cache."""
        q, k_cache, _ = self.operands
        table = self.cache.get("block_table")
        capacity = k_cache.shape[1] * (1 if table is None else table.shape[1])
        # flash_fwd takes no number of splits, and may split only such calls.
        may_split = q.shape[1] <= SPLIT_QUERIES and capacity >= SPLIT_KEYS
        if self.few or self.num_splits > 1 or (self.num_splits == 1 and may_split):
            return _FLASH_DECODE, self._decode_options()
        return _FLASH_FWD, self.cache

    def _attention(self, op: Any, q: Tensor, seqlens: Any, cache: dict[str, Any]) -> Any:
        options = self.options | cache | only_given(seqused_k=seqlens)
        return _CACHED_NAMES.run(op, (*map(swapped, (q, *self.operands[1:])),), options)

    def _named(self, q: Tensor) -> dict[str, Any]:
        _, k_cache, v_cache = self.operands
        return {"q": q, "k_cache": k_cache, "v_cache": v_cache} | self.options | self.cache

    def _decode_options(self) -> dict[str, Any]:
        return self.cache | _unless_zero(hadamard=self.hadamard, num_splits=self.num_splits)


def _unless_zero(**options: int) -> dict[str, int]:
    return {name: value for name, value in options.items() if value}


def _checked_query(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cu_seqlens_q: Tensor | None
) -> Tensor:
    """q, cast by autocast. Caches are not cast, so they must have its dtype."""
    check_rank("q", q, "(B, L, H, D)" if cu_seqlens_q is None else "(T, H, D)")
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    for name, cache in caches.items():
        check_rank(name, cache, "(B, L, H, D)")
    (query,) = autocast(q)
    for name, cache in caches.items():
        if query.dtype != q.dtype and cache.dtype in ELEMENTS and cache.dtype != query.dtype:
            raise ValueError(
                f"{name} has dtype {cache.dtype}, and autocast casts q, k and v to {query.dtype}: "
                "make the caches in that dtype, or call it where autocast is off"
            )
    return query


def _packing(
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int | None,
    appends: bool,
    cu_seqlens_k_new: Tensor | None,
) -> dict[str, Any]:
    if cu_seqlens_k_new is not None and (cu_seqlens_q is None or not appends):
        missing = "cu_seqlens_q" if cu_seqlens_q is None else "k and v"
        raise ValueError(f"cu_seqlens_k_new is given without {missing}; it is of packed new rows")
    if (cu_seqlens_q is None) != (max_seqlen_q is None):
        raise ValueError("only one of cu_seqlens_q and max_seqlen_q is given; give both or neither")
    if cu_seqlens_q is None or max_seqlen_q is None:
        return {}
    longest = as_int("max_seqlen_q", max_seqlen_q)
    options: dict[str, Any] = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": longest}
    return options | only_given(cu_seqlens_k_new=cu_seqlens_k_new)


def _fast_with_kvcache(
    caches: tuple[Tensor, ...],
    new: tuple[Any, ...],
    tables: tuple[Any, ...],
    cache_seqlens: int | Tensor | None,
    block_table: Tensor | None,
    first: tuple[Any, ...],
    rotary_interleaved: bool,
) -> Tensor | None:
    """Run a plain call by an op of `fast_path`; None for others. caches: q, k_cache, v_cache."""
    q, k_cache, v_cache = caches
    pages = () if block_table is None else (block_table,)
    if (
        not fast_path.is_usable(*caches, *new, *tables, *pages)
        or q.dim() != 4
        or q.size(1) > VERIFY_QUERIES
        or (tables and not new)
        or (new and cache_seqlens is None)
    ):
        return None
    seqlens = cache_seqlens
    if type(seqlens) is not Tensor:
        seqlens = lengths_tensor(cache_seqlens, q)
    if not new:
        return fast_path.flash_attn_cached(*caches, seqlens, block_table, *first)
    if tables:
        interleaved = as_bool("rotary_interleaved", rotary_interleaved)
        scale, causal, left, right = first or (None, False, *NO_WINDOW)
        by_token = causal or left >= 0 or right >= 0
        first = (scale, causal, left, right, *tables, interleaved, by_token)
    return fast_path.flash_attn_step(q, *new, k_cache, v_cache, seqlens, block_table, *first)


def _new_rows(
    k: Tensor | None, v: Tensor | None, seqlens: Tensor | None, packed: bool
) -> tuple[Tensor, Tensor]:
    if k is None or v is None:
        raise ValueError("only one of k and v is given; give both or neither")
    for name, tensor in (("k", k), ("v", v)):
        check_rank(name, tensor, "(T, H, D)" if packed else "(B, L, H, D)")
    if seqlens is None:
        raise ValueError("cache_seqlens is None and k is given; say how many keys the cache holds")
    k, v = autocast(k, v)
    return k, v
