"""`PagedKVCache`: sequences in pages that forks and equal prefixes share."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from torch import Tensor

from torch_metal_attn.call.arguments import INT32_MAX, flag, integers, natural, whole
from torch_metal_attn.call.options import options_of
from torch_metal_attn.kv_cache.cascade import CascadePlan
from torch_metal_attn.kv_cache.pages import CacheFull, PagePool, Prefix
from torch_metal_attn.kv_cache.recent import RecentRows
from torch_metal_attn.kv_cache.storage import LayerCache, Storage
from torch_metal_attn.kv_cache.trees import (
    Rows,
    check_layers_agree,
    checked_paths,
    each,
    length_within,
    moves,
    rows_of_ints,
)


@dataclass
class _Sequence:
    pages: list[int]
    lengths: list[int]  # of each layer
    tokens: list[int]  # as far as they are known
    prefixes: list[Prefix]  # of the first pages, those that are found by their tokens
    slot: int = -1  # of its recent rows
    accepted: int = 0  # the rows that the last accept left

    @property
    def length(self) -> int:
        """Rows of the layer that has the most."""
        return max(self.lengths)


@dataclass
class _Rows:
    """Rows of a sequence that are about to be written, from `start` on."""

    sequence: _Sequence
    start: int
    length: int


class PagedKVCache:
    """Keys and values of many sequences in pages (Kwon et al. 2023, "PagedAttention").

    All layers use the same page numbers. `append` writes the new rows of one layer, so the layers
    of a sequence may differ in length during a step. Shapes below: B sequences, L new rows, Hkv
    heads, head dims D and Dv.

    Args: num_pages, page_size: pages, and rows of each. num_kv_heads, head_dim: Hkv and D;
        v_head_dim: Dv, D if None. dtype: of new keys and values (float32, float16 or bfloat16), and
        of the cache if format is None. A cache in half precision also takes float32 keys and
        values, and rounds them. format: None, or one of `torch_metal_attn.quantisation`'s, such as
        "q8_0" or "q3_g64"; v_format: that of values, if it is another. hadamard: 32, 64 or 128
        columns in whose blocks quantised rows are rotated, 0 for none. layout: "NHD", in memory
        (pages, page_size, Hkv, D) as in flash-attn, or "HND", (pages, Hkv, page_size, D). k_scale,
        v_scale: (Hkv,) float32, for fp8_e4m3 only; None is 1. values_in_keys: values are the first
        Dv columns of the keys, and stored once, as in `LatentCache`. recent: as many of the last
        rows of each sequence, or more, are also kept in dtype, and `decode_step` reads those in
        place of the quantised ones; 0 for none.

    Raises: ValueError for an unknown id or layer and for wrong shapes, naming what is wrong;
        `CacheFull` if there are too few pages. Nothing is changed then.
    """

    @options_of(Storage.__init__, 3)
    def __init__(self, num_pages: int, page_size: int, *sizes: Any, **options: Any) -> None:
        num_pages = natural("num_pages", num_pages, 1, INT32_MAX)
        self.page_size = natural("page_size", page_size, 1, INT32_MAX)
        self._storage = Storage(num_pages, self.page_size, *sizes, **options)
        self._pool = PagePool(num_pages)
        self._sequences: dict[int, _Sequence] = {}
        self._next_id = 0
        # The last table made: every layer of a step asks for the same.
        self._table: tuple[list[int], Tensor] | None = None

    @property
    def num_free_pages(self) -> int:
        """Pages available for new rows, including pages that only hold unused prefixes."""
        return self._pool.available

    @property
    def layers(self) -> list[LayerCache]:
        """Each layer's tensors, as `flash_attn_with_kvcache` takes them."""
        return self._storage.layers

    def allocate(self) -> int:
        """Create an empty sequence; returns its id."""
        return self._add(_Sequence([], [0] * len(self.layers), [], []))

    def append(
        self,
        ids: Sequence[int],
        k: Tensor,
        v: Tensor | None = None,
        layer: int = 0,
        *,
        token_ids: Rows | None = None,
        **rotary: Any,
    ) -> None:
        """Append k (B, Hkv, L, D) and v (B, Hkv, L, Dv) to the B sequences.

        v may be None with values_in_keys. token_ids: (B, L), the rows' tokens, for `match_prefix`
        to find. Give them with any layer; the first ones given count. rotary: q, rotary_cos,
        rotary_sin, rotary_interleaved and rotary_first_column of `append_kv`.
        """
        self._write("append_kv", ids, (k, v), layer, token_ids, rotary)

    def decode_step(
        self,
        ids: Sequence[int],
        q: Tensor,
        k: Tensor,
        v: Tensor | None = None,
        layer: int = 0,
        *,
        token_ids: Rows | None = None,
        **options: Any,
    ) -> Tensor:
        """Append the new rows and attend to the cache, by `metal_attn::decode_step`.

        Args: q: (B, Hq, L, D). k, v, token_ids: as in `append`, L of 1 or more; those of a tree are
            given to `accept`. options: those of the op, such as causal, softmax_scale and parents.
            With values_in_keys softmax_scale must be given: D is not what the model scales by. With
            recent the options are those that do not depend on a key's position, and L is at most
            64.

        Returns: (B, Hq, L, Dv), in q's dtype.

        Raises: as `append`.
        """
        for name in ("parents", "tree_mask"):
            if token_ids is not None and options.get(name) is not None:
                raise ValueError(
                    f"token_ids is given with {name}, and the rows of a tree do not follow each "
                    "other; give the tree's tokens to accept"
                )
        out: Tensor = self._write("decode_step", ids, (q, k, v), layer, token_ids, options)[0]
        return out

    def _write(
        self,
        op: str,
        ids: Sequence[int],
        new: tuple[Any, ...],
        layer: int,
        token_ids: Rows | None,
        options: dict[str, Any],
    ) -> Any:
        """Run an op that writes new rows of each sequence, in pages of its own."""
        self._storage.check_layer(layer)
        ids, sequences = self._of(ids)
        new, length = self._storage.checked(op, new, len(ids), options)
        tokens = _as_lists(token_ids, [length] * len(ids))
        written = [_Rows(s, s.lengths[layer], length) for s in sequences]
        lengths, slots = [rows.start for rows in written], [s.slot for s in sequences]
        given = (op, layer, new, lengths, slots, options)
        if any(self._reserves(rows) for rows in written):
            # What the op refuses must leave the pages as they are.
            table = self._table_of_any_pages(written)
            self._storage.write(*given, check_only=True, block_table=table)
        self._own(written)
        result = self._storage.write(*given, block_table=self._table_of(ids, sequences))
        self._advance(sequences, [length] * len(ids), layer, tokens)
        return result

    def reserve(self, ids: Sequence[int], length: int | Sequence[int], layer: int = 0) -> None:
        """Reserve unshared pages for `length` more rows of each sequence, or one number for each.

        For ops that write rows themselves, such as `flash_attn_with_kvcache` with k and v; then
        call `advance`. Raises CacheFull before anything changes.
        """
        self._storage.check_layer(layer)
        ids, sequences = self._of(ids)
        lengths = each(length, len(ids))
        self._own([_Rows(s, s.lengths[layer], n) for s, n in zip(sequences, lengths, strict=True)])

    def _own(self, written: list[_Rows]) -> None:
        """Let each sequence have pages of its own for these rows, whose tokens are not known."""
        missing = self._missing_pages(written)
        if missing > 0:
            self._table = None
        copies: dict[int, int] = {}  # by the copy
        for rows in written:
            sequence = rows.sequence
            held, new = self._written(rows)
            for i in held:
                page = sequence.pages[i]
                if self._pool.references[page] > 1:
                    sequence.pages[i] = self._pool.take()
                    copies[sequence.pages[i]] = page
                    self._pool.release(page)
                else:
                    self._pool.forget(page)
            del sequence.prefixes[held.start :]
            sequence.pages += [self._pool.take() for _ in range(new)]
        self._storage.copy(list(copies.values()), list(copies))

    def advance(
        self,
        ids: Sequence[int],
        length: int | Sequence[int],
        layer: int = 0,
        *,
        token_ids: Rows | None = None,
    ) -> None:
        """Count `length` rows that were written to reserved pages; arguments as in `reserve`.

        Leave out the token_ids of a tree, whose rows do not follow each other; `accept` takes them.
        """
        self._storage.check_layer(layer)
        ids, sequences = self._of(ids)
        lengths = each(length, len(ids))
        tokens = _as_lists(token_ids, lengths)
        for sequence, more in zip(sequences, lengths, strict=True):
            if self._reserves(_Rows(sequence, sequence.lengths[layer], more)):
                raise ValueError(f"length is {more}; call reserve for as many rows first")
        self._advance(sequences, lengths, layer, tokens)

    def _advance(
        self,
        sequences: list[_Sequence],
        lengths: list[int],
        layer: int,
        tokens: list[list[int]] | None,
    ) -> None:
        for i, (sequence, more) in enumerate(zip(sequences, lengths, strict=True)):
            if tokens is not None and len(sequence.tokens) == sequence.lengths[layer]:
                sequence.tokens += tokens[i]
            sequence.lengths[layer] += more
            self._publish(sequence)

    def accept(
        self,
        ids: Sequence[int],
        paths: Rows,
        parents: Rows,
        *,
        token_ids: Rows | None = None,
    ) -> None:
        """Keep one path of each sequence's tree of new tokens, and take the rest back.

        The path's rows are moved together in all layers, so that they are the last of the sequence.
        If a fork shares them, they are copied first.

        Args: paths: for each sequence the tokens of its tree to keep, counted from the first of the
            tree: a root, then a child of it, and so on; empty to take back the whole tree. parents:
            for each sequence the parent of each token of its tree, which are its last rows: an
            earlier token, or -1 for a root. token_ids: for each sequence the tokens of its tree;
            those of the path are then known to `match_prefix`.

        Raises: ValueError: parents is no tree, or a path is no path of it; a tree has more tokens
            than rows were written since the last accept; the layers differ in length, as before the
            end of a step; fewer rows than `recent` would be left. CacheFull: no page is left for
            the copy of a shared one. Nothing is changed then.
        """
        ids, sequences = self._of(ids)
        for id, sequence in zip(ids, sequences, strict=True):
            check_layers_agree(id, sequence.lengths, "accept")
        lengths, accepted = [s.length for s in sequences], [s.accepted for s in sequences]
        kept, sizes = checked_paths(paths, parents, lengths, accepted)
        tokens = _as_lists(token_ids, sizes)
        starts = [sequence.length - size for sequence, size in zip(sequences, sizes, strict=True)]
        for sequence, start, path in zip(sequences, starts, kept, strict=True):
            self._storage.recent.check_kept(
                sequence.slot, start + len(path), f"the path ends at row {start + len(path)}", start
            )
        rounds = [moves(path) for path in kept]
        firsts = [
            steps[0][0][1] if steps else len(path) for steps, path in zip(rounds, kept, strict=True)
        ]
        # A page that a fork shares is copied, and its rows are then read from the copy.
        self._own(
            [
                _Rows(sequence, start + first, len(path) - first)
                for sequence, start, first, path in zip(
                    sequences, starts, firsts, kept, strict=True
                )
            ]
        )
        self._storage.move_paths(rounds, starts, lambda i, row: self._place(sequences[i], row))
        slots = [s.slot for s in sequences]
        self._storage.recent.move_paths(rounds, starts, lengths, slots)
        for i, (id, sequence, path) in enumerate(zip(ids, sequences, kept, strict=True)):
            start = starts[i]
            known = sequence.tokens[start:] if tokens is None else tokens[i]
            follows = len(sequence.tokens) >= start and len(known) == sizes[i]
            self.truncate(id, start + len(path), keep_recent=False)
            sequence.accepted = start + len(path)
            del sequence.tokens[start:]
            sequence.tokens += [known[token] for token in path] if follows else []
            del sequence.prefixes[len(sequence.tokens) // self.page_size :]
            self._publish(sequence)

    def fork(self, id: int) -> int:
        """Create a sequence that shares this one's pages, which are copied before a write."""
        id, sequence = self._one(id)
        check_layers_agree(id, sequence.lengths, "fork")
        pages = sequence.pages[: self._pages_of(sequence.length)]
        for page in pages:
            self._pool.share(page)
        copied = _Sequence(pages, [*sequence.lengths], [*sequence.tokens], [*sequence.prefixes])
        copied.accepted = sequence.accepted
        id = self._add(copied)
        self._storage.recent.copy([sequence.slot], [copied.slot])
        return id

    def free(self, id: int) -> None:
        """End a sequence. Pages of known tokens stay as prefixes until their space is needed."""
        id, sequence = self._one(id)
        del self._sequences[id]
        self._release(sequence.pages)
        self._storage.recent.release(sequence.slot)

    def truncate(self, id: int, length: int, *, keep_recent: bool = True) -> None:
        """Drop the rows from `length` on, as speculative decoding does with rejected tokens.

        With `recent` a sequence can go back by 64 rows from its longest length, or to 0. Going
        further back raises ValueError: fewer rows than `recent` would be left in full precision.
        keep_recent=False allows it, and older rows are then read as codes.
        """
        id, sequence = self._one(id)
        length = length_within(id, length, sequence.length)
        if flag("keep_recent", keep_recent):
            self._storage.recent.check_kept(sequence.slot, length, f"length is {length}")
        sequence.accepted = min(sequence.accepted, length)
        sequence.lengths = [min(n, length) for n in sequence.lengths]
        kept = self._pages_of(length)
        self._release(sequence.pages[kept:])
        del sequence.pages[kept:]
        del sequence.tokens[length:]
        del sequence.prefixes[length // self.page_size :]
        self._table = None
        self._storage.recent.truncate(sequence.slot, length)

    def match_prefix(self, token_ids: Tensor | Sequence[int]) -> tuple[int, int]:
        """Create a sequence that shares the longest known prefix of `token_ids`.

        Returns its id and the prefix's length. Only whole pages match, and only those whose tokens
        were given to `append`. Leave out the last token to have a query left to run.
        """
        tokens = integers("token_ids", token_ids)
        prefixes: list[Prefix] = []
        for start in range(0, len(tokens) - self.page_size + 1, self.page_size):
            parent = prefixes[-1] if prefixes else None
            found = self._pool.find(parent, tuple(tokens[start : start + self.page_size]))
            if found is None:
                break
            prefixes.append(found)
        for prefix in prefixes:
            self._pool.share(prefix.page)
        matched = len(prefixes) * self.page_size
        sequence = _Sequence(
            [prefix.page for prefix in prefixes],
            [matched] * len(self.layers),
            tokens[:matched],
            prefixes,
        )
        return self._add(sequence), matched

    def defragment(self) -> int:
        """Move the pages in use to the front; returns how many were moved."""
        renamed = self._pool.compact()
        self._storage.copy(list(renamed), list(renamed.values()))
        for sequence in self._sequences.values():
            sequence.pages = [renamed.get(page, page) for page in sequence.pages]
        self._table = None
        return len(renamed)

    def block_table(self, ids: Sequence[int]) -> Tensor:
        """(B, max_blocks) int32 on the cache's device: each sequence's pages, then zeros.

        Do not write to it: the next calls for the same ids use the same tensor.
        """
        return self._table_of(*self._of(ids))

    def _table_of(self, ids: list[int], sequences: list[_Sequence]) -> Tensor:
        if self._table is None or self._table[0] != ids:
            width = max([1, *(len(sequence.pages) for sequence in sequences)])
            rows = [s.pages + [0] * (width - len(s.pages)) for s in sequences]
            table = self._storage.indices([page for row in rows for page in row])
            self._table = ids, table.view(len(rows), width)
        return self._table[1]

    def cascade(
        self, ids: Sequence[int], q_length: int = 1, layer: int = 0, **options: Any
    ) -> CascadePlan:
        """Which pages these sequences share, for a step that attends to rows already written.

        Made once for all layers, if each has as many rows as `layer`. q_length: queries of each
        sequence. options: causal, window_size and min_pages of `CascadePlan`. `attend` raises
        ValueError once the sequences have other rows or pages in the layer that is attended to.
        """
        self._storage.check_layer(layer)
        ids, sequences = self._of(ids)
        if isinstance(self._storage.recent, RecentRows):
            raise ValueError(
                f"recent is {self._storage.recent.recent}, and a cascade reads none of these rows "
                "in full precision; use decode_step, or a cache without recent"
            )
        width = max([0, *(len(sequence.pages) for sequence in sequences)])
        pages = [sequence.pages + [0] * (width - len(sequence.pages)) for sequence in sequences]
        lengths = [sequence.lengths[layer] for sequence in sequences]
        plan = CascadePlan(
            pages, lengths, self.page_size, q_length, device=self._storage.device, **options
        )
        plan.check_current = partial(self._check_plan, ids, pages, lengths)
        return plan

    def _check_plan(
        self, ids: list[int], pages: list[list[int]], lengths: list[int], k_cache: Tensor
    ) -> None:
        """Raise ValueError if sequences have other rows than when a plan was made of them."""
        numbers = range(len(self.layers))
        layers = [i for i in numbers if self.layers[i].k_cache is k_cache] or [*numbers]
        for b, (id, sequence) in enumerate(zip(ids, self._of(ids)[1], strict=True)):
            now, used = [sequence.lengths[i] for i in layers], self._pages_of(lengths[b])
            if lengths[b] not in now or sequence.pages[:used] != pages[b][:used]:
                changed = f"it has {now[0]}" if lengths[b] not in now else "they are in other pages"
                raise ValueError(
                    f"the plan is of {lengths[b]} rows of sequence {id}, and now {changed}; make "
                    "a plan after the rows of a step are written"
                )

    def seqlens(self, ids: Sequence[int], layer: int = 0) -> Tensor:
        """(B,) int32 on the cache's device: the rows of each sequence in a layer."""
        return self._storage.indices(self.lengths(ids, layer))

    def lengths(self, ids: Sequence[int], layer: int = 0) -> list[int]:
        """The rows of these sequences in a layer."""
        self._storage.check_layer(layer)
        return [sequence.lengths[layer] for sequence in self._of(ids)[1]]

    def slots(self, ids: Sequence[int]) -> list[int]:
        """Where the recent rows of these sequences are, for `RecentRows`."""
        return [sequence.slot for sequence in self._of(ids)[1]]

    def _place(self, sequence: _Sequence, row: int) -> tuple[int, int]:
        """The page of a row, and which of its rows it is."""
        return sequence.pages[row // self.page_size], row % self.page_size

    def _pages_of(self, length: int) -> int:
        return -(-length // self.page_size)

    def _written(self, rows: _Rows) -> tuple[range, int]:
        """Which pages of the sequence the rows change, and how many additional ones they need."""
        end, count = self._pages_of(rows.start + rows.length), len(rows.sequence.pages)
        first = rows.start // self.page_size if rows.length > 0 else end
        return range(first, min(end, count)), max(end - count, 0)

    def _reserves(self, rows: _Rows) -> bool:
        """Whether `reserve` changes anything: it takes, copies or stops finding a page."""
        held, new = self._written(rows)
        pages = (rows.sequence.pages[i] for i in held)
        return new > 0 or any(self._pool.is_shared_or_found(page) for page in pages)

    def _missing_pages(self, written: list[_Rows]) -> int:
        """How many pages the rows must take. Raises CacheFull if fewer are free."""
        missing = 0
        users: Counter[int] = Counter()
        for rows in written:
            held, new = self._written(rows)
            missing += new
            users.update(rows.sequence.pages[i] for i in held)
        # Of those that share a page, the last one left keeps it.
        missing += sum(min(n, self._pool.references[p] - 1) for p, n in users.items())
        if missing > self._pool.available:
            raise CacheFull(
                f"{sum(rows.length for rows in written)} rows of {len(written)} sequences need "
                f"{missing} more pages, and {self._pool.available} of "
                f"{len(self._pool.references)} are free"
            )
        return missing

    def _table_of_any_pages(self, written: list[_Rows]) -> Tensor:
        """A block table for the rows, as valid as the one after `reserve`."""
        self._missing_pages(written)
        ends = [self._pages_of(rows.start + rows.length) for rows in written]
        # Pages that are only read are page 0, which is then written by none.
        page = count(int(any(rows.start >= self.page_size for rows in written)))
        table = [
            [next(page) if i >= rows.start // self.page_size else 0 for i in range(end)]
            + [0] * (max(ends) - end)
            for rows, end in zip(written, ends, strict=True)
        ]
        return self._storage.indices([one for row in table for one in row]).view(len(table), -1)

    def _of(self, ids: Sequence[int]) -> tuple[list[int], list[_Sequence]]:
        """The ids as Python ints, and their sequences."""
        ids = integers("ids", ids)
        for id in ids:
            if id not in self._sequences:
                raise ValueError(f"there is no sequence {id}: the id was freed, or never allocated")
        if len(set(ids)) < len(ids):
            raise ValueError(f"ids are {ids}; each sequence may be there once")
        return ids, [self._sequences[id] for id in ids]

    def _one(self, id: int) -> tuple[int, _Sequence]:
        id = whole("id", id)
        return id, self._of([id])[1][0]

    def _add(self, sequence: _Sequence) -> int:
        id = self._next_id
        self._next_id += 1
        self._sequences[id] = sequence
        sequence.slot = self._storage.recent.take()
        return id

    def _release(self, pages: list[int]) -> None:
        # The last first: a prefix must not be evicted before the pages that continue it.
        for page in reversed(pages):
            self._pool.release(page)

    def _publish(self, sequence: _Sequence) -> None:
        """Let pages be found by their tokens once those are known and every layer is full."""
        if _unwritten.get():
            return
        size = self.page_size
        full = min(len(sequence.tokens), *sequence.lengths) // size
        while len(sequence.prefixes) < full:
            i = len(sequence.prefixes)
            parent = sequence.prefixes[-1] if sequence.prefixes else None
            tokens = tuple(sequence.tokens[i * size : (i + 1) * size])
            prefix = self._pool.publish(sequence.pages[i], parent, tokens)
            if prefix is None:
                return
            sequence.prefixes.append(prefix)


_unwritten: ContextVar[bool] = ContextVar("torch_metal_attn_unwritten_pages", default=False)


@contextmanager
def unwritten() -> Iterator[None]:
    """A context in which ops write no page, so that none is found by its tokens afterwards."""
    token = _unwritten.set(True)
    try:
        yield
    finally:
        _unwritten.reset(token)


def _as_lists(token_ids: Rows | None, lengths: list[int]) -> list[list[int]] | None:
    if token_ids is None:
        return None
    lists = rows_of_ints("token_ids", token_ids, len(lengths))
    given = [len(row) for row in lists]
    if given != lengths:
        raise ValueError(f"token_ids has rows of {given} tokens; they must have {lengths}")
    return lists
