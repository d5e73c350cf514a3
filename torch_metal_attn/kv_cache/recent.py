"""`RecentKVCache`: a quantised cache whose last rows are kept in full precision."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.call.arguments import check_tensor, flag, integers, natural, whole
from torch_metal_attn.call.names import ArgumentNames
from torch_metal_attn.call.options import options_of
from torch_metal_attn.kv_cache.pages import CacheFull
from torch_metal_attn.kv_cache.static import StaticKVCache
from torch_metal_attn.kv_cache.storage import MOST, Storage
from torch_metal_attn.kv_cache.trees import Rows

# Of the quantised part alone.
_QUANTISED = ("format", "v_format", "hadamard", "k_scale", "v_scale")
# Options of attention that do not depend on where a key lies.
_OPTIONS = ("softmax_scale", "softcap", "learnable_sink", "num_splits")


class RecentKVCache:
    """`StaticKVCache` in a quantised format, but for the last rows of each sequence.

    Queries look at the rows just before them most. So at least the last `recent` rows are kept in
    the cache's dtype, as in KIVI (Liu et al. 2024), and are quantised when there is no more room
    for them: there is room for 2 * recent. Attention to both parts is two calls of the
    ops and `merge_state_`.

    Args: batch_size, max_length: as in `StaticKVCache`; max_length counts all rows. recent: 1 or
        more. The others are those of `StaticKVCache` but values_in_keys. format must be given.

    Raises: as `StaticKVCache`; nothing is changed then.
    """

    @options_of(Storage.__init__, 5)
    def __init__(
        self,
        batch_size: int,
        max_length: int,
        recent: int,
        num_kv_heads: int,
        head_dim: int,
        **options: Any,
    ) -> None:
        self.recent = natural("recent", recent, 1, MOST // 2)
        if options.get("format") is None:
            raise ValueError("format is None; without one every row is kept in full precision")
        if flag("values_in_keys", options.get("values_in_keys", False)):
            raise ValueError("values_in_keys is True; recent rows are not kept apart for latents")
        plain = {name: x for name, x in options.items() if name not in _QUANTISED}
        sizes = num_kv_heads, head_dim
        self.quantised = StaticKVCache(batch_size, max_length, *sizes, **options)
        self.rows = StaticKVCache(batch_size, 2 * self.recent, *sizes, **plain)
        self.batch_size, self.max_length = self.quantised.batch_size, self.quantised.max_length

    def seqlens(self, layer: int = 0) -> Tensor:
        """(B,) int32 on the cache's device: all rows of each sequence in a layer."""
        return self.quantised.seqlens(layer) + self.rows.seqlens(layer)

    def append(self, k: Tensor, v: Tensor, layer: int = 0) -> None:
        """Append k (B, Hkv, L, D) and v (B, Hkv, L, Dv), rotated already, to the sequences."""
        length = self._checked(k, v, layer)
        if length == 0:
            return
        first = max(length - self.recent, 0)
        self._make_room(length, layer)
        if first > 0:
            # The rows that were kept are older, and have all left.
            self.quantised.append(k[:, :, :first], v[:, :, :first], layer)
        self.rows.append(k[:, :, first:], v[:, :, first:], layer)

    def decode_step(
        self, q: Tensor, k: Tensor, v: Tensor, layer: int = 0, **options: Any
    ) -> Tensor:
        """Append up to `recent` new rows, and attend to the cache.

        Args: q: (B, Hq, L, D). q and k are rotated already. options: causal, softmax_scale,
            softcap, learnable_sink and num_splits of `flash_decode`.

        Returns: (B, Hq, L, Dv), in q's dtype.
        """
        for name in options:
            if name != "causal" and name not in _OPTIONS:
                raise TypeError(
                    f"decode_step has no option {name} with recent rows; it takes causal, "
                    f"{', '.join(_OPTIONS)}"
                )
        check_tensor("q", q)
        length = self._checked(k, v, layer)
        if not 1 <= length <= self.recent:
            raise ValueError(
                f"k has {length} new rows; decode_step takes 1..{self.recent}, the recent rows: "
                "append more with `append`"
            )
        if q.dim() == 4 and q.shape[2] > length and options.get("causal"):
            raise ValueError(
                f"q has {q.shape[2]} queries and k {length} new rows; causal queries "
                "may be as many as the new rows"
            )
        shared = {name: x for name, x in options.items() if name in _OPTIONS}
        shared.pop("learnable_sink", None)  # counted once
        # What either call refuses must leave the cache as it is.
        self._attend_quantised(q, layer, shared, check_only=True)
        room = self.rows._storage
        seqlens = torch.zeros_like(self.rows.seqlens(layer))
        room.run("decode_step", layer, (q, k, v), seqlens, check_only=True, **options)
        self._make_room(length, layer)
        out, lse = self.rows._write(layer, "decode_step", (q, k, v), options)
        self.rows.advance(length, layer)
        if any(self.quantised._lengths[layer]):
            part, part_lse = self._attend_quantised(q, layer, shared)
            torch.ops.metal_attn.merge_state_(out, lse, part, part_lse)
        result: Tensor = out
        return result

    def accept(self, indices: Sequence[int], paths: Rows, parents: Rows) -> None:
        """As `StaticKVCache.accept`, of trees whose rows are all in full precision still."""
        self.rows.accept(indices, paths, parents)

    def truncate(self, index: int, length: int) -> None:
        """Drop the rows of sequence `index` from `length` on. Quantised rows stay quantised."""
        index, length = whole("index", index), whole("length", length)
        self.quantised._check_indices("index", [index])
        parts = list(zip(self.quantised._lengths, self.rows._lengths, strict=True))
        longest = max(old[index] + new[index] for old, new in parts)
        if not 0 <= length <= longest:
            raise ValueError(
                f"length is {length}; sequence {index} has {longest} rows, so it must be in "
                f"0..{longest}"
            )
        for old, new in parts:
            new[index] = min(new[index], max(length - old[index], 0))
            old[index] = min(old[index], length)

    def reset(self, indices: Sequence[int] | None = None) -> None:
        """Empty these sequences, or all."""
        chosen = range(self.batch_size) if indices is None else integers("indices", indices)
        self.quantised._check_indices("indices", chosen)
        for b in chosen:
            self.truncate(b, 0)

    def reorder(self, beam_idx: Tensor | Sequence[int]) -> None:
        """Let sequence b continue sequence beam_idx[b], as in beam search; beam_idx is (B,)."""
        self.quantised.reorder(beam_idx)
        self.rows.reorder(beam_idx)

    def _checked(self, k: Tensor, v: Tensor, layer: int) -> int:
        """The number of new rows, which have a place."""
        storage = self.rows._storage
        storage.check_layer(layer)
        length = storage.check_new(k, v, self.batch_size, ())
        longest = max(
            old + new
            for old, new in zip(
                self.quantised._lengths[layer], self.rows._lengths[layer], strict=True
            )
        )
        if longest + length > self.max_length:
            raise CacheFull(
                f"{length} rows more do not fit: a sequence has {longest} of {self.max_length}"
            )
        return length

    def _make_room(self, length: int, layer: int) -> None:
        """Quantise the oldest rows of sequences that have no room for `length` more."""
        kept = max(self.recent - length, 0)
        lengths, before = self.rows._lengths[layer], self.quantised._lengths[layer]
        cache = self.rows.layers[layer]
        for b, held in enumerate(lengths):
            leave = held - kept
            # With more than `recent` new rows some are quantised at once, after all before them.
            if leave <= 0 or (held + length <= 2 * self.recent and length <= self.recent):
                continue
            row = self.rows._rows[b]
            k, v = (x[row : row + 1].transpose(1, 2) for x in (cache.k_cache, cache.v_cache))
            indices = self.quantised._storage.indices
            self.quantised._storage.run(
                "append_kv",
                layer,
                (k[:, :, :leave], v[:, :, :leave]),
                indices([before[b]]),
                cache_batch_idx=indices([self.quantised._rows[b]]),
            )
            for x in (k, v):
                x[:, :, :kept] = x[:, :, leave:held].clone()
            before[b] += leave
            lengths[b] = kept

    def _attend_quantised(
        self, q: Tensor, layer: int, options: dict[str, Any], *, check_only: bool = False
    ) -> Any:
        """Every query sees every row that is quantised: its own rows are none of them."""
        ops = torch.ops.metal_attn_explain if check_only else torch.ops.metal_attn
        caches, kept = self.quantised._storage.operands(layer)
        where = {
            "cache_batch_idx": self.quantised.cache_batch_idx(),
            "seqused_k": self.quantised.seqlens(layer),
        }
        return ArgumentNames().run(ops.flash_decode, (q, *caches), kept | where | options)
