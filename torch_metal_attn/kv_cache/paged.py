"""`PagedKVCache`: sequences in pages that forks and equal prefixes share."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from torch_metal_attn.call.arguments import (
    INT32_MAX,
    as_bool,
    as_int,
    as_int_at_least,
    integers,
    on_device,
)
from torch_metal_attn.call.options import options_of
from torch_metal_attn.kv_cache import trees
from torch_metal_attn.kv_cache.cascade import CascadePlan, block_table_of, zero_padded
from torch_metal_attn.kv_cache.pages import (
    CacheFull,
    NewRows,
    PagedSequence,
    PagePool,
    checked_namespace,
)
from torch_metal_attn.kv_cache.recent import Batch, RecentRows
from torch_metal_attn.kv_cache.storage import ExportedSequence, LayerCache, Storage
from torch_metal_attn.kv_cache.trees import Rows
from torch_metal_attn.kv_cache.windows import first_seen
from torch_metal_attn.kv_cache.writes import CacheStorage


class PagedKVCache:
    """Keys and values of many sequences in pages (Kwon et al. 2023, "PagedAttention").

    All layers of one window use the same page numbers. `append` writes the new rows of one layer,
    so the layers of a sequence may differ in length during a step. Shapes below: B sequences, L new
    rows, T new rows of all sequences, Hkv heads, head dims D and Dv.

    Args: num_pages, page_size: number of pages, and rows of a page. num_kv_heads, head_dim: Hkv and
        D; v_head_dim: Dv, D if None. dtype: of new keys and values (float32, float16 or bfloat16),
        and of the cache if format is None. A cache in half precision also takes float32 keys and
        values, and rounds them. format: None, or a format of `torch_metal_attn.quantisation`, as
        "q8_0" or "q3_g64"; v_format: the values' format, if it differs. hadamard: quantised rows
        are rotated in blocks of 32, 64 or 128 columns; 0 for none. layout: "NHD", in memory (pages,
        page_size, Hkv, D) as in flash-attn, or "HND", (pages, Hkv, page_size, D). k_scale, v_scale:
        (Hkv,) float32, for fp8_e4m3 only; None means 1. values_in_keys: values are the first Dv
        columns of the keys, and stored once, as in `LatentCache`. recent: at least this many of the
        last rows of each sequence are also kept in dtype, and `decode_step` reads them in place of
        the quantised rows; 0 for none. windows: for each layer how many previous keys a query sees
        (window_size_left), or -1 for all; None means -1. When all layers have the rows of a step,
        pages that were outside a layer's window before the step are freed. Layers with different
        windows use different pages of the same memory. A page has rows of as many layers as the
        rarest window has.

    Raises: ValueError for an unknown id or layer and for wrong shapes; `CacheFull` if there are too
        few pages. Nothing is changed then.
    """

    @options_of(Storage.__init__, 3)
    def __init__(self, num_pages: int, page_size: int, *sizes: Any, **options: Any) -> None:
        num_pages = as_int_at_least("num_pages", num_pages, 1, INT32_MAX)
        self.page_size = as_int_at_least("page_size", page_size, 1, INT32_MAX)
        self._storage = CacheStorage(num_pages, self.page_size, *sizes, **options)
        self._pool = PagePool(num_pages, self.page_size)
        self._sequences: dict[int, PagedSequence] = {}
        self._next_id = 0
        # The ids of the last call, and its block tables by group, which a step's layers share.
        self._tables: tuple[list[int], dict[int, Tensor]] | None = None

    @property
    def num_free_pages(self) -> int:
        """Pages available for new rows, including pages that only hold unused prefixes."""
        return self._pool.available

    @property
    def layers(self) -> list[LayerCache]:
        """Each layer's tensors, as `flash_attn_with_kvcache` takes them."""
        return self._storage.layers

    def allocate(self, namespace: Any = None) -> int:
        """Create an empty sequence; returns its id. namespace: as in `match_prefix`."""
        return self._add(self._matched([], namespace))

    def append(
        self,
        ids: Sequence[int],
        k: Tensor,
        v: Tensor | None = None,
        layer: int = 0,
        *,
        length: int | Sequence[int] | None = None,
        token_ids: Rows | None = None,
        **rotary: Any,
    ) -> None:
        """Append k (B, Hkv, L, D) and v (B, Hkv, L, Dv) to the B sequences.

        v may be None with values_in_keys. length: the number of new rows of each sequence, or one
        number for all. Rows are then packed, concatenated by sequence: k (T, Hkv, D), v (T, Hkv,
        Dv) and q (T, Hq, D). token_ids: (B, L) or a list for each sequence: the rows' tokens, for
        `match_prefix`. Pass them with any layer; later calls for the same rows are ignored. rotary:
        q, rotary_cos, rotary_sin, rotary_interleaved and rotary_first_column of `append_kv`.
        """
        self._write("append_kv", ids, (k, v), layer, length, token_ids, rotary)

    def decode_step(
        self,
        ids: Sequence[int],
        q: Tensor,
        k: Tensor,
        v: Tensor | None = None,
        layer: int = 0,
        *,
        length: int | Sequence[int] | None = None,
        token_ids: Rows | None = None,
        **options: Any,
    ) -> Tensor:
        """Append the new rows and attend to the cache, by `metal_attn::decode_step`.

        Args: q: (B, Hq, L, D), or packed (T, Hq, D). k, v, length, token_ids: as in `append`. L is
            at least 1; with length a sequence may have no new row. Pass the tokens of a tree to
            `accept`. options: those of the op, such as causal, softmax_scale and parents, (T,) if
            packed, or indices, kv_block_size and q_block_size of `flash_decode`. With
            values_in_keys softmax_scale is required, as the model does not scale by D. In a layer
            with a window, window_size_left is the window by default, and may be less. With recent,
            options that depend on a key's position are not supported, and L is at most 64 unless
            causal.

        Returns: (B, Hq, L, Dv) or (T, Hq, Dv), in q's dtype.

        Raises: as `append`.
        """
        for name in ("parents", "tree_mask"):
            if token_ids is not None and options.get(name) is not None:
                raise ValueError(
                    f"token_ids is given with {name}, and the rows of a tree do not follow each "
                    "other; pass the tree's tokens to accept"
                )
        return self._write("decode_step", ids, (q, k, v), layer, length, token_ids, options)[0]

    def _write(
        self,
        op: str,
        ids: Sequence[int],
        new: tuple[Any, ...],
        layer: int,
        length: int | Sequence[int] | None,
        token_ids: Rows | None,
        options: dict[str, Any],
    ) -> Any:
        """Run an op that writes new rows of each sequence into unshared pages."""
        self._storage.check_layer(layer)
        ids, sequences = self._sequences_of(ids)
        counts = None if length is None else trees.per_sequence(length, len(ids))
        new, more = self._storage.checked(op, new, len(ids), options, counts)
        tokens = _as_lists(token_ids, more)
        written = [NewRows(s, s.lengths[layer], n) for s, n in zip(sequences, more, strict=True)]
        lengths, slots = [rows.start for rows in written], [s.slot for s in sequences]
        batch = Batch(layer, new, lengths, slots, {}, options)
        group = self._storage.groups.groups[layer]
        if any(self._pool.reserves(rows) for rows in written):
            # A call that the op refuses must leave the pages as they are.
            pages = self._pool.pages_after(written, group)
            table = block_table_of(pages, self._storage.device)
            checked = batch._replace(where={"block_table": table})
            self._storage.write(op, checked, counts, check_only=True)
        self._unshare(written)
        where = {"block_table": self._table_of(ids, sequences, group)}
        result = self._storage.write(op, batch._replace(where=where), counts)
        self._advance(sequences, more, layer, tokens)
        return result

    def reserve(self, ids: Sequence[int], length: int | Sequence[int], layer: int = 0) -> None:
        """Reserve unshared pages for more rows. length: as in `append`, the rows of each sequence.

        Use it before ops that write rows themselves, such as `flash_attn_with_kvcache` with k and
        v, and call `advance` after them. Raises CacheFull before anything changes.
        """
        self._storage.check_layer(layer)
        ids, sequences = self._sequences_of(ids)
        lengths = trees.per_sequence(length, len(ids))
        written = [NewRows(s, s.lengths[layer], n) for s, n in zip(sequences, lengths, strict=True)]
        self._unshare(written)

    def _unshare(self, written: list[NewRows]) -> None:
        """Give each sequence unshared pages for these rows, whose tokens are unknown."""
        if self._pool.missing(written) > 0:
            self._tables = None
        copies = self._pool.unshare(written)
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
        ids, sequences = self._sequences_of(ids)
        lengths = trees.per_sequence(length, len(ids))
        tokens = _as_lists(token_ids, lengths)
        for sequence, more in zip(sequences, lengths, strict=True):
            if self._pool.reserves(NewRows(sequence, sequence.lengths[layer], more)):
                raise ValueError(f"length is {more}; call reserve with the same length first")
        self._advance(sequences, lengths, layer, tokens)

    def _advance(
        self,
        sequences: list[PagedSequence],
        lengths: list[int],
        layer: int,
        tokens: list[list[int]] | None,
    ) -> None:
        for i, (sequence, more) in enumerate(zip(sequences, lengths, strict=True)):
            if tokens is not None and len(sequence.tokens) == sequence.lengths[layer]:
                sequence.tokens += tokens[i]
            before = min(sequence.lengths)
            sequence.lengths[layer] += more
            self._pool.publish_full(sequence)
            if min(sequence.lengths) > before:
                firsts = self._storage.groups.first_pages(before, self.page_size)
                if self._pool.free_before(sequence, firsts):
                    self._tables = None

    def _check_window(self, id: int, sequence: PagedSequence, length: int) -> None:
        self._storage.groups.check_pages(id, sequence.pages, length, self.page_size)

    def accept(
        self,
        ids: Sequence[int],
        paths: Rows,
        parents: Rows,
        *,
        token_ids: Rows | None = None,
    ) -> None:
        """Keep one path of each sequence's tree of new tokens, and drop its other rows.

        In all layers the path's rows are moved to directly follow the rows before the tree. If a
        fork shares them, they are copied first.

        Args: paths: for each sequence the tokens of its tree to keep, counted from the first token
            of the tree: a root, then a child of the root, and so on; empty to drop the entire tree.
            parents: the trees, which are the last rows of each sequence: for each token its parent,
            an earlier token, or -1 for a root. token_ids: for each sequence the tokens of its tree;
            `match_prefix` then knows those of the path.

        Raises: ValueError: parents is not a tree, or a path is not in it; a tree has more tokens
            than rows were written since the last accept; the layers differ in length, as before the
            end of a step; fewer rows than `recent` would be left. CacheFull: no page is free for
            the copy of a shared one. Nothing is changed then.
        """
        ids, sequences = self._sequences_of(ids)
        for id, sequence in zip(ids, sequences, strict=True):
            trees.check_layers_agree(id, sequence.lengths, "accept")
        lengths, accepted = [s.length for s in sequences], [s.accepted for s in sequences]
        kept, starts = trees.checked_paths(paths, parents, lengths, accepted)
        sizes = [length - start for length, start in zip(lengths, starts, strict=True)]
        tokens = _as_lists(token_ids, sizes)
        ends = [start + len(path) for start, path in zip(starts, kept, strict=True)]
        for id, sequence, start, end in zip(ids, sequences, starts, ends, strict=True):
            self._check_window(id, sequence, end)
            reason = f"the path ends at row {end}"
            self._storage.recent.check_kept(sequence.slot, end, reason, start)
        rounds = [*map(trees.moves, kept)]
        written = []
        for sequence, start, end, copies in zip(sequences, starts, ends, rounds, strict=True):
            first = start + copies[0][0][1] if copies else end
            written.append(NewRows(sequence, first, end - first))
        # A page that a fork shares is copied; the rows are then read from the copy.
        self._unshare(written)
        for group in range(len(self._storage.groups.by_group)):
            pages = [sequence.pages[group] for sequence in sequences]
            self._storage.move_paths(rounds, starts, partial(self._place, pages))
        self._storage.recent.move_paths(rounds, starts, lengths, [s.slot for s in sequences])
        for i, (id, sequence, path) in enumerate(zip(ids, sequences, kept, strict=True)):
            start = starts[i]
            known = sequence.tokens[start:] if tokens is None else tokens[i]
            follows = len(sequence.tokens) >= start and len(known) == sizes[i]
            self.truncate(id, ends[i], keep_recent=False)
            sequence.accepted = ends[i]
            del sequence.tokens[start:]
            sequence.tokens += [known[token] for token in path] if follows else []
            del sequence.prefixes[1 + len(sequence.tokens) // self.page_size :]
            self._pool.publish_full(sequence)

    def fork(self, id: int) -> int:
        """Create a sequence that shares this one's pages, which are copied before a write."""
        id, sequence = self._sequence_of(id)
        trees.check_layers_agree(id, sequence.lengths, "fork")
        end = self._pool.pages_of(sequence.length)
        pages = [group_pages[:end] for group_pages in sequence.pages]
        self._pool.share_all(pages)
        copied = PagedSequence(pages, [*sequence.lengths], [*sequence.tokens], [*sequence.prefixes])
        copied.accepted = sequence.accepted
        id = self._add(copied)
        self._storage.recent.copy([sequence.slot], [copied.slot])
        return id

    def free(self, id: int) -> None:
        """End a sequence. Pages of known tokens stay as prefixes until their space is needed."""
        id, sequence = self._sequence_of(id)
        del self._sequences[id]
        self._pool.release_from(sequence, 0)
        self._storage.recent.release(sequence.slot)

    def truncate(self, id: int, length: int, *, keep_recent: bool = True) -> None:
        """Drop the rows from `length` on, as speculative decoding does with rejected tokens.

        With `recent` a sequence can be cut by up to 64 rows from its longest length, or to 0. Other
        lengths raise ValueError, as fewer rows than `recent` would be left in full precision.
        keep_recent=False allows other lengths, and reads older rows in quantised form. With
        windows, truncate raises ValueError if a page that the next queries see was freed. The rows
        of the last step can always be dropped.
        """
        id, sequence = self._sequence_of(id)
        length = trees.length_within(id, length, sequence.length)
        self._check_window(id, sequence, length)
        if as_bool("keep_recent", keep_recent):
            self._storage.recent.check_kept(sequence.slot, length, f"length is {length}")
        sequence.accepted = min(sequence.accepted, length)
        sequence.lengths = [min(n, length) for n in sequence.lengths]
        self._pool.release_from(sequence, self._pool.pages_of(length))
        del sequence.tokens[length:]
        del sequence.prefixes[1 + length // self.page_size :]
        self._tables = None
        self._storage.recent.truncate(sequence.slot, length)

    def match_prefix(
        self, token_ids: Tensor | Sequence[int], namespace: Any = None
    ) -> tuple[int, int]:
        """Create a sequence that shares the longest known prefix of `token_ids`.

        Returns its id and the prefix's length. Only full pages match, and only those whose tokens
        were given to `append`. Layers with a window need only the pages in it. Leave out the last
        token, so that a query is left to run.

        namespace: distinguishes keys and values that depend on more than the tokens, such as an
        adapter, an image or a tenant: None, a str, an int, bytes, or a tuple of these. A sequence
        and its forks keep the namespace of their creation, and match no other.
        """
        sequence = self._matched(integers("token_ids", token_ids), namespace)
        return self._add(sequence), sequence.length

    def _matched(self, tokens: list[int], namespace: Any) -> PagedSequence:
        """A new sequence with the pages of the longest known prefix."""
        root = self._pool.prefix(None, checked_namespace(namespace))
        groups = self._storage.groups
        prefixes = self._pool.match(root, tokens, groups)
        matched = (len(prefixes) - 1) * self.page_size
        pages = [
            [-1] * first + [prefix.pages[group] for prefix in prefixes[1 + first :]]
            for group, first in enumerate(groups.first_pages(matched, self.page_size))
        ]
        self._pool.share_all(pages)
        return PagedSequence(pages, [matched] * len(self.layers), tokens[:matched], prefixes)

    def export_sequence(self, id: int, device: Any = "cpu") -> ExportedSequence:
        """A copy of a sequence's pages on `device`. To swap the sequence out, then `free` it.

        `import_sequence` of this cache, or of another with the same layout, restores it.
        """
        device = on_device(device)
        _, sequence = self._sequence_of(id)
        held = [[page >= 0 for page in pages] for pages in sequence.pages]
        pages = [page for pages in sequence.pages for page in pages if page >= 0]
        return ExportedSequence(
            self._storage.kind(),
            sequence.prefixes[0].tokens,
            [*sequence.tokens],
            [*sequence.lengths],
            sequence.accepted,
            held,
            self._storage.read(pages, device),
            self._storage.recent.read(sequence.slot, device),
        )

    def import_sequence(self, exported: ExportedSequence) -> int:
        """Create a sequence from an exported one; returns its id.

        The sequence shares pages that the cache still has for its known tokens.

        Raises: ValueError: it was exported from a cache of another layout. CacheFull: too few pages
            are free. Nothing is changed then.
        """
        self._storage.check_kind(exported)
        sequence = self._matched(exported.tokens[: min(exported.lengths)], exported.namespace)
        groups = [*zip(sequence.pages, exported.held, strict=True)]
        for pages, held in groups:
            pages += [-1] * (len(held) - len(pages))
        missing = sum(used and page < 0 for x in groups for page, used in zip(*x, strict=True))
        if missing > self._pool.available:
            self._pool.release_from(sequence, 0)
            raise CacheFull(
                f"the sequence needs {missing} more pages, and {self._pool.available} of "
                f"{len(self._pool.references)} are free"
            )
        sources: list[int] = []  # indices of exported pages
        destinations: list[int] = []
        i = 0
        for pages, held in groups:
            for j, used in enumerate(held):
                if used and pages[j] < 0:
                    pages[j] = self._pool.take()
                    sources.append(i)
                    destinations.append(pages[j])
                elif not used and pages[j] >= 0:
                    self._pool.release(pages[j])
                    pages[j] = -1
                i += used
        self._storage.fill(destinations, [pages[sources] for pages in exported.pages])
        sequence.tokens, sequence.lengths = [*exported.tokens], [*exported.lengths]
        sequence.accepted = exported.accepted
        self._pool.publish_full(sequence)
        id = self._add(sequence)
        self._storage.recent.fill_slot(sequence.slot, exported.recent)
        return id

    def defragment(self) -> int:
        """Move the pages in use to the front; returns the number of moved pages."""
        renamed = self._pool.compact()
        self._storage.copy(list(renamed), list(renamed.values()))
        for sequence in self._sequences.values():
            for pages in sequence.pages:
                pages[:] = [renamed.get(page, page) for page in pages]
        self._tables = None
        return len(renamed)

    def block_table(self, ids: Sequence[int], layer: int = 0) -> Tensor:
        """(B, max_blocks) int32 on the cache's device: each sequence's pages, then zeros.

        Pages that were freed outside the layer's window are -1. Do not write to the tensor, as the
        next calls for the same ids use it too.
        """
        self._storage.check_layer(layer)
        return self._table_of(*self._sequences_of(ids), self._storage.groups.groups[layer])

    def _table_of(self, ids: list[int], sequences: list[PagedSequence], group: int) -> Tensor:
        if self._tables is None or self._tables[0] != ids:
            self._tables = ids, {}
        tables = self._tables[1]
        if group not in tables:
            pages = [sequence.pages[group] for sequence in sequences]
            tables[group] = block_table_of(pages, self._storage.device)
        return tables[group]

    def cascade(
        self, ids: Sequence[int], q_length: int = 1, layer: int = 0, **options: Any
    ) -> CascadePlan:
        """A plan of the pages that these sequences share, for attention to rows already written.

        The plan is valid for all layers that use the pages of `layer`; in caches with windows these
        are the layers of its group. q_length: queries of each sequence. options: causal,
        window_size and min_pages of `CascadePlan`. `attend` raises ValueError for a layer with
        other pages, and if the sequences have changed in that layer.
        """
        self._storage.check_layer(layer)
        ids, sequences = self._sequences_of(ids)
        if isinstance(self._storage.recent, RecentRows):
            raise ValueError(
                f"recent is {self._storage.recent.recent}, and a cascade cannot read rows in full "
                "precision; use decode_step, or a cache without recent"
            )
        windows = self._storage.groups
        group, options = windows.groups[layer], windows.cascade_options(layer, options)
        pages = zero_padded([sequence.pages[group] for sequence in sequences])
        lengths = [sequence.lengths[layer] for sequence in sequences]
        options |= {"device": self._storage.device}
        plan = CascadePlan(pages, lengths, self.page_size, q_length, **options)
        seen = []
        for row, length in zip(pages, lengths, strict=True):
            seen_from = max(length - plan.q_length, 0)
            first = first_seen(seen_from, windows.windows[layer]) // self.page_size
            seen.append((length, first, row[first : self._pool.pages_of(length)]))
        plan.check_current = partial(self._check_plan, ids, seen, layer)
        return plan

    def _check_plan(
        self,
        ids: list[int],
        seen: list[tuple[int, int, list[int]]],
        layer: int,
        k_cache: Tensor,
    ) -> None:
        """Raise ValueError if a plan's rows or pages are no longer those of `k_cache`."""
        group = self._storage.groups.groups[layer]
        layer = next((i for i, x in enumerate(self.layers) if x.k_cache is k_cache), layer)
        if self._storage.groups.groups[layer] != group:
            raise ValueError(
                f"the plan is for other pages than those of layer {layer}; layers with another "
                "window or another block_table need a plan of their own"
            )
        sequences = self._sequences_of(ids)[1]
        for id, sequence, (length, first, pages) in zip(ids, sequences, seen, strict=True):
            now = sequence.lengths[layer]
            if now != length or sequence.pages[group][first : first + len(pages)] != pages:
                changed = f"it has {now}" if now != length else "they are in other pages"
                raise ValueError(
                    f"the plan is for {length} rows of sequence {id}, and now {changed}; make a "
                    "plan after the rows of a step are written"
                )

    def seqlens(self, ids: Sequence[int], layer: int = 0) -> Tensor:
        """(B,) int32 on the cache's device: the rows of each sequence in a layer."""
        return self._storage.indices(self.lengths(ids, layer))

    def lengths(self, ids: Sequence[int], layer: int = 0) -> list[int]:
        """The rows of these sequences in a layer."""
        self._storage.check_layer(layer)
        return [sequence.lengths[layer] for sequence in self._sequences_of(ids)[1]]

    def slots(self, ids: Sequence[int]) -> list[int]:
        """The slots of these sequences' recent rows, for `RecentRows`."""
        return [sequence.slot for sequence in self._sequences_of(ids)[1]]

    def _place(self, pages: list[list[int]], i: int, row: int) -> tuple[int, int]:
        """The page of a row of sequence i, and the row's index in it."""
        return pages[i][row // self.page_size], row % self.page_size

    def _sequences_of(self, ids: Sequence[int]) -> tuple[list[int], list[PagedSequence]]:
        """The ids as Python ints, and their sequences."""
        ids = integers("ids", ids)
        for id in ids:
            if id not in self._sequences:
                raise ValueError(f"there is no sequence {id}: the id was freed, or never allocated")
        if len(set(ids)) < len(ids):
            raise ValueError(f"ids are {ids}; each sequence may occur only once")
        return ids, [self._sequences[id] for id in ids]

    def _sequence_of(self, id: int) -> tuple[int, PagedSequence]:
        id = as_int("id", id)
        return id, self._sequences_of([id])[1][0]

    def _add(self, sequence: PagedSequence) -> int:
        id = self._next_id
        self._next_id += 1
        self._sequences[id] = sequence
        sequence.slot = self._storage.recent.take()
        return id


def _as_lists(token_ids: Rows | None, lengths: list[int]) -> list[list[int]] | None:
    if token_ids is None:
        return None
    lists = trees.rows_of_ints("token_ids", token_ids, len(lengths))
    counts = [len(row) for row in lists]
    if counts != lengths:
        raise ValueError(f"token_ids has rows of {counts} tokens; they must have {lengths}")
    return lists
