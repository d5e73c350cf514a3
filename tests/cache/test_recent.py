"""`RecentKVCache`: the last rows in full precision, and what becomes of them."""

import random

import pytest
import torch

from tests.helpers.cases import each_case
from torch_metal_attn.kv_cache import CacheFull, RecentKVCache
from torch_metal_attn.quantisation import dequantise, quantise
from torch_metal_attn.reference import attention
from torch_metal_attn.testing.judge import normal

pytestmark = pytest.mark.usefixtures("backend")

RECENT, OPTIONS = 4, {"format": "q4_0", "v_format": "q3_g32", "hadamard": 32}


def make(**options):
    given = {"batch_size": 2, "max_length": 60, "recent": RECENT, "num_kv_heads": 1}
    return RecentKVCache(**given | {"head_dim": 32, "dtype": torch.float32} | OPTIONS | options)


class Model:
    """What a cache must hold: for each sequence its rows, and how many are quantised."""

    def __init__(self, cache):
        self.cache = cache
        self.rows = [[torch.zeros(1, 0, 32), torch.zeros(1, 0, 32)] for _ in range(2)]

    def add(self, k, v):
        for b, rows in enumerate(self.rows):
            rows[:] = [torch.cat([old, new[b]], 1) for old, new in zip(rows, (k, v), strict=True)]

    def stored(self, b):
        quantised = self.cache.quantised._lengths[0][b]
        assert len(self.rows[b][0][0]) == int(self.cache.seqlens()[b])
        near = []
        for x, name in zip(self.rows[b], ("format", "v_format"), strict=True):
            y = x.clone()
            data = quantise(x[:, :quantised], OPTIONS[name], hadamard=32)
            y[:, :quantised] = dequantise(*data, torch.float32, hadamard=32)
            near.append(y[None])
        return near

    def attend(self, q, b, **options):
        return attention(q[b : b + 1], *self.stored(b), compute_dtype=torch.float64, **options)[0]


def new(length, seed):
    return [normal(2, 1, length, 32, seed=seed + i) for i in range(2)]


@pytest.mark.parametrize("seed", range(3))
def test_random_steps(seed):
    """Appends, steps of several queries, truncations and reorders, against the definition."""
    r, cache = random.Random(seed), make()
    model = Model(cache)
    for step in range(14):
        kind = r.choice(("append", "step", "step", "truncate", "reorder"))
        longest = int(cache.seqlens().max())
        length = r.choice((1, 1, 2, RECENT, RECENT + 3) if kind == "append" else (1, 2, RECENT))
        if kind in ("append", "step") and longest + length > 60:
            continue
        rows = new(length, 100 * seed + 5 * step)
        if kind == "append":
            cache.append(*rows)
            model.add(*rows)
        elif kind == "step":
            model.add(*rows)
            q, sink = normal(2, 2, length, 32, seed=step), normal(2, seed=step)
            options = {"causal": True, "softmax_scale": 0.3, "learnable_sink": sink}
            out = cache.decode_step(q, *rows, **options)
            for b in range(2):
                torch.testing.assert_close(
                    out[b : b + 1].double(), model.attend(q, b, **options), rtol=0, atol=2e-6
                )
        elif kind == "truncate":
            b = r.randrange(2)
            kept = r.randint(0, int(cache.seqlens()[b]))
            cache.truncate(b, kept)
            model.rows[b] = [x[:, :kept] for x in model.rows[b]]
        else:
            beams = [r.randrange(2) for _ in range(2)]
            cache.reorder(beams)
            model.rows = [list(model.rows[b]) for b in beams]
        assert all(n <= 2 * RECENT for n in cache.rows._lengths[0])


def test_the_last_rows_are_exact():
    """However rows arrive, at least the last ones are in full precision."""
    cache = make()
    for step, length in enumerate((3, 1, 9, 1, 4, 2, 1, 1, 1, 1, 5, 1)):
        before = int(cache.seqlens()[0])
        cache.append(*new(length, step))
        assert cache.seqlens().tolist() == [before + length] * 2
        assert min(cache.rows._lengths[0]) >= min(RECENT, before + length)


def test_trees_are_accepted():
    cache = make()
    model = Model(cache)
    first, tree = new(9, 0), new(3, 5)
    cache.append(*first)
    cache.append(*tree)
    cache.accept([0, 1], [[0, 2], []], [[-1, 0, 0], [-1, 0, 1]])
    model.add(*first)
    model.rows[0] = [
        torch.cat([x, y[0][:, [0, 2]]], 1) for x, y in zip(model.rows[0], tree, strict=True)
    ]
    q, rows = normal(2, 2, 1, 32), new(1, 9)
    out = cache.decode_step(q, *rows)
    model.add(*rows)
    for b in range(2):
        torch.testing.assert_close(out[b : b + 1].double(), model.attend(q, b), rtol=0, atol=2e-6)
    cache.reset()
    assert cache.seqlens().tolist() == [0, 0]


def filled():
    cache = make()
    cache.append(*new(11, 0))
    return cache


REFUSED = [
    (lambda c: make(format=None), "format is None; without one"),
    (lambda c: make(recent=0), "recent is 0"),
    (lambda c: make(values_in_keys=True, v_format=None), "values_in_keys is True; recent rows"),
    (lambda c: c.append(*new(50, 0)), "50 rows more do not fit: a sequence has 11 of 60"),
    (lambda c: c.append(*new(1, 0), layer=3), "layer is 3"),
    (lambda c: c.decode_step(normal(2, 2, 5, 32), *new(5, 0)), "k has 5 new rows; .* takes 1..4"),
    (
        lambda c: c.decode_step(normal(2, 2, 3, 32), *new(1, 0), causal=True),
        "q has 3 queries and k 1 new rows",
    ),
    (
        lambda c: c.decode_step(normal(2, 2, 1, 32), *new(1, 0), window_size_left=3),
        "decode_step has no option window_size_left with recent rows",
    ),
    (lambda c: c.decode_step(normal(2, 2, 1, 64), *new(1, 0)), "head dim"),
    (lambda c: c.decode_step(normal(2, 2, 1, 32), *new(1, 0), softcap=-1.0), "softcap"),
    (
        lambda c: c.decode_step(normal(2, 2, 1, 32), *new(1, 0), learnable_sink=normal(3)),
        "learnable_sink has shape",
    ),
    (lambda c: c.truncate(0, 12), "length is 12; sequence 0 has 11 rows"),
    (lambda c: c.truncate(-1, 2), "index is -1"),
    (lambda c: c.reset([0, 2]), "indices is 2"),
    (lambda c: c.reorder([0, 2]), "beam_idx is 2"),
    (lambda c: c.accept([0], [[0]], [[-1, *range(7)]]), "parents"),
]


@each_case("call, message", REFUSED)
def test_refused(call, message):
    """With an error that names the argument, and the cache as it was."""
    cache = filled()
    lengths = [*cache.quantised._lengths[0]], [*cache.rows._lengths[0]]
    held = [x.clone() for part in (cache.quantised, cache.rows) for x in part.layers[0].by_block()]
    with pytest.raises((ValueError, RuntimeError, TypeError, CacheFull), match=message):
        call(cache)
    assert (cache.quantised._lengths[0], cache.rows._lengths[0]) == lengths
    now = [x for part in (cache.quantised, cache.rows) for x in part.layers[0].by_block()]
    assert all(torch.equal(x, y) for x, y in zip(held, now, strict=True))


def test_queries_that_are_no_tensor():
    cache, rows = RecentKVCache(1, 16, 4, 1, 32, format="q8_0"), torch.zeros(1, 1, 1, 32)
    with pytest.raises(TypeError, match="q is a list; it must be a tensor"):
        cache.decode_step([1.0], rows, rows)
