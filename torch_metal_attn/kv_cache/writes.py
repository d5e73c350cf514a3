"""`CacheStorage`: the tensors of a cache, and the writes of new rows."""

from collections.abc import Iterator
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.call.arguments import check_tensor
from torch_metal_attn.kv_cache.recent import Batch, NoRecentRows, RecentRows
from torch_metal_attn.kv_cache.storage import LISTS, ROTARY, Storage

# Options that a caller must not pass, as the op would then read or write other rows.
_PLACES = ("block_table", "cache_batch_idx", "cache_seqlens", "hadamard", "k_scale", "v_scale")
_PACKING = ("cu_seqlens_q", "cu_seqlens_k_new", "max_seqlen_q")
# Options that have one row for each new row if new rows are packed.
_BY_ROW = ("q", "parents", "tree_mask")
_ALL_OPTIONS = [x.name for x in torch.ops.metal_attn.decode_step.default._schema.arguments[5:]]
_STEP_OPTIONS = [n for n in (*_ALL_OPTIONS, *LISTS) if n not in _PLACES and "seqlen" not in n]


class CacheStorage(Storage):
    """Storage of sequences' rows, and of their recent rows in full precision."""

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        recent = self._kind["recent"]
        self.recent = RecentRows(self, recent) if recent else NoRecentRows()

    def checked(
        self,
        op: str,
        operands: tuple[Any, ...],
        batch: int,
        options: dict[str, Any],
        counts: list[int] | None,
    ) -> tuple[tuple[Tensor, ...], list[int]]:
        """The op's operands before the caches, and each sequence's number of new rows."""
        *first, k, v = operands
        method, takes = ("append", ROTARY) if op == "append_kv" else (op, _STEP_OPTIONS)
        for name in options:
            if name not in takes and not (op == "decode_step" and name in _ALL_OPTIONS):
                raise TypeError(f"{method} has no argument {name}; it takes {', '.join(takes)}")
        if v is None and not self.values_in_keys:
            raise ValueError("v is None; only a cache with values_in_keys takes k alone")
        check_tensor("k", k)
        length = k.shape[2] if k.dim() == 4 else -1
        v = k[..., : self._new_shapes["v"][1]] if v is None and k.dim() > 0 else v
        for name, x in (("k", k), ("v", v)):
            heads, columns = self._new_shapes[name]
            wanted: tuple[Any, ...] = batch, heads, length if length >= 0 else "L", columns
            if counts is not None:
                wanted = sum(counts), heads, columns
            check_tensor(name, x)
            if x.shape != wanted:
                text = ", ".join(map(str, wanted))
                packed = "" if counts is None else ": length is given, so rows are packed"
                raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be ({text}){packed}")
            if x.dtype not in self._new_dtypes or x.device.type != self.device.type:
                allowed = " or ".join(map(str, self._new_dtypes))
                raise ValueError(
                    f"{name} is {x.dtype} on {x.device}; it must be {allowed} on {self.device}"
                )
        if op == "decode_step" and self.values_in_keys and options.get("softmax_scale") is None:
            raise ValueError(
                "softmax_scale is None; pass it with values_in_keys, as keys then do not have the "
                "head dim of the model"
            )
        if counts is not None:
            by_row = {n: x for n, x in options.items() if n in _BY_ROW and x is not None}
            for name, tensor in (*zip("q", first, strict=False), *by_row.items()):
                check_tensor(name, tensor)
                if tensor.shape[:1] != (sum(counts),) or (name == "q" and tensor.dim() != 3):
                    raise ValueError(
                        f"{name} has shape {tuple(tensor.shape)}; it must have {sum(counts)} rows"
                        f"{', (T, Hq, D)' if name == 'q' else ''}: length is given, so rows are "
                        "packed"
                    )
        return (*first, k, v), [length] * batch if counts is None else counts

    def write(
        self, op: str, batch: Batch, counts: list[int] | None, *, check_only: bool = False
    ) -> Any:
        """Run an op that writes rows. counts: the new rows of each sequence if rows are packed."""
        for name in (*_PLACES, *_PACKING):
            if name in batch.options:
                advice = "pass length" if name in _PACKING else "the cache sets it"
                raise TypeError(f"{op} of a cache has no argument {name}: {advice}")
        options = {n: x for n, x in batch.options.items() if n not in LISTS or x is not None}
        if op == "decode_step":
            options = self.groups.step_options(batch.layer, options)
        batch = batch._replace(options=options)
        if counts is None:
            return self._write(op, batch, check_only)
        for name in LISTS:
            if name in options:
                raise ValueError(
                    f"{name} is given with length; with listed keys q, k and v must have 4 "
                    "dimensions, so all sequences have equally many rows: leave length out"
                )
        if op == "decode_step" and max(counts, default=0) == 0:
            raise ValueError(f"length is {counts}; decode_step needs at least one new row in total")
        if op == "decode_step" and not isinstance(self.recent, RecentRows):
            ends = self.indices([*accumulate(counts, initial=0)])
            options = options | {"cu_seqlens_q": ends, "max_seqlen_q": max(counts)}
            return self._write(op, batch._replace(options=options), check_only)
        # Neighbouring sequences with equal counts form a batch, whose tensors are views.
        parts = []
        for some, rows in _runs(counts):
            count = some.stop - some.start
            dense = tuple(_unpacked(x, rows, count) for x in batch.new)
            by_row = {n: _unpacked(x, rows, count) for n, x in options.items() if n in _BY_ROW}
            where = {n: x[some] for n, x in batch.where.items()}
            lengths, slots = batch.lengths[some], batch.slots[some]
            parts.append(Batch(batch.layer, dense, lengths, slots, where, options | by_row))
        if check_only or len(parts) > 1:
            for part in parts:
                self._write(op, part, True)  # check all parts before the first write
        results = [] if check_only else [self._write(op, part, False) for part in parts]
        if op == "append_kv" or check_only:
            return None
        return (torch.cat([out.transpose(1, 2).flatten(0, 1) for out, _ in results]),)

    def _write(self, op: str, batch: Batch, check_only: bool) -> Any:
        if op == "decode_step" and isinstance(self.recent, RecentRows):
            return self.recent.step(batch, check_only=check_only)
        options = batch.where | batch.options
        seqlens = self.indices(batch.lengths)
        result = self.run(op, batch.layer, batch.new, seqlens, check_only=check_only, **options)
        if op == "append_kv" and not check_only:
            self.recent.append(batch)
        return result


def _runs(counts: list[int]) -> Iterator[tuple[slice, slice]]:
    """Neighbouring sequences with equal counts of new rows, and the slice of these rows."""
    b = row = 0
    for count, equal in groupby(counts):
        more = len([*equal])
        if count > 0:
            yield slice(b, b + more), slice(row, row + more * count)
        b, row = b + more, row + more * count


def _unpacked(x: Any, rows: slice, batch: int) -> Any:
    """Rows of x (T, H, D) as (batch, H, L, D), or rows of a tree (T, L) as (batch, L, L)."""
    if x is None:
        return None
    x, length = x[rows], (rows.stop - rows.start) // batch
    if x.dim() < 3:
        return x.unflatten(0, (batch, length))[..., :length]
    # `view` may change the stride of a size of 1. Values in keys must keep the strides of the keys.
    (row, head, column), (_, heads, columns) = x.stride(), x.shape
    sizes, strides = (batch, heads, length, columns), (length * row, head, row, column)
    return x.as_strided(sizes, strides)
