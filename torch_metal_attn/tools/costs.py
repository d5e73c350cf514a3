"""The fewest FLOPs and bytes that each op needs. All these formulas are in this file.

FLOPs are those of the matrix products, two per multiply-add; ops without products have none.
Attention needs 2 (D + Dv) for each head and each pair of a query and a key that it sees. Its
gradients need 2 (4 D + 3 Dv): the seven products of the two kernels (`flash_bwd_dq` three,
`flash_bwd_dkv` four). The gradients of a bias or slopes, and those of each load of a tensor that
score_mod captures, need 2 (D + Dv) more, because they compute scores and dP again. A mask or bias
saves no products. Repeated work is not counted: scores that are computed for each slice of a wide
head dim, and parts of tiles beyond an edge. Flex attention counts every pair in a listed block, and
`indices` every entry.

Bytes are those that must move between device memory and the kernel: every input once (only the key
and value rows that some query sees) and every result once. Partial results of splits are not
counted.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from torch_metal_attn.call.visibility import depths, tree_rows
from torch_metal_attn.quantisation import columns

_STATISTIC = torch.float32.itemsize  # bytes of an element of softmax_lse or delta


@dataclass(frozen=True)
class Cost:
    """The fewest FLOPs of matrix products, and the fewest bytes of device memory."""

    flops: int
    bytes: int

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.bytes + other.bytes)


@dataclass(frozen=True)
class Seen:
    """pairs: the number of (query, key it sees). keys: those from the first to the last seen."""

    pairs: int
    keys: int


def seen(
    q_length: int,
    kv_length: int,
    *,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    q_offset: int | None = None,
    seqused_k: int | None = None,
    leftpad_k: int = 0,
) -> Seen:
    """The counts of one head of one sequence for options of `flash_fwd`."""
    end = kv_length if seqused_k is None else min(seqused_k, kv_length)
    start = max(leftpad_k, 0)
    if q_offset is None:
        q_offset = (kv_length if seqused_k is None else seqused_k) - q_length
    right = 0 if causal else window_size_right
    if attention_chunk > 0:
        rows = np.arange(q_length, dtype=np.int64)
    else:  # first and last rows of the spans over which the counts are linear
        sides = (max(window_size_left, 0), -max(right, 0) - 1)
        breaks = (edge + side - q_offset for edge in (start, end) for side in sides)
        clamped = {min(max(row + more, 0), q_length) for row in breaks for more in (0, 1)}
        begins = np.array(sorted(clamped | {0, q_length}), dtype=np.int64)
        rows = np.stack([begins[:-1], begins[1:] - 1])
    position = rows + q_offset
    first, last = np.full_like(position, start), np.full_like(position, end)
    if window_size_left >= 0:
        first = np.maximum(first, position - window_size_left)
    if causal or window_size_right >= 0:
        last = np.minimum(last, position + right + 1)
    if attention_chunk > 0:
        chunk_start = position - (position - leftpad_k) % attention_chunk
        first = np.maximum(first, chunk_start)
        last = np.minimum(last, chunk_start + attention_chunk)
    visible = last > first
    if not visible.any():
        return Seen(0, 0)
    counts = np.where(visible, last - first, 0)
    if attention_chunk > 0:
        pairs = int(counts.sum())
    else:  # arithmetic series; in Python's ints, because twice the sum may exceed int64
        spans = zip(counts.sum(0).tolist(), np.diff(begins).tolist(), strict=True)
        pairs = sum(first_and_last * length for first_and_last, length in spans) // 2
    return Seen(pairs, int(last[visible].max() - first[visible].min()))


def attention_flops(pairs: int, head_dim: int, v_head_dim: int) -> int:
    """FLOPs of q k^T and of the weights' product with v, for the pairs of all heads."""
    return 2 * (head_dim + v_head_dim) * pairs


def gradient_flops(pairs: int, head_dim: int, v_head_dim: int) -> int:
    """FLOPs of `flash_bwd_dq` (scores, dP, dq) and `flash_bwd_dkv` (scores, dP, dv, dk)."""
    return 2 * (4 * head_dim + 3 * v_head_dim) * pairs


def cost(op: str, arguments: Mapping[str, Any]) -> Cost:
    """The cost of `torch.ops.metal_attn.<op>` with these arguments by name. None counts as missing.

    Lengths that are tensors are read, which waits for the GPU. If the lengths have no data, every
    key counts. Raises KeyError for an op without a formula.
    """
    args = {name: value for name, value in arguments.items() if value is not None}
    return _FORMULAS[op](args)


def bytes_of(tensor: Tensor) -> int:
    """Bytes of the tensor's elements; broadcast dimensions count once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride != 0 or size == 0 else 1
    return elements * tensor.itemsize


def row_bytes(x: Tensor, scale: Tensor | None) -> int:
    """Bytes of one row of keys or values in a cache, including its scales."""
    scale_bytes = 0 if scale is None or scale.dim() < 3 else scale.shape[-1] * scale.itemsize
    return x.shape[-1] * x.itemsize + scale_bytes


@dataclass(frozen=True)
class _Work:
    """The work of a call. pairs: those of all heads. keys: rows of keys of all KV heads."""

    pairs: int
    keys: int
    key_bytes: int
    head_dim: int
    v_head_dim: int
    other_bytes: int  # of the options that are tensors

    def flops(self, formula: Callable[[int, int, int], int]) -> int:
        return formula(self.pairs, self.head_dim, self.v_head_dim)


# Tensor arguments of the attention ops that the formulas count separately.
_COUNTED = frozenset(
    {"q", "k", "v", "out", "dout", "dlse", "softmax_lse", "delta", "k_scale", "v_scale"}
)


def _has_data(tensor: Tensor) -> bool:
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def in_keys(k: Tensor, v: Tensor) -> bool:
    """True if v's rows are the first columns of k's, as in MLA, so that k's bytes include v's."""
    if not _has_data(k):
        return v is k
    return v.data_ptr() == k.data_ptr() and v.stride() == k.stride()


def _numbers(tensor: Tensor | None) -> list[int] | None:
    if tensor is None or not _has_data(tensor):
        return None
    values: list[int] = tensor.tolist()
    return values


def _sequences(args: dict[str, Any]) -> list[tuple[int, int]]:
    """The numbers of queries and keys of each sequence."""
    q, k = args["q"], args["k"]
    queries = [q.shape[2]] * q.shape[0] if q.dim() == 4 else _packed_lengths(args, "q")
    if "cu_seqlens_k" in args:
        return [*zip(queries, _packed_lengths(args, "k"), strict=True)]
    pages = args.get("block_table")
    kv_length = k.shape[2] if pages is None else k.shape[2] * pages.shape[1]
    return [(length, kv_length) for length in queries]


def _packed_lengths(args: dict[str, Any], side: str) -> list[int]:
    """The lengths of packed sequences; without data, the longest length for each."""
    bounds = args[f"cu_seqlens_{side}"]
    ends = _numbers(bounds)
    if ends is None:
        return [args.get(f"max_seqlen_{side}", 0)] * (len(bounds) - 1)
    return [end - begin for begin, end in pairwise(ends)]


def _depths(args: dict[str, Any], b: int, tokens: int) -> list[int]:
    """The depths of sequence b's new tokens in their tree. A tree without data is a chain."""
    name = "parents" if "parents" in args else "tree_mask"
    tree: Tensor = args[name]
    if not tokens or not _has_data(tree):
        return [*range(tokens)]
    if "cu_seqlens_q" in args:
        first = int(args["cu_seqlens_q"][b])
        tree = tree[first : first + tokens]
        tree = tree[:, :tokens] if name == "tree_mask" else tree
    shown = tree_rows(*((tree, None) if name == "parents" else (None, tree)))
    assert shown is not None
    depths_of_tree: list[int] = depths(shown)[b % len(shown)].tolist()
    return depths_of_tree


_VISIBILITY = ("causal", "window_size_left", "window_size_right", "attention_chunk", "q_offset")


def _work(args: dict[str, Any]) -> _Work:
    q, k, v = args["q"], args["k"], args["v"]
    heads, kv_heads = q.shape[1], k.shape[1]
    options = {name: args[name] for name in _VISIBILITY if name in args}
    is_tree = "parents" in args or "tree_mask" in args
    if is_tree:
        options |= {"causal": True}
    used, padding = (_numbers(args.get(name)) for name in ("seqused_k", "leftpad_k"))
    counts: dict[tuple[int, ...], Seen] = {}
    pairs = keys = 0
    for b, (q_length, kv_length) in enumerate(_sequences(args)):
        length = kv_length if used is None else used[b]
        first = 0 if padding is None else padding[b]
        sizes = (q_length, kv_length, length, first)
        if sizes not in counts:
            counts[sizes] = seen(q_length, kv_length, **options, seqused_k=length, leftpad_k=first)
        keys += counts[sizes].keys * kv_heads
        if not is_tree:
            pairs += counts[sizes].pairs * heads
            continue
        # A token sees as many keys as the token at the same depth of a chain.
        for depth in _depths(args, b, q_length):
            end = length - q_length + depth + 1
            pairs += seen(1, kv_length, **options, seqused_k=end, leftpad_k=first).pairs * heads
    pairs = round(pairs * listed_share(args))
    if "indices" in args:
        pairs, keys = _listed_work(args, keys)
    scales = args.get("k_scale"), args.get("v_scale")
    by_row = row_bytes(k, scales[0]) + (0 if in_keys(k, v) else row_bytes(v, scales[1]))
    by_head = sum(scale.nbytes for scale in scales if scale is not None and scale.dim() < 3)
    return _Work(
        pairs=pairs,
        keys=keys,
        key_bytes=keys * by_row + by_head,
        head_dim=q.shape[-1],
        v_head_dim=columns(v, scales[1]),
        other_bytes=sum(
            bytes_of(value)
            for name, value in args.items()
            if isinstance(value, Tensor) and name not in _COUNTED
        )
        + sum(bytes_of(tensor) for tensor in args.get("captures", ())),
    )


def listed_share(args: Mapping[str, Any]) -> float:
    """The share of a BlockMask's blocks that are listed; 1 without lists, or without data."""
    counts = args.get("kv_num_blocks")
    if counts is None or not _has_data(counts):
        return 1.0
    full = args.get("full_kv_num_blocks")
    blocks = -(-args["k"].shape[2] // args["kv_block_size"])
    share = counts.double().mean() + (0.0 if full is None else full.double().mean())
    return float(share) / blocks if counts.numel() and blocks else 0.0


def _listed_work(args: Mapping[str, Any], keys: int) -> tuple[int, int]:
    """Pairs of all heads, and at most `keys` rows of all KV heads, for `indices`."""
    q, indices = args["q"], args["indices"]
    batch = 1 if "cu_seqlens_q" in args else q.shape[0]
    shared = batch * args["k"].shape[1] / max(indices.shape[:2].numel(), 1)
    block, rows = args.get("kv_block_size", 1), _rows(q) / max(indices.shape[:3].numel(), 1)
    ends = _numbers(args.get("cu_seqlens_q", torch.tensor([0, indices.shape[2]])))
    if not _has_data(indices) or ends is None:
        return round(indices.numel() * block * rows), keys
    by_sequence = (indices[:, :, a:b].flatten(0, 1).flatten(1) for a, b in pairwise(ends))
    lists = [one for each in by_sequence for one in each]
    distinct = sum(len(one[one >= 0].unique()) for one in lists) * block
    entries = int((indices >= 0).sum())
    return round(entries * block * rows), min(keys, round(distinct * shared))


def _rows(q: Tensor) -> int:
    return q.shape[:-1].numel()


def _forward(args: dict[str, Any]) -> Cost:
    q, work = args["q"], _work(args)
    out = _rows(q) * work.v_head_dim * q.itemsize
    moved = q.nbytes + work.key_bytes + work.other_bytes + out + _rows(q) * _STATISTIC
    return Cost(work.flops(attention_flops), moved)


def _backward(args: dict[str, Any]) -> Cost:
    q, k, v, work = args["q"], args["k"], args["v"], _work(args)
    out = _rows(q) * work.v_head_dim * q.itemsize
    # out, dout, softmax_lse and dlse are read, and delta is written.
    statistics = (3 if "dlse" in args else 2) * _rows(q) * _STATISTIC
    read = q.nbytes + work.key_bytes + work.other_bytes + 2 * out
    written = q.nbytes + k.nbytes + v.nbytes
    return Cost(work.flops(gradient_flops), read + statistics + written)


def _score_gradients(args: dict[str, Any], result: int) -> Cost:
    """The cost of kernels that compute scores and dP again and sum the scores' gradients."""
    q, work = args["q"], _work(args)
    dout = _rows(q) * work.v_head_dim * q.itemsize
    read = q.nbytes + work.key_bytes + work.other_bytes + dout + 2 * _rows(q) * _STATISTIC
    return Cost(work.flops(attention_flops), read + result)


def _gradient_of(*names: str) -> Callable[[dict[str, Any]], Cost]:
    """The formula of the gradient of the first of these arguments that is present."""
    return lambda args: _score_gradients(
        args, next((args[name].nbytes for name in names if name in args), 0)
    )


def _captures_gradient(args: dict[str, Any]) -> Cost:
    """One kernel for each load of a captured tensor that has a gradient."""
    loaded = [args["captures"][i] for i in args.get("share_captures", ())]
    return sum((_score_gradients(args, x.numel() * _STATISTIC) for x in loaded), start=Cost(0, 0))


def _append(args: dict[str, Any]) -> Cost:
    """Reads new rows and writes them in the cache's format. With tables it rotates q in place."""
    moved = 0
    for name in ("k",) if in_keys(args["k_cache"], args["v_cache"]) else ("k", "v"):
        new, cache = args[name], args[f"{name}_cache"]
        moved += new.nbytes + _rows(new) * row_bytes(cache, args.get(f"{name}_scale"))
    if "q" in args and "rotary_cos" in args:
        moved += 2 * args["q"].nbytes
    # Each new token reads one row of the tables. Packed rows are tokens.
    tokens = len(args["k"]) * (args["k"].shape[2] if args["k"].dim() == 4 else 1)
    tables = [args[name] for name in ("rotary_cos", "rotary_sin") if name in args]
    moved += sum(min(table.nbytes, _table_bytes(table, tokens, 1)) for table in tables)
    return Cost(0, moved)


def _step(args: dict[str, Any]) -> Cost:
    """`append_kv`, then attention to the cache. The attention rotates q as it reads it."""
    append = _append({name: value for name, value in args.items() if name != "q"})
    appended = {"k", "v", "k_cache", "v_cache", "rotary_cos", "rotary_sin", "cache_seqlens"}
    ends = args.get("cu_seqlens_k_new", args.get("cu_seqlens_q"))
    attention = {name: value for name, value in args.items() if name not in appended}
    attention |= {"k": args["k_cache"], "v": args["v_cache"]}
    new = args["k"].shape[2] if ends is None else ends.diff()
    attention["seqused_k"] = args["cache_seqlens"] + new
    return append + _forward(attention)


def _table_bytes(table: Tensor, length: int, batch: int) -> int:
    return batch * length * table.shape[-1] * table.itemsize


def _rope_in_place(args: dict[str, Any]) -> Cost:
    """Columns that are not rotated are neither read nor written."""
    columns = 2 * args["cos"].shape[-1]
    return _rope(args | {x: args[x][..., :columns] for x in ("q", "k") if x in args})


def _rope(args: dict[str, Any]) -> Cost:
    q = args["q"]
    moved = sum(2 * args[name].nbytes for name in ("q", "k") if name in args)
    # Without positions and offsets, all sequences read the same rows of the tables.
    by_sequence = "positions" in args or "seqlen_offsets" in args
    for name in ("cos", "sin"):
        rows = _table_bytes(args[name], q.shape[2], q.shape[0] if by_sequence else 1)
        moved += min(args[name].nbytes, rows)
    moved += sum(bytes_of(args[name]) for name in ("positions", "seqlen_offsets") if name in args)
    return Cost(0, moved)


def _rope_tables(args: dict[str, Any]) -> Cost:
    inv_freq, positions = args["inv_freq"], args["positions"]
    element = args.get("dtype", torch.float32).itemsize
    tables = 2 * positions.numel() * inv_freq.shape[-1] * element
    return Cost(0, inv_freq.nbytes + positions.nbytes + tables)


def _causal_mask(args: dict[str, Any]) -> Cost:
    """Only masked elements are written."""
    scores = args["scores"]
    q_length, kv_length = scores.shape[-2:]
    hidden = q_length * kv_length - (
        seen(q_length, kv_length, causal=True, q_offset=args.get("q_offset", 0)).pairs
    )
    return Cost(0, scores.shape[:-2].numel() * hidden * scores.itemsize)


def _merge_splits(args: dict[str, Any]) -> Cost:
    out, lse = args["partial_out"], args["partial_lse"]
    rows = out.shape[:3].numel()
    element = args.get("out_dtype", torch.float32).itemsize
    merged = rows * (out.shape[-1] * element + _STATISTIC)
    sink = args.get("learnable_sink")
    return Cost(0, out.nbytes + lse.nbytes + merged + (0 if sink is None else sink.nbytes))


def _copy_pages(args: dict[str, Any]) -> Cost:
    cache, src = args["cache"], args["src"]
    page = cache.shape[1:].numel() * cache.itemsize
    return Cost(0, 2 * src.numel() * page + 2 * src.nbytes)


def scaled(value: float) -> str:
    """Three digits and a decimal prefix: 12345 becomes 12.3 k."""
    for prefix in ("", " k", " M", " G", " T", " P"):
        if abs(value) < 999.5 or prefix == " P":
            break
        value /= 1000
    return f"{value:.3g}{prefix}"


def _index_scores(args: dict[str, Any]) -> Cost:
    q, k, weights = (args[name] for name in ("q", "k", "weights"))
    limits = {name: args[name] for name in ("causal", "q_offset") if name in args}
    pairs = seen(q.shape[2], k.shape[1], **limits).pairs
    scores = q.shape[0] * q.shape[2] * k.shape[1]
    flops = attention_flops(q.shape[0] * q.shape[1] * pairs, q.shape[3], 0)
    return Cost(flops, q.nbytes + k.nbytes + weights.nbytes + scores * _STATISTIC)


_FORMULAS: dict[str, Callable[[dict[str, Any]], Cost]] = {
    **dict.fromkeys(("flash_fwd", "flash_varlen_fwd", "flash_decode", "flex_fwd"), _forward),
    **dict.fromkeys(("flash_bwd", "flash_varlen_bwd", "flex_bwd"), _backward),
    **dict.fromkeys(
        ("flash_bwd_bias", "flash_varlen_bwd_bias"), _gradient_of("attn_bias", "attn_mask")
    ),
    **dict.fromkeys(("flash_bwd_slopes", "flash_varlen_bwd_slopes"), _gradient_of("alibi_slopes")),
    "flex_bwd_captures": _captures_gradient,
    "decode_step": _step,
    "rope": _rope,
    "rope_": _rope_in_place,
    "rope_tables": _rope_tables,
    "index_scores": _index_scores,
    **dict.fromkeys(("softmax", "softmax_"), lambda args: Cost(0, 2 * args["x"].nbytes)),
    "apply_causal_mask_": _causal_mask,
    **dict.fromkeys(
        ("merge_state", "merge_state_"),
        lambda args: Cost(0, 3 * (args["out_a"].nbytes + args["lse_a"].nbytes)),
    ),
    "merge_splits": _merge_splits,
    "append_kv": _append,
    "copy_pages": _copy_pages,
}
