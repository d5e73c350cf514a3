"""A cache that decodes a tree and keeps a path is then as if it never had the rest."""

import pytest
import torch

from tests.attention.flash_fwd_options import ints
from tests.decode.tree_problems import mask_of
from torch_metal_attn import rope
from torch_metal_attn.kv_cache import LatentCache, PagedKVCache, StaticKVCache, StaticLatentCache
from torch_metal_attn.testing.judge import normal

LAYERS, OLD = 2, 6
# Step by step the tree of each of two sequences, and the path that is kept. No call has fewer than
# 3 rows of a KV head or more than 8, so that all have one tile.
STEPS = (
    (([-1, 0, 0, 2, 2, 4, -1], [0, 2, 4, 5]), ([-1, 0, 1, 0, -1, 4, 5], [4, 5, 6])),
    (([-1, -1, 1, 0, 2, 2, 5], [1, 2, 5]), ([-1, 0, 0, 1, 1, 0, 0], [])),
)
SHAPE = {"num_kv_heads": 2, "head_dim": 64, "num_layers": LAYERS}
LATENTS = {"latent_dim": 64, "rotary_dim": 32, "num_layers": LAYERS}
CACHES = {
    "rows": lambda batch, device: StaticKVCache(batch, 40, **SHAPE, device=device),
    "pages": lambda batch, device: PagedKVCache(24, 4, **SHAPE, format="q8_0", device=device),
    "latents": lambda batch, device: LatentCache(24, 4, **LATENTS, device=device),
    "rows of latents": lambda batch, device: StaticLatentCache(batch, 40, **LATENTS, device=device),
}


class Sequences:
    """Some of a cache, which decode tokens by their numbers."""

    def __init__(self, kind, batch, device):
        self.cache = CACHES[kind](batch, device)
        self.device, self.latent = device, "latents" in kind
        static = isinstance(self.cache, StaticKVCache)
        self.ids = [*range(batch)] if static else [self.cache.allocate() for _ in range(batch)]
        self.first = () if static else (self.ids,)
        cos, sin = rope.tables(rope.default(32, device=device)[0], 64)
        self.options = {"rotary_cos": cos, "rotary_sin": sin, "num_splits": 1}
        if self.latent:
            self.options["softmax_scale"] = 0.1

    def decode(self, tokens, **options):
        """Of both layers: (layers, B, H, L, Dv). tokens: (B, L)."""
        heads, columns = ((1, 1), 96) if self.latent else ((2, 2, 2), 64)
        found = []
        for layer in range(LAYERS):
            rows = [
                normal(200, h, columns, seed=3 * layer + i, dtype=torch.float16)[tokens]
                for i, h in enumerate(heads)
            ]
            given = (x.transpose(1, 2).to(self.device) for x in rows)
            options |= self.options
            found.append(self.cache.decode_step(*self.first, *given, layer=layer, **options))
        return torch.stack(found).cpu()


@pytest.mark.parametrize("kind", CACHES)
def test_accepted_path(kind):
    """By the CPU's own kernels: what the caches do is under test."""
    accept_paths(kind, "parents", "cpu")


@pytest.mark.parametrize("kind, form", [("pages", "tree_mask"), ("rows of latents", "parents")])
def test_accepted_path_of_the_device(kind, form, device):
    accept_paths(kind, form, device)


def accept_paths(kind, form, device):
    drafting = Sequences(kind, 2, device)
    # Each a cache of its own, which only holds what is accepted.
    alone = [Sequences(kind, 1, device) for _ in range(2)]
    prompt = torch.arange(2 * OLD).view(2, OLD)
    for sequences, tokens in ((drafting, prompt), *zip(alone, prompt.split(1), strict=True)):
        sequences.decode(tokens, causal=True)
    for step, drafts in enumerate(STEPS):
        trees, paths = zip(*drafts, strict=True)
        tokens = 20 + 30 * step + torch.arange(14).view(2, 7)
        parents = ints(*trees[0], *trees[1]).view(2, 7)
        given = parents if form == "parents" else torch.stack([mask_of(tree) for tree in trees])
        out = drafting.decode(tokens, **{form: given.to(device)})
        drafting.cache.accept(drafting.ids, paths, parents)
        for b, (one, path) in enumerate(zip(alone, paths, strict=True)):
            if path:
                expected = one.decode(tokens[b : b + 1, path], causal=True)
                torch.testing.assert_close(out[:, b, :, path], expected[:, 0], rtol=2e-3, atol=2e-3)
        last = torch.tensor([[100, 101, 102], [110, 111, 112]]) + 3 * step
        out = drafting.decode(last, causal=True)
        expected = [one.decode(last[b : b + 1], causal=True) for b, one in enumerate(alone)]
        assert torch.equal(out, torch.cat(expected, 1))


def test_a_tree_that_is_refused_takes_no_page(device):
    sequences = Sequences("pages", 1, device)
    sequences.decode(torch.arange(OLD)[None], causal=True)
    free, lengths = sequences.cache.num_free_pages, sequences.cache.seqlens(sequences.ids)
    if device == "cpu":
        with pytest.raises(ValueError, match="parents is 1 for token 1 of sequence 0"):
            sequences.decode(torch.arange(7)[None], parents=ints(-1, 1, 0, 0, 0, 0, 0))
    with pytest.raises(ValueError, match="parents has shape"):
        sequences.decode(torch.arange(7)[None], parents=ints(-1, 0).to(device))
    assert sequences.cache.num_free_pages == free
    assert torch.equal(sequences.cache.seqlens(sequences.ids), lengths)
