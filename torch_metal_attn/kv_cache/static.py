"""`StaticKVCache`: one row of fixed length per sequence, at addresses that never change."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torch_metal_attn.call.arguments import INT32_MAX, as_bool, as_int, as_int_at_least, integers
from torch_metal_attn.call.options import options_of
from torch_metal_attn.kv_cache import trees
from torch_metal_attn.kv_cache.pages import CacheFull
from torch_metal_attn.kv_cache.recent import Batch
from torch_metal_attn.kv_cache.storage import LayerCache, Storage
from torch_metal_attn.kv_cache.trees import Rows
from torch_metal_attn.kv_cache.writes import CacheStorage
from torch_metal_attn.wording import count_text


class StaticKVCache:
    """Keys and values of `batch_size` sequences of at most `max_length` rows each.

    The tensors are allocated once. Sequence b has row `cache_batch_idx()[b]` of each tensor, so
    `reorder` copies a row only if more than one sequence continues it. The other arguments are
    those of `PagedKVCache`, with memory as (batch, max_length, Hkv, D) for "NHD".

    Raises: ValueError for an unknown layer and for wrong shapes; `CacheFull` if a sequence would
        exceed max_length. Nothing is changed then.
    """

    @options_of(Storage.__init__, 3, without="windows")
    def __init__(self, batch_size: int, max_length: int, *sizes: Any, **options: Any) -> None:
        self.batch_size = as_int_at_least("batch_size", batch_size, 1, INT32_MAX)
        self.max_length = as_int_at_least("max_length", max_length, 1, INT32_MAX)
        if "windows" in options:
            raise TypeError("StaticKVCache has no argument windows: it frees no rows")
        self._storage = CacheStorage(self.batch_size, self.max_length, *sizes, **options)
        self._rows = list(range(self.batch_size))  # the tensors' row of each sequence
        self._lengths = [[0] * self.batch_size for _ in self._storage.layers]
        self._accepted = [0] * self.batch_size  # the length after the last accept
        self._storage.recent.grow(self.batch_size)

    @property
    def layers(self) -> list[LayerCache]:
        """Each layer's tensors, as `flash_attn_with_kvcache` takes them."""
        return self._storage.layers

    def append(
        self,
        k: Tensor,
        v: Tensor | None = None,
        layer: int = 0,
        *,
        length: int | Sequence[int] | None = None,
        **rotary: Any,
    ) -> None:
        """Append k (B, Hkv, L, D) and v (B, Hkv, L, Dv) to the sequences.

        v may be None with values_in_keys. length: as in `PagedKVCache.append`, for packed rows.
        rotary: q, rotary_cos, rotary_sin, rotary_interleaved and rotary_first_column of
        `append_kv`.
        """
        self._write("append_kv", (k, v), layer, length, rotary)

    def decode_step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None = None,
        layer: int = 0,
        *,
        length: int | Sequence[int] | None = None,
        **options: Any,
    ) -> Tensor:
        """Append the new rows and attend to the cache, as `PagedKVCache.decode_step`."""
        return self._write("decode_step", (q, k, v), layer, length, options)[0]

    def _write(
        self,
        op: str,
        new: tuple[Any, ...],
        layer: int,
        length: int | Sequence[int] | None,
        options: dict[str, Any],
    ) -> Any:
        self._storage.check_layer(layer)
        counts = None if length is None else trees.per_sequence(length, self.batch_size)
        new, more = self._storage.checked(op, new, self.batch_size, options, counts)
        lengths = self._lengths[layer]
        for before, count in zip(lengths, more, strict=True):
            if before + count > self.max_length:
                raise CacheFull(
                    f"{count} more rows do not fit: a sequence has {before} of {self.max_length}"
                )
        where = {"cache_batch_idx": self.cache_batch_idx()}
        batch = Batch(layer, new, lengths, self._rows, where, options)
        result = self._storage.write(op, batch, counts)
        self.advance(more, layer)
        return result

    def advance(self, length: int | Sequence[int], layer: int = 0) -> None:
        """Count rows that an op such as `flash_attn_with_kvcache` has written itself.

        length: the number of rows of each sequence, or one number for all.
        """
        self._storage.check_layer(layer)
        lengths = trees.per_sequence(length, self.batch_size)
        for more, before in zip(lengths, self._lengths[layer], strict=True):
            if before + more > self.max_length:
                raise ValueError(
                    f"length is {more}; a sequence has {before} of {self.max_length} rows, so it "
                    f"must be in 0..{self.max_length - before}"
                )
        self._lengths[layer] = [a + b for a, b in zip(self._lengths[layer], lengths, strict=True)]

    def accept(self, indices: Sequence[int], paths: Rows, parents: Rows) -> None:
        """Keep one path of each sequence's tree of new tokens, and drop the tree's other rows.

        Arguments and errors are those of `PagedKVCache.accept`.
        """
        chosen = self._chosen(indices)
        if len(set(chosen)) < len(chosen):
            raise ValueError(f"indices are {chosen}; each sequence may occur only once")
        lengths = [max(lengths[b] for lengths in self._lengths) for b in chosen]
        for b in chosen:
            trees.check_layers_agree(b, [lengths[b] for lengths in self._lengths], "accept")
        accepted = [self._accepted[b] for b in chosen]
        kept, starts = trees.checked_paths(paths, parents, lengths, accepted)
        ends = [start + len(path) for start, path in zip(starts, kept, strict=True)]
        rounds, blocks = [*map(trees.moves, kept)], [self._rows[b] for b in chosen]
        for slot, start, end in zip(blocks, starts, ends, strict=True):
            self._storage.recent.check_kept(slot, end, f"the path ends at row {end}", start)
        self._storage.move_paths(rounds, starts, lambda i, row: (blocks[i], row))
        self._storage.recent.move_paths(rounds, starts, lengths, blocks)
        for b, end in zip(chosen, ends, strict=True):
            self.truncate(b, end, keep_recent=False)
            self._accepted[b] = end

    def reset(self, indices: Sequence[int] | None = None) -> None:
        """Remove all rows of these sequences, or of all sequences if None."""
        for b in range(self.batch_size) if indices is None else self._chosen(indices):
            self.truncate(b, 0)

    def truncate(self, index: int, length: int, *, keep_recent: bool = True) -> None:
        """Drop the rows of sequence `index` from `length` on, as `PagedKVCache.truncate`."""
        index = as_int("index", index)
        self._check_indices("index", [index])
        longest = max(lengths[index] for lengths in self._lengths)
        length = trees.length_within(index, length, longest)
        if as_bool("keep_recent", keep_recent):
            self._storage.recent.check_kept(self._rows[index], length, f"length is {length}")
        self._accepted[index] = min(self._accepted[index], length)
        for lengths in self._lengths:
            lengths[index] = min(lengths[index], length)
        self._storage.recent.truncate(self._rows[index], length)

    def reorder(self, beam_idx: Tensor | Sequence[int]) -> None:
        """Let sequence b continue sequence beam_idx[b], as in beam search; beam_idx is (B,)."""
        origins = integers("beam_idx", beam_idx)
        self._check_indices("beam_idx", origins)
        if len(origins) != self.batch_size:
            raise ValueError(
                f"beam_idx has {count_text(len(origins), 'entry')}; it must have {self.batch_size}"
            )
        rows = [self._rows[origin] for origin in origins]
        unused = [row for row in self._rows if row not in rows]
        copies: dict[int, int] = {}  # the original row of each copy
        for b, row in enumerate(rows):
            if row in rows[:b]:
                rows[b] = unused.pop()
                copies[rows[b]] = row
        for part in (self._storage, self._storage.recent):
            part.copy(list(copies.values()), list(copies))
        self._rows = rows
        self._lengths = [[lengths[o] for o in origins] for lengths in self._lengths]
        self._accepted = [self._accepted[o] for o in origins]

    def cache_batch_idx(self) -> Tensor:
        """(B,) int32 on the cache's device: each sequence's row of the tensors."""
        return self._storage.indices(self._rows)

    def seqlens(self, layer: int = 0) -> Tensor:
        """(B,) int32 on the cache's device: the rows of each sequence in a layer."""
        return self._storage.indices(self.lengths(range(self.batch_size), layer))

    def lengths(self, indices: Sequence[int], layer: int = 0) -> list[int]:
        """The rows of these sequences in a layer."""
        self._storage.check_layer(layer)
        return [self._lengths[layer][index] for index in self._chosen(indices)]

    def slots(self, indices: Sequence[int]) -> list[int]:
        """The slots of these sequences' recent rows, for `RecentRows`."""
        return [self._rows[index] for index in self._chosen(indices)]

    def _chosen(self, indices: Sequence[int]) -> list[int]:
        chosen = integers("indices", indices)
        self._check_indices("indices", chosen)
        return chosen

    def _check_indices(self, name: str, indices: Sequence[int]) -> None:
        for index in indices:
            if not 0 <= index < self.batch_size:
                raise ValueError(f"{name} is {index}; it must be in 0..{self.batch_size - 1}")
