"""`PagedKVCache`: sequences in pages that forks and equal prefixes share."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from torch import Tensor

from torch_metal_attn.call.arguments import integers, natural, whole
from torch_metal_attn.call.options import options_of
from torch_metal_attn.kv_cache.pages import CacheFull, PagePool, Prefix
from torch_metal_attn.kv_cache.storage import LayerCache, Storage

TokenIds = Tensor | Sequence[Sequence[int]]


@dataclass
class _Sequence:
    pages: list[int]
    lengths: list[int]  # of each layer
    tokens: list[int]  # as far as they are known
    prefixes: list[Prefix]  # of the first pages, those that are found by their tokens

    @property
    def length(self) -> int:
        """Rows of the layer that has the most."""
        return max(self.lengths)


class PagedKVCache:
    """Keys and values of many sequences in pages (Kwon et al. 2023, "PagedAttention").

    All layers use the same page numbers. `append` writes the new rows of one layer, so the layers
    of a sequence may differ in length during a step. Shapes below: B sequences, L new rows, Hkv
    heads, head dims D and Dv.

    Args: num_pages, page_size: pages, and rows of each. num_kv_heads, head_dim: Hkv and D;
        v_head_dim: Dv, D if None. dtype: of new keys and values (float32, float16 or bfloat16), and
        of the cache if format is None. A cache in half precision also takes float32 keys and
        values, and rounds them. format: None, or one of `torch_metal_attn.quantisation`'s, such as
        "q8_0" or "q3_g64"; v_format: that of values, if it is another. layout: "NHD", in memory
        (pages, page_size, Hkv, D) as in flash-attn, or "HND", (pages, Hkv, page_size, D). k_scale,
        v_scale: (Hkv,) float32, for fp8_e4m3 only; None is 1.

    Raises: ValueError for an unknown id or layer and for wrong shapes, naming what is wrong;
        `CacheFull` if there are too few pages. Nothing is changed then.
    """

    @options_of(Storage.__init__, 3)
    def __init__(self, num_pages: int, page_size: int, *sizes: Any, **options: Any) -> None:
        natural("num_pages", num_pages, 1)
        natural("page_size", page_size, 1)
        self.page_size = page_size
        self._storage = Storage(num_pages, page_size, *sizes, **options)
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
        v: Tensor,
        layer: int = 0,
        *,
        token_ids: TokenIds | None = None,
        **rotary: Any,
    ) -> None:
        """Append k (B, Hkv, L, D) and v (B, Hkv, L, Dv) to the B sequences.

        token_ids: (B, L), the rows' tokens, for `match_prefix` to find. Give them with any layer;
        the first ones given count. rotary: q, rotary_cos, rotary_sin and rotary_interleaved of
        `append_kv`.
        """
        self._storage.check_layer(layer)
        sequences = self._of(ids)
        length = self._storage.check_new(k, v, len(sequences), rotary)
        tokens = _as_lists(token_ids, len(ids), length)
        if ids and length > 0:
            seqlens = self.seqlens(ids, layer)
            if any(self._reserves(sequence, length, layer) for sequence in sequences):
                # What append_kv refuses must leave the pages as they are.
                table = self._table_of_any_pages(sequences, length, layer)
                self._storage.check_append(layer, k, v, seqlens, block_table=table, **rotary)
            self.reserve(ids, length, layer)
            table = self.block_table(ids)
            self._storage.append(layer, k, v, seqlens, block_table=table, **rotary)
        self.advance(ids, length, layer, token_ids=tokens)

    def reserve(self, ids: Sequence[int], length: int, layer: int = 0) -> None:
        """Reserve unshared pages for `length` more rows of each sequence.

        For ops that write rows themselves, such as `flash_attn_with_kvcache` with k and v; then
        call `advance`. Raises CacheFull before anything changes.
        """
        self._storage.check_layer(layer)
        natural("length", length)
        sequences = self._of(ids)
        missing = self._missing_pages(sequences, length, layer)
        if missing > 0:
            self._table = None
        copies: dict[int, int] = {}  # by the copy
        for sequence in sequences:
            held, new = self._written(sequence, length, layer)
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
        self, ids: Sequence[int], length: int, layer: int = 0, *, token_ids: TokenIds | None = None
    ) -> None:
        """Count `length` rows that were written to reserved pages; arguments as in `reserve`."""
        self._storage.check_layer(layer)
        natural("length", length)
        sequences = self._of(ids)
        tokens = _as_lists(token_ids, len(ids), length)
        for sequence in sequences:
            if self._pages_of(sequence.lengths[layer] + length) > len(sequence.pages):
                raise ValueError(f"length is {length}; call reserve for as many rows first")
        for i, sequence in enumerate(sequences):
            if tokens is not None and len(sequence.tokens) == sequence.lengths[layer]:
                sequence.tokens += tokens[i]
            sequence.lengths[layer] += length
            self._publish(sequence)

    def fork(self, id: int) -> int:
        """Create a sequence that shares this one's pages, which are copied before a write."""
        (sequence,) = self._of([id])
        if len(set(sequence.lengths)) > 1:
            raise ValueError(
                f"sequence {id} has layers of {min(sequence.lengths)} and of {sequence.length} "
                "rows; append to all of them before fork"
            )
        pages = sequence.pages[: self._pages_of(sequence.length)]
        for page in pages:
            self._pool.share(page)
        return self._add(
            _Sequence(pages, [*sequence.lengths], [*sequence.tokens], [*sequence.prefixes])
        )

    def free(self, id: int) -> None:
        """End a sequence. Pages of known tokens stay as prefixes until their space is needed."""
        (sequence,) = self._of([id])
        del self._sequences[id]
        self._release(sequence.pages)

    def truncate(self, id: int, length: int) -> None:
        """Drop the rows from `length` on, as speculative decoding does with rejected tokens."""
        (sequence,) = self._of([id])
        length = whole("length", length)
        if not 0 <= length <= sequence.length:
            raise ValueError(
                f"length is {length}; sequence {id} has {sequence.length} rows, so it must be in "
                f"0..{sequence.length}"
            )
        sequence.lengths = [min(n, length) for n in sequence.lengths]
        kept = self._pages_of(length)
        self._release(sequence.pages[kept:])
        del sequence.pages[kept:]
        del sequence.tokens[length:]
        del sequence.prefixes[length // self.page_size :]
        self._table = None

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
        """(B, max_blocks) int32 on the cache's device: each sequence's pages, then zeros."""
        sequences = self._of(ids)
        if self._table is None or self._table[0] != list(ids):
            width = max([1, *(len(sequence.pages) for sequence in sequences)])
            rows = [s.pages + [0] * (width - len(s.pages)) for s in sequences]
            table = self._storage.indices([page for row in rows for page in row])
            self._table = list(ids), table.view(len(rows), width)
        return self._table[1]

    def seqlens(self, ids: Sequence[int], layer: int = 0) -> Tensor:
        """(B,) int32 on the cache's device: the rows of each sequence in a layer."""
        self._storage.check_layer(layer)
        return self._storage.indices([sequence.lengths[layer] for sequence in self._of(ids)])

    def _pages_of(self, length: int) -> int:
        return -(-length // self.page_size)

    def _written(self, sequence: _Sequence, length: int, layer: int) -> tuple[range, int]:
        """Which of its pages `length` more rows change, and how many additional pages they need."""
        start = sequence.lengths[layer]
        end, count = self._pages_of(start + length), len(sequence.pages)
        first = start // self.page_size if length > 0 else end
        return range(first, min(end, count)), max(end - count, 0)

    def _reserves(self, sequence: _Sequence, length: int, layer: int) -> bool:
        """Whether `reserve` changes anything: it takes, copies or stops finding a page."""
        held, new = self._written(sequence, length, layer)
        pages = (sequence.pages[i] for i in held)
        return new > 0 or any(self._pool.is_shared_or_found(page) for page in pages)

    def _missing_pages(self, sequences: list[_Sequence], length: int, layer: int) -> int:
        """How many pages `length` more rows must take. Raises CacheFull if fewer are free."""
        missing = 0
        users: Counter[int] = Counter()
        for sequence in sequences:
            held, new = self._written(sequence, length, layer)
            missing += new
            users.update(sequence.pages[i] for i in held)
        # Of those that share a page, the last one left keeps it.
        missing += sum(min(n, self._pool.references[p] - 1) for p, n in users.items())
        if missing > self._pool.available:
            raise CacheFull(
                f"{length} rows more of {len(sequences)} sequences need {missing} pages, and "
                f"{self._pool.available} of {len(self._pool.references)} are free"
            )
        return missing

    def _table_of_any_pages(self, sequences: list[_Sequence], length: int, layer: int) -> Tensor:
        """A block table for `length` more rows, as valid as the one after `reserve`."""
        self._missing_pages(sequences, length, layer)
        ends = [self._pages_of(s.lengths[layer] + length) for s in sequences]
        page = count()
        rows = [
            [next(page) if i >= s.lengths[layer] // self.page_size else 0 for i in range(end)]
            + [0] * (max(ends) - end)
            for s, end in zip(sequences, ends, strict=True)
        ]
        return self._storage.indices([one for row in rows for one in row]).view(len(rows), -1)

    def _of(self, ids: Sequence[int]) -> list[_Sequence]:
        if not isinstance(ids, Sequence):
            raise TypeError(f"ids is {ids!r}; it must be a sequence of ints")
        for id in ids:
            if id not in self._sequences:
                raise ValueError(f"there is no sequence {id}: it was freed, or never allocated")
        if len(set(ids)) < len(ids):
            raise ValueError(f"ids are {list(ids)}; each sequence may be there once")
        return [self._sequences[id] for id in ids]

    def _add(self, sequence: _Sequence) -> int:
        id = self._next_id
        self._next_id += 1
        self._sequences[id] = sequence
        return id

    def _release(self, pages: list[int]) -> None:
        # The last first: a prefix must not be evicted before the pages that continue it.
        for page in reversed(pages):
            self._pool.release(page)

    def _publish(self, sequence: _Sequence) -> None:
        """Let pages be found by their tokens once those are known and every layer is full."""
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


def _as_lists(token_ids: TokenIds | None, batch: int, length: int) -> list[list[int]] | None:
    if token_ids is None:
        return None
    rows: Any = token_ids.tolist() if isinstance(token_ids, Tensor) else token_ids
    if isinstance(rows, str) or not isinstance(rows, Sequence):
        raise TypeError(f"token_ids is {token_ids!r}; it must be a row of ints for each sequence")
    lists = [integers(f"token_ids[{b}]", row) for b, row in enumerate(rows)]
    given = [len(row) for row in lists]
    if given != [length] * batch:
        raise ValueError(
            f"token_ids has rows of {given} tokens; it must have {batch} rows of {length}"
        )
    return lists
