"""`recent` of the caches: each sequence's last rows are also stored in full precision."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_metal_attn.call.arguments import check_tensor
from torch_metal_attn.kv_cache.storage import Storage
from torch_metal_attn.ops.differentiation import forward_only
from torch_metal_attn.ops.names import ArgumentNames
from torch_metal_attn.with_kvcache import VERIFY_QUERIES
from torch_metal_attn.wording import count_text

_ROTARY = ("rotary_cos", "rotary_sin", "rotary_interleaved", "rotary_first_column")
# Options of attention to all rows, and to recent rows only. Older rows need none of the latter:
# each new query sees all of them, and a sink counts once.
_SHARED = ("softmax_scale", "softcap", "num_splits")
_OWN = ("causal", "learnable_sink", "parents", "tree_mask", *_ROTARY, "rotate_q_by_token")


class Batch(NamedTuple):
    """New rows of some sequences in a layer, and the options of the op that writes them."""

    layer: int
    new: tuple[Tensor, ...]  # the op's operands before the caches
    lengths: list[int]  # rows of each sequence, without the new rows
    slots: list[int]  # the slot of each sequence's recent rows
    where: dict[str, Any]  # the op's options that locate the sequences
    options: dict[str, Any]  # the op's other options


class NoRecentRows:
    """`RecentRows` of a cache that keeps no recent rows."""

    def take(self) -> int:
        return -1

    def _nothing(self, *_: Any) -> None:
        pass

    grow = release = check_kept = truncate = copy = move_paths = append = fill = _nothing
    read = fill_slot = _nothing


class _SlotRows(NamedTuple):
    """A slot has the rows [first, end) of its sequence. `start` is the first row it ever had."""

    first: int = 0
    end: int = 0
    start: int = 0

    def has_too_few(self, length: int, recent: int) -> bool:
        """True if fewer than `recent` rows are left when the sequence is cut to `length`."""
        return max(length - self.first, 0) < min(recent, length - self.start)

    def cut(self, length: int, recent: int) -> "_SlotRows":
        """The rows after a cut to `length`. If they are too few, `start` becomes `first`."""
        first, end, start = (min(row, length) for row in self)
        return _SlotRows(first, end, first if self.has_too_few(length, recent) else start)


class RecentRows:
    """Copies of each sequence's last rows in the dtype of new rows, next to the quantised ones.

    Queries attend most to the rows just before them (KIVI, Liu et al. 2024). Each sequence has a
    slot for `recent` rows and those of a step. Row i is row i % length of the slot: in the ops'
    block tables, every page of the sequence is the slot. So rows never move.
    """

    def __init__(self, kept: Storage, recent: int) -> None:
        self.recent = recent
        self._kept = kept
        self._length = recent + VERIFY_QUERIES
        self._rows = kept.without_format(0, self._length)
        self._held: list[list[_SlotRows]] = [[] for _ in kept.layers]  # by layer and slot
        self._unused: list[int] = []

    def take(self) -> int:
        if not self._unused:
            slots = len(self._held[0])
            self.grow(max(slots, 4))
            self._unused = [*range(slots, len(self._held[0]))]
        return self._unused.pop()

    def grow(self, more: int) -> None:
        """Add unused slots."""
        slots = len(self._held[0])
        rows = self._kept.without_format(slots + more, self._length)
        for old, new in zip(self._rows.layers, rows.layers, strict=True):
            for before, after in zip(old.by_block(), new.by_block(), strict=True):
                after[:slots] = before
        self._rows = rows
        for held in self._held:
            held += [_SlotRows()] * more

    def release(self, slot: int) -> None:
        self.truncate(slot, 0)
        self._unused.append(slot)

    def check_kept(self, slot: int, length: int, what: str, tree: int | None = None) -> None:
        """Raise ValueError if too few full-precision rows are left. tree: the tree's first row."""
        for held in (by_slot[slot] for by_slot in self._held):
            first, end, start = held
            missing = held.has_too_few(length, self.recent) or (tree is not None and tree < first)
            if missing and start < first and length <= end:
                raise ValueError(
                    f"{what}; recent keeps {self.recent} rows in full precision, and only rows "
                    f"from {first} on are left: it must be 0 or at least {first + self.recent}. "
                    "With keep_recent=False truncate reads older rows in quantised form"
                )

    def truncate(self, slot: int, length: int) -> None:
        for held in self._held:
            held[slot] = held[slot].cut(length, self.recent)

    def copy(self, source: list[int], destination: list[int]) -> None:
        self._rows.copy(source, destination)
        for held in self._held:
            for old, new in zip(source, destination, strict=True):
                held[new] = held[old]

    def read(self, slot: int, device: torch.device) -> tuple[list[Tensor], list[_SlotRows]]:
        """A copy of a slot, and its rows in each layer."""
        return self._rows.read([slot], device), [held[slot] for held in self._held]

    def fill_slot(self, slot: int, copied: tuple[list[Tensor], list[_SlotRows]]) -> None:
        rows, held = copied
        self._rows.fill([slot], rows)
        for by_slot, new in zip(self._held, held, strict=True):
            by_slot[slot] = new

    def move_paths(
        self,
        rounds: Sequence[list[list[tuple[int, int]]]],
        starts: Sequence[int],
        lengths: Sequence[int],
        slots: Sequence[int],
    ) -> None:
        """`Storage.move_paths`; a slot is emptied if another op wrote the rows of the tree."""
        moved = [*rounds]
        for i, (length, slot) in enumerate(zip(lengths, slots, strict=True)):
            for held in self._held:
                if held[slot].end != length:
                    held[slot], moved[i] = _SlotRows(), []
        self._rows.move_paths(moved, starts, lambda i, row: (slots[i], row % self._length))

    def append(self, batch: Batch) -> None:
        """Write the last of the new rows, after the quantised rows have been written."""
        layer, new, lengths, slots, _, options = batch
        skipped = max(new[0].shape[2] - self._length, 0)
        last = tuple(x[:, :, skipped:] for x in new)
        options = {name: x for name, x in options.items() if name != "q"}  # q is already rotated
        held = self._after(layer, lengths, slots, new[0].shape[2])
        seqlens = self._rows.indices([n + skipped for n in lengths])
        table = self._table(held, slots)
        with torch.no_grad():  # only decode_step reads the copies
            self._rows.run("append_kv", layer, last, seqlens, block_table=table, **options)
        self._keep(layer, slots, held)

    def step(self, batch: Batch, *, check_only: bool = False) -> Any:
        layer, new, lengths, slots, _, options = batch
        more = new[1].shape[2]
        if more > VERIFY_QUERIES and _in_parts(new[0], more, options):

            def part(start: int, check_only: bool) -> Any:
                rows = tuple(x[:, :, start : start + VERIFY_QUERIES] for x in new)
                after = [n + start for n in lengths]
                return self.step(batch._replace(new=rows, lengths=after), check_only=check_only)

            starts = range(0, more, VERIFY_QUERIES)
            for start in starts:
                part(start, True)
            results = [] if check_only else [part(start, False) for start in starts]
            return [torch.cat(x, 2) for x in zip(*results, strict=True)]
        _check_step(new[0], new[1], options)
        held = self._after(layer, lengths, slots, more)
        step = partial(self._step, batch, held)
        if check_only or not torch.compiler.is_compiling():
            # If one op refuses the call, the other must not write its rows.
            step(check_only=True)
        if check_only:
            return None
        advice, tensors = "detach it, as a cache keeps no graph", dict(zip("qkv", new, strict=True))
        out, lse = forward_only("decode_step", advice, tensors | options, step)
        self._keep(layer, slots, held)
        return out, lse

    def _step(self, batch: Batch, held: list[_SlotRows], *, check_only: bool = False) -> Any:
        layer, new, lengths, slots, where, options = batch
        q, k, v = new
        seqlens = self._rows.indices(lengths)
        appended = {name: x for name, x in options.items() if name.startswith("rota")}
        attend = dict(options)
        if appended.get("rotary_cos") is not None:
            q = appended["q"] = q.clone()  # append_kv rotates it in place
            attend["rotary_from_leftpad"] = False
        quantised = where | appended
        self._kept.run("append_kv", layer, (k, v), seqlens, check_only=check_only, **quantised)
        attend |= {"block_table": self._table(held, slots), "leftpad_k": self._first(held)}
        attend["num_splits"] = 1
        result = self._rows.run("decode_step", layer, new, seqlens, check_only=check_only, **attend)
        older = self._older(layer, q, held, where, options, check_only=check_only)
        if older is not None and not check_only:
            torch.ops.metal_attn.merge_state_(*result, *older)
        return result

    def attend(
        self,
        layer: int,
        q: Tensor,
        lengths: list[int],
        slots: list[int],
        where: dict[str, Any],
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Attention to stored rows. The options must not depend on the position of an older row."""
        held = self._after(layer, lengths, slots, 0)
        pad, used, first = options.get("leftpad_k"), options.get("seqused_k"), self._first(held)
        near = options | {
            "block_table": self._table(held, slots),
            "seqused_k": self._rows.indices(lengths) if used is None else used,
            "leftpad_k": first if pad is None else torch.maximum(first, pad),
            "num_splits": 1,
        }
        caches, _ = self._rows.operands(layer)
        out, lse = ArgumentNames().run(torch.ops.metal_attn.flash_decode, (q, *caches), near)
        older = self._older(layer, q, held, where, options)
        if older is not None:
            torch.ops.metal_attn.merge_state_(out, lse, *older)
        return out, lse

    def _older(
        self,
        layer: int,
        q: Tensor,
        held: list[_SlotRows],
        where: dict[str, Any],
        options: dict[str, Any],
        *,
        check_only: bool = False,
    ) -> Any:
        """Attention to the rows before those in the slots; None if there are no such rows."""
        if not check_only and not any(one.first for one in held):
            return None
        first = self._first(held)
        shared = {name: x for name, x in options.items() if name in _SHARED}
        shared["seqused_k"] = first
        for name in ("seqused_k", "leftpad_k"):
            if options.get(name) is not None:
                shared[name] = torch.minimum(first, options[name])
        ops = torch.ops.metal_attn_explain if check_only else torch.ops.metal_attn
        caches, kept = self._kept.operands(layer)
        return ArgumentNames().run(ops.flash_decode, (q, *caches), kept | where | shared)

    def fill(self, layer: int, rows: Tensor, lengths: list[int], slots: list[int]) -> None:
        """Copy the recent keys in full precision into `rows`, (B, H, L, D) of entire sequences."""
        cache = self._rows.layers[layer].k_cache
        for b, (first, end, _) in enumerate(self._after(layer, lengths, slots, 0)):
            places = torch.arange(first, end, device=rows.device) % self._length
            rows[b, :, first:end] = cache[slots[b], places].transpose(0, 1)

    def _after(self, layer: int, lengths: list[int], slots: list[int], n: int) -> list[_SlotRows]:
        """The rows that slots have after n rows are written to sequences of these lengths."""
        held = []
        for length, slot in zip(lengths, slots, strict=True):
            first, end, start = self._held[layer][slot]
            if end != length:  # another op wrote rows after `end`
                first = start = length
            held.append(_SlotRows(max(first, length + n - self._length), length + n, start))
        return held

    def _first(self, held: list[_SlotRows]) -> Tensor:
        return self._rows.indices([one.first for one in held])

    def _keep(self, layer: int, slots: list[int], held: list[_SlotRows]) -> None:
        for slot, rows in zip(slots, held, strict=True):
            self._held[layer][slot] = rows

    def _table(self, held: list[_SlotRows], slots: list[int]) -> Tensor:
        """A block table in which every page of a sequence is its slot."""
        pages = -(-max([1, *(one.end for one in held)]) // self._length)
        return self._rows.indices(slots)[:, None].repeat(1, pages)


def _in_parts(q: Tensor, length: int, options: dict[str, Any]) -> bool:
    """True if no query sees a later row, so that several shorter steps have the same result."""
    tree = any(options.get(name) is not None for name in ("parents", "tree_mask"))
    in_order = options.get("causal") and options.get("rotate_q_by_token", True) and not tree
    return bool(in_order) and isinstance(q, Tensor) and q.dim() == 4 and q.shape[2] == length


def _check_step(q: Tensor, k: Tensor, options: dict[str, Any]) -> None:
    for name in options:
        if name not in _SHARED and name not in _OWN:
            raise TypeError(
                f"decode_step with recent rows has no option {name}; it takes "
                f"{', '.join((*_SHARED, *_OWN))}"
            )
    check_tensor("q", q)
    length = k.shape[2]
    if not 1 <= length <= VERIFY_QUERIES:
        raise ValueError(
            f"k has {length} new rows; with recent rows decode_step takes 1..{VERIFY_QUERIES}, or "
            "more if causal: append them with `append`"
        )
    if q.dim() == 4 and q.shape[2] > length and options.get("causal"):
        raise ValueError(
            f"q has {count_text(q.shape[2], 'query')} and k {count_text(length, 'new row')}; with "
            "recent rows and causal there may be at most one query per new row"
        )
    tree = next((n for n in ("parents", "tree_mask") if options.get(n) is not None), None)
    if tree is not None and options.get("rotary_cos") is not None:
        raise ValueError(
            f"rotary_cos is given with {tree} and recent rows; decode_step rotates by depth only "
            "without recent rows: rotate q and k first"
        )
