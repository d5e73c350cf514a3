"""Two sequences in a cache of any kind, and the rows that it must hold, in float64."""

import torch

from tests.attention.flash_fwd_check import rotary_tables
from torch_metal_attn import flash_attn_with_kvcache
from torch_metal_attn.call.visibility import depths, tree_rows
from torch_metal_attn.kv_cache import LatentCache, PagedKVCache, StaticKVCache, StaticLatentCache
from torch_metal_attn.quantisation import dequantise, quantise
from torch_metal_attn.reference import attention
from torch_metal_attn.testing.judge import normal, on
from torch_metal_attn.with_kvcache import VERIFY_QUERIES

# Options of every step, so that tests share kernels.
STEP = {"softmax_scale": 0.3, "causal": True, "softcap": 5.0, "num_splits": 2}
STEP |= {"learnable_sink": normal(2, seed=5)}
CLASSES = {
    "static": (StaticKVCache, 2, 300, 1, 96, 64),
    "paged": (PagedKVCache, 40, 16, 1, 96, 64),
    "static latent": (StaticLatentCache, 2, 300, 64, 32),
    "paged latent": (LatentCache, 40, 16, 64, 32),
}
TREES = ("parents", "tree_mask")
# The absolute error allowed in float32 results near 1. The reference attends to the stored rows.
TOLERANCE = 4e-6


def tables(columns):
    return dict(zip(("rotary_cos", "rotary_sin"), rotary_tables(300, columns // 2), strict=True))


class Sequences:
    """Appends float32 rows to a cache of any format."""

    def __init__(self, kind, device="cpu", **options):
        self.paged, self.latent = "paged" in kind, "latent" in kind
        self.device, self.dtype = device, options.setdefault("dtype", torch.float32)
        make, *sizes = CLASSES[kind]
        self.cache = make(*sizes, device=device, **options)
        self.ids = [self.cache.allocate(), self.cache.allocate()] if self.paged else [0, 1]
        self.rows = [[torch.zeros(1, 0, 96), torch.zeros(1, 0, 64)] for _ in range(2)]
        self.formats = options.get("format"), options.get("v_format", options.get("format"))
        self.hadamard = options.get("hadamard", 0)
        self.recent = options.get("recent", 0)
        self.room = self.recent + VERIFY_QUERIES if self.recent else 0
        self.exact = [0, 0]  # the first row of each sequence that must be in full precision
        windows = options.get("windows")
        self.window = {"window_size_left": windows[0]} if windows else {}

    def ids_or_none(self):
        return [self.ids] if self.paged else []

    def operands(self, *tensors):
        tensors = tensors[:-1] if self.latent else tensors
        on_device = (x.to(self.device) if torch.is_tensor(x) else x for x in tensors)
        return [*self.ids_or_none(), *on_device]

    def new(self, length, seed):
        k = normal(2, 1, length, 96, seed=seed)
        return k, k[..., :64] if self.latent else normal(2, 1, length, 64, seed=seed + 1)

    def add(self, k, v, counts=(None, None)):
        for b, rows in enumerate(self.rows):
            pairs = zip(rows, (k, v), strict=True)
            rows[:] = [torch.cat([old, new[b][:, : counts[b]]], 1) for old, new in pairs]
            self.exact[b] = max(self.exact[b], len(rows[0][0]) - self.room)

    def append(self, length, seed, **rotary):
        k, v = self.new(length, seed)
        self.cache.append(*self.operands(k, v), **on(self.device, rotary))
        self.add(self.rotated(k, rotary), v)

    def rotated(self, x, options):
        if "rotary_cos" not in options:
            return x
        tree = tree_rows(options.get("parents"), options.get("tree_mask"))
        # A token of a tree is rotated by its depth.
        after = torch.arange(x.shape[2]) if tree is None else depths(tree)
        positions = torch.tensor(self.lengths())[:, None] + after
        cos, sin = options["rotary_cos"], options["rotary_sin"]
        first = x.shape[3] - 2 * cos.shape[1]
        interleaved = options.get("rotary_interleaved", False)
        tail, _ = torch.ops.metal_attn.rope(
            x[..., first:], None, cos, sin, positions=positions, interleaved=interleaved
        )
        return torch.cat([x[..., :first], tail], -1)

    def lengths(self):
        return [len(k[0]) for k, _ in self.rows]

    def slots(self):
        if self.paged:
            return [self.cache._sequences[id].slot for id in self.ids]
        return self.cache._rows

    def first(self):
        """The first row of each sequence that is still in full precision."""
        held = self.cache._storage.recent._held[0]
        kept = [held[slot] for slot in self.slots()]
        return [
            one.first if one.end == length else length
            for one, length in zip(kept, self.lengths(), strict=True)
        ]

    def stored(self, b):
        """Rows of sequence b in float64. Rows before the exact ones are rounded to their codes."""
        near = []
        for x, format in zip(self.rows[b], self.formats, strict=True):
            x, before = x.to(self.dtype), self.exact[b]
            if format:
                codes = quantise(x, format, hadamard=self.hadamard)
                codes = dequantise(*codes, torch.float32, hadamard=self.hadamard)
                x = torch.cat([codes[:, :before], x[:, before:]], 1)
            near.append(x[None].double())
        return [near[0], near[0][..., :64]] if self.latent else near

    def check(self, out, q, options, counts=None):
        """Compare a step with float64. counts: the queries of each sequence, if not all."""
        unseen = ("rotary", "num_splits")
        seen = {name: x for name, x in options.items() if not name.startswith(unseen)}
        for b, count in enumerate(counts or [q.shape[2]] * 2):
            trees = {n: x[b : b + 1] for n, x in seen.items() if n in TREES and len(x.shape) > 1}
            if count > 0 and counts:
                trees = {n: x[:, :count] for n, x in trees.items()}
            expected, _ = attention(
                q[b : b + 1, :, :count].double(),
                *self.stored(b),
                compute_dtype=torch.float64,
                **self.window | seen | trees,
            )
            error = (out[b : b + 1, :, :count].cpu().double() - expected).abs()
            assert (error <= TOLERANCE).all(), f"sequence {b}: {error.max()}"

    def step(self, length, seed, options=None):
        """Checks decode_step. The new rows are packed if `length` is a list of lengths."""
        counts = length if isinstance(length, list) else [length] * 2
        step_options, longest = STEP | (options or {}), max(counts)
        q = normal(2, 2, longest, 96, seed=seed + 7)
        k, v = self.new(longest, seed)
        if counts is not length:
            out = self.cache.decode_step(*self.operands(q, k, v), **on(self.device, step_options))
        else:

            def packed(x):
                return torch.cat([rows[:n] for rows, n in zip(x, counts, strict=True)])

            rows = (packed(x.transpose(1, 2)) for x in (q, k, v))
            trees = {n: packed(x) for n, x in step_options.items() if n in TREES}
            options = on(self.device, step_options | trees)
            out = self.cache.decode_step(*self.operands(*rows), length=length, **options)
            out = torch.nn.utils.rnn.pad_sequence(out.split(counts), True).transpose(1, 2)
        q, k = self.rotated(q, step_options), self.rotated(k, step_options)
        # With recent rows, a long step is computed in several parts.
        most = VERIFY_QUERIES if self.recent else longest
        for start in range(0, longest, most):
            part = slice(start, start + most)
            part_counts = [min(max(n - start, 0), most) for n in counts]
            self.add(k[:, :, part], v[:, :, part], part_counts)
            self.check(out[:, :, part], q[:, :, part], step_options, part_counts)
        assert not self.recent or self.first() == self.exact
        assert self.cache.seqlens(*self.ids_or_none()).tolist() == self.lengths()

    def attend(self, length, seed):
        """Checks `flash_attn_with_kvcache` on the cache's tensors, which appends the new rows."""
        q = normal(2, 2, length, 96, seed=seed + 7)
        k, v = self.new(length, seed)
        where = {"cache_seqlens": self.cache.seqlens(*self.ids_or_none())}
        if self.paged:
            self.cache.reserve(self.ids, length)
            where["block_table"] = self.cache.block_table(self.ids)
        else:
            where["cache_batch_idx"] = self.cache.cache_batch_idx()
        (layer,) = self.cache.layers
        k_here, v_here = (x.transpose(1, 2).to(self.device) for x in (k, v))
        out = flash_attn_with_kvcache(
            q.transpose(1, 2).to(self.device),
            *(layer.k_cache, layer.v_cache, k_here),
            k_here[..., :64] if self.latent else v_here,
            k_scale=layer.k_scale,
            v_scale=layer.v_scale,
            hadamard=layer.hadamard,
            **where,
            **on(self.device, STEP),
        )
        self.cache.advance(*self.ids_or_none(), length)
        self.add(k, v)
        assert self.cache.seqlens(*self.ids_or_none()).tolist() == self.lengths()
        self.exact = self.lengths()  # the function keeps no row in full precision
        self.check(out.transpose(1, 2), q, STEP)

    def accept(self, paths, trees):
        """Accepts a path of each tree. If a row of a tree is not exact, no row stays exact."""
        self.cache.accept(self.ids[::-1], paths[::-1], trees[::-1])
        for b, (path, tree) in enumerate(zip(paths, trees, strict=True)):
            old = self.lengths()[b] - len(tree)
            kept = [*range(old), *(old + token for token in path)]
            self.rows[b] = [x[:, kept] for x in self.rows[b]]
            self.exact[b] = min(self.exact[b], len(kept)) if self.exact[b] <= old else len(kept)

    def truncate(self, b, length, **options):
        self.cache.truncate(self.ids[b], length, **options)
        self.rows[b] = [x[:, :length] for x in self.rows[b]]
        self.exact[b] = min(self.exact[b], length)

    def swap_out(self, b):
        copied = self.cache.export_sequence(self.ids[b])
        self.cache.free(self.ids[b])
        other = self.cache.allocate()  # takes the freed slot, so that recent rows change slots
        self.ids[b] = self.cache.import_sequence(copied)
        self.cache.free(other)

    def swap(self, origins):
        """Sequence b continues sequence origins[b]."""
        if not self.paged:
            self.cache.reorder(origins)
        else:
            copies = [self.cache.fork(self.ids[origin]) for origin in origins]
            for id in self.ids:
                self.cache.free(id)
            self.ids = copies
        self.rows = [list(self.rows[origin]) for origin in origins]
        self.exact = [self.exact[origin] for origin in origins]
