"""Random calls of PagedKVCache and StaticKVCache, checked against lists of tokens."""

import copy
import pickle
from itertools import accumulate

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.attention.flash_fwd_check import rotary_tables
from tests.cache.sequences import Sequences
from tests.decode.tree_problems import path_of
from torch_metal_attn.kv_cache import CacheFull, PagedKVCache, StaticKVCache
from torch_metal_attn.kv_cache.windows import first_seen
from torch_metal_attn.testing.judge import normal

PAGE, HEADS, HEAD_DIM, LAYERS = 8, 2, 8, 2
NAMES = st.sampled_from([None, "an adapter"])


def rows(tokens, first=0, layer=0, namespace=None):
    """k and v (1, H, L, D) of tokens[first:]. A row depends on its namespace and earlier tokens."""
    k = rows_of_values(values_of(tokens, layer, namespace)[first:]).transpose(0, 1)[None]
    return k, -k


def values_of(tokens, layer, namespace=None):
    """One number per token. It depends on this token and on all earlier tokens."""
    begin = hash((layer, namespace))
    so_far = accumulate(tokens, lambda before, token: hash((before, token)), initial=begin)
    return [number % 1021 for number in so_far][1:]


def rows_of_values(values):
    heads = torch.tensor(values).view(-1, 1) + 0.25 * torch.arange(HEADS)
    return heads[..., None] + torch.zeros(HEAD_DIM)


def make(num_pages=12, **options):
    options |= {"num_layers": LAYERS, "dtype": torch.float32}
    return PagedKVCache(num_pages, PAGE, HEADS, HEAD_DIM, **options)


def append(cache, tokens_by_id, new_by_id, known=True, namespaces=None):
    """Appends `new_by_id` to every layer. New rows are packed if their counts differ."""
    ids, counts = list(tokens_by_id), [*map(len, new_by_id.values())]
    for layer in range(LAYERS):
        parts = [
            rows(old + new_by_id[id], len(old), layer, (namespaces or {}).get(id))
            for id, old in tokens_by_id.items()
        ]
        packed = {} if len({*counts}) == 1 else {"length": counts}
        dim = 2 if packed else 0
        k, v = (torch.cat(tensors, dim) for tensors in zip(*parts, strict=True))
        k, v = (x[0].transpose(0, 1) if packed else x for x in (k, v))
        tokens = [new_by_id[id] for id in ids] if known else None
        cache.append(ids, k, v, layer, token_ids=tokens, **packed)


def verify(cache, before, trees, paths, known=False, namespaces=None):
    """Appends a tree (parents, tokens) to each sequence, accepts a path, and returns the tokens."""
    parents, tokens = ({id: tree[i] for id, tree in trees.items()} for i in (0, 1))
    for id, tree in parents.items():
        paths_to = [[tokens[id][n] for n in path_of(tree, node)] for node in range(len(tree))]
        for layer in range(LAYERS if tree else 0):
            namespace = (namespaces or {}).get(id)
            prefixes = [before[id] + path for path in paths_to]
            parts = [rows(prefix, len(prefix) - 1, layer, namespace) for prefix in prefixes]
            cache.append([id], *(torch.cat(x, 2) for x in zip(*parts, strict=True)), layer)
    options = {"token_ids": [tokens[id] for id in parents]} if known else {}
    cache.accept([*parents], [paths[id] for id in parents], [*parents.values()], **options)
    return {id: before[id] + [tokens[id][node] for node in paths[id]] for id in parents}


def check(cache, expected, namespaces=None):
    """Checks the rows of sequences that were not freed, and the references to each page."""
    for layer, tensors in enumerate(cache.layers):
        assert cache.seqlens([*expected], layer).tolist() == [*map(len, expected.values())]
        places, values = [], []
        tables = cache.block_table([*expected], layer).tolist()
        for table, (id, tokens) in zip(tables, expected.items(), strict=True):
            there = [i for i in range(len(tokens)) if table[i // PAGE] >= 0]
            assert not there or there == [*range(there[0], len(tokens))]
            places += [table[i // PAGE] * PAGE + i % PAGE for i in there]
            all_values = values_of(tokens, layer, (namespaces or {}).get(id))
            values += [all_values[i] for i in there]
        k, v = (x.flatten(0, 1)[places] for x in (tensors.k_cache, tensors.v_cache))
        assert torch.equal(k, rows_of_values(values))
        assert torch.equal(v, -k)
    pool = cache._pool
    references = [0] * len(pool.references)
    for sequence in cache._sequences.values():
        for page in (page for group in sequence.pages for page in group if page >= 0):
            references[page] += 1
    assert pool.references == references
    unused = {page for page, n in enumerate(references) if n == 0}
    assert unused == {*pool._free, *pool._idle}
    assert pool.available == len(unused) == len(pool._free) + len(pool._idle)


class Paged(RuleBasedStateMachine):
    """There are few pages and tokens, so that pages run out and prefixes are equal."""

    windows, num_pages = [-1] * LAYERS, 12

    def __init__(self):
        super().__init__()
        self.cache, self.other = (make(n, windows=self.windows) for n in (self.num_pages, 40))
        self.expected = {}
        self.namespaces = {}
        self.freed_at = {}  # each length before the last step, which decides the freed pages
        self.exported = []

    def add(self, id, tokens, namespace, freed_at):
        self.expected[id], self.namespaces[id], self.freed_at[id] = tokens, namespace, freed_at

    def an_id(self, data):
        return data.draw(st.sampled_from(sorted(self.expected)))

    def some_ids(self, data, most):
        ids = st.sampled_from(sorted(self.expected))
        return data.draw(st.lists(ids, unique=True, min_size=1, max_size=most))

    def freed(self, id, window):
        pages = -(-len(self.expected[id]) // PAGE)
        return min(first_seen(self.freed_at[id], window) // PAGE, pages)

    def can_go_back(self, id, length):
        first_pages = (first_seen(length, w) // PAGE for w in self.windows)
        return length == 0 or all(
            first >= self.freed(id, w) or first * PAGE >= length
            for first, w in zip(first_pages, self.windows, strict=True)
        )

    @rule(namespace=NAMES)
    def allocate(self, namespace):
        self.add(self.cache.allocate(namespace), [], namespace, 0)

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), length=st.integers(0, 20), known=st.booleans(), mixed=st.booleans())
    def append(self, data, length, known, mixed):
        """Appends equal or different numbers of tokens to some sequences."""
        new = {}
        for id in self.some_ids(data, 3):
            n = data.draw(st.integers(0, length)) if mixed else length
            new[id] = data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
        before = {id: self.expected[id] for id in new}
        # Each sequence needs pages for its new tokens, and one for the copy of a shared page.
        groups = len({*self.windows})
        most = groups * sum(-(-len(tokens) // PAGE) + 1 for tokens in new.values())
        try:
            append(self.cache, before, new, known, self.namespaces)
        except CacheFull:
            assert most > self.cache.num_free_pages
            return
        for id, tokens in new.items():
            if tokens:
                self.freed_at[id] = max(self.freed_at[id], len(before[id]))
            self.expected[id] = before[id] + tokens

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def fork(self, data):
        id = self.an_id(data)
        copied = self.expected[id], self.namespaces[id], self.freed_at[id]
        self.add(self.cache.fork(id), *copied)

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def free(self, data):
        id = self.an_id(data)
        self.cache.free(id)
        del self.expected[id]

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def truncate(self, data):
        id = self.an_id(data)
        length = data.draw(st.integers(0, len(self.expected[id])))
        if not self.can_go_back(id, length):
            with pytest.raises(ValueError, match=f"cannot go back to {length} rows: pages outside"):
                self.cache.truncate(id, length)
            return
        self.cache.truncate(id, length)
        self.expected[id] = self.expected[id][:length]
        self.freed_at[id] *= length > 0

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), known=st.booleans())
    def accept(self, data, known):
        ids = self.some_ids(data, 2)
        if self.cache.num_free_pages < 8 * len(ids):
            return
        trees, paths = {}, {}
        for id in ids:
            size = data.draw(st.integers(0, 5))
            tree = [data.draw(st.integers(-1, node - 1)) for node in range(size)]
            trees[id] = tree, [data.draw(st.integers(0, 1)) for _ in range(size)]
            paths[id] = path_of(tree, data.draw(st.integers(-1, size - 1)))
        before = {id: self.expected[id] for id in ids}
        self.expected |= verify(self.cache, before, trees, paths, known, self.namespaces)
        for id in ids:
            self.freed_at[id] = max(self.freed_at[id], len(before[id]) if trees[id][0] else 0)

    @rule(tokens=st.lists(st.integers(0, 1), max_size=2), pages=st.integers(0, 3), namespace=NAMES)
    def match_prefix(self, tokens, pages, namespace):
        self.match([0] * (pages * PAGE) + tokens, namespace)

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), namespace=NAMES)
    def match_tokens_of_a_sequence(self, data, namespace):
        self.match(self.expected[self.an_id(data)], namespace)

    def match(self, tokens, namespace):
        id, matched = self.cache.match_prefix(tokens, namespace)
        assert matched % PAGE == 0
        self.add(id, tokens[:matched], namespace, matched)

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), free=st.booleans())
    def swap_out(self, data, free):
        id = self.an_id(data)
        copied = pickle.loads(pickle.dumps(self.cache.export_sequence(id)))
        self.exported.append((copied, self.expected[id], self.namespaces[id], self.freed_at[id]))
        if free:
            self.cache.free(id)
            del self.expected[id]

    @precondition(lambda self: self.exported)
    @rule(data=st.data(), elsewhere=st.booleans())
    def swap_in(self, data, elsewhere):
        copied, tokens, namespace, freed_at = data.draw(st.sampled_from(self.exported))
        if elsewhere:
            check(self.other, {(id := self.other.import_sequence(copied)): tokens}, {id: namespace})
            self.other.free(id)
            return
        try:
            id = self.cache.import_sequence(copied)
        except CacheFull:
            assert sum(map(sum, copied.held)) > self.cache.num_free_pages
            return
        self.add(id, tokens, namespace, freed_at)

    @rule()
    def defragment(self):
        self.cache.defragment()
        groups = (group for one in self.cache._sequences.values() for group in one.pages)
        used = {page for group in groups for page in group} - {-1} | set(self.cache._pool._idle)
        assert used == set(range(len(used)))

    @invariant()
    def rows_and_pages_are_as_expected(self):
        check(self.cache, self.expected, self.namespaces)
        for layer, window in enumerate(self.windows):
            tables = self.cache.block_table([*self.expected], layer).tolist()
            freed = [self.freed(id, window) for id in self.expected]
            assert [row.count(-1) for row in tables] == freed


class PagedWithWindows(Paged):
    windows, num_pages = [-1, 5], 28

    @initialize(length=st.integers(9, 35))
    def long_sequence(self, length):
        self.allocate(None)
        for old, new in (([], [0] * length), ([0] * length, [1])):
            append(self.cache, {0: old}, {0: new})
        self.add(0, [0] * length + [1], None, length)


TestPaged, TestPagedWithWindows = Paged.TestCase, PagedWithWindows.TestCase


def test_pages_outside_a_window_are_freed():
    """Pages that the next query sees can be matched, shared and imported. Other pages are freed."""
    cache, tokens = make(11, windows=[-1, 5]), [*range(20)]
    a = cache.allocate("x")
    append(cache, {a: []}, {a: tokens}, namespaces={a: "x"})
    cache.append([a], *rows([*tokens, 1], 20, 0, "x"), 0)  # the other layer may still see its rows
    assert cache.num_free_pages == 5
    cache.append([a], *rows([*tokens, 1], 20, 1, "x"), 1)
    assert cache.num_free_pages == 6  # rows 0 to 7: the query at 20 saw rows from 15 on
    with pytest.raises(ValueError, match=r"cannot go back to 12 rows: pages .* at least 13 rows"):
        cache.truncate(a, 12)
    with pytest.raises(ValueError, match="cannot go back to 12 rows"):
        cache.accept([a], [[]], [[-1, *range(8)]])
    assert cache.match_prefix(tokens[:8], "x")[1] == 8  # the pages of both layers exist
    cache.free(a + 1)  # the sequence that match_prefix made
    other = cache.allocate()
    append(cache, {other: []}, {other: [7] * 24})
    cache.free(other)
    actual = [cache.match_prefix(t, name)[1] for t in (tokens, tokens[:8]) for name in ("x", "y")]
    assert actual == [16, 0, 0, 0]  # a prefix of 8 tokens needs the freed page, which was reused
    b = a + 3
    assert (cache.block_table([b], 1) < 0).tolist() == [[True, False]]
    c = cache.import_sequence(cache.export_sequence(a))
    assert cache.num_free_pages == 4  # only the last page of each layer is new
    expected = {a: [*tokens, 1], b: tokens[:16], c: [*tokens, 1]}
    check(cache, expected, dict.fromkeys(expected, "x"))
    with pytest.raises(ValueError, match=r"windows .*, and this cache has"):
        make().import_sequence(cache.export_sequence(a))
    with pytest.raises(CacheFull, match="the sequence needs 5 more pages, and 4 of 4 are free"):
        make(4, windows=[-1, 5]).import_sequence(cache.export_sequence(a))


def test_an_imported_sequence_can_be_truncated():
    """The last rows match pages that are already in the cache."""
    cache, tokens = make(20, windows=[-1, 5]), [*range(40)]
    id = cache.allocate()
    append(cache, {id: []}, {id: tokens[:16]})
    append(cache, {id: tokens[:16]}, {id: tokens[16:]})
    copied = cache.import_sequence(cache.export_sequence(id))
    cache.truncate(copied, 16)
    check(cache, {id: tokens, copied: tokens[:16]})


@pytest.mark.parametrize("kind", [StaticKVCache, PagedKVCache])
def test_packed_rows_are_those_of_each_sequence(kind):
    """Rows and the rotated q have the bits of separate appends. One sequence has no new row."""
    counts, options = [2, 2, 0, 70, 1], {"format": "q8_0", "dtype": torch.float32}
    k, v, q = normal(75, 2, 32), normal(75, 2, 32, seed=1), normal(75, 4, 32, seed=2)
    tables = dict(zip(("rotary_cos", "rotary_sin"), rotary_tables(90, 8), strict=True))
    together = kind(5, 150, 2, 32, **options)
    own = [[together.allocate() for _ in counts]] if kind is PagedKVCache else []
    together.append(*own, *(x[:5, :, None] for x in (k, v)))
    rotated = q.clone()
    together.append(*own, k, v, length=torch.tensor(counts), q=rotated, **tables)
    assert together.lengths(*(own or [range(5)])) == [3, 3, 1, 71, 2]
    for b, parts in enumerate(zip(*(x.split(counts) for x in (k, v, q, rotated)), strict=True)):
        alone, (*new, q_alone, q_packed) = StaticKVCache(1, 150, 2, 32, **options), parts
        alone.append(*(x[b : b + 1, :, None] for x in (k, v)))
        q_alone = q_alone.transpose(0, 1)[None].clone()
        alone.append(*(x.transpose(0, 1)[None] for x in new), q=q_alone, **tables)
        assert torch.equal(q_alone[0].transpose(0, 1), q_packed)
        rows = zip(*(c.layers[0].by_block() for c in (together, alone)), strict=True)
        assert all(torch.equal(x[b], y[0]) for x, y in rows)
    # If one sequence is refused, none is written.
    tensors = [x.clone() for x in together.layers[0].by_block()]
    with pytest.raises(ValueError, match="rows 71 to 140 of rotary_cos"):
        together.append(*own, k, v, length=counts, q=rotated, **tables)
    assert all(torch.equal(*x) for x in zip(tensors, together.layers[0].by_block(), strict=True))


class TestPrefixes:
    def test_the_least_recently_used_is_evicted_only_when_needed(self):
        cache = make(3)
        for token in (1, 2, 3):
            id = cache.allocate()
            append(cache, {id: []}, {id: [token] * PAGE})
            cache.free(id)
        assert cache.num_free_pages == 3
        id, matched = cache.match_prefix([1] * PAGE)  # now the most recently used
        assert matched == PAGE
        cache.free(id)
        id = cache.allocate()
        append(cache, {id: []}, {id: [4]})
        matches = {t: cache.match_prefix([t] * PAGE)[1] for t in (1, 2, 3)}
        assert matches == {1: PAGE, 2: 0, 3: PAGE}

    def test_the_longest_prefix_is_matched(self):
        cache = make()
        id = cache.allocate()
        tokens = list(range(3 * PAGE + 5))
        append(cache, {id: []}, {id: tokens})
        assert cache.match_prefix(torch.tensor(tokens))[1] == 3 * PAGE
        assert cache.match_prefix(tokens[: 2 * PAGE + 7])[1] == 2 * PAGE
        assert cache.match_prefix(tokens[:PAGE] + tokens)[1] == PAGE
        assert cache.match_prefix(tokens[PAGE:])[1] == 0

    def test_rows_in_some_layers_do_not_match(self):
        cache = make()
        id = cache.allocate()
        tokens = [1] * PAGE
        cache.append([id], *rows(tokens), 0, token_ids=[tokens])
        assert cache.match_prefix(tokens)[1] == 0
        with pytest.raises(ValueError, match="layers of 0 and of 8 rows; append to all"):
            cache.fork(id)
        cache.append([id], *rows(tokens, 0, 1), 1)
        assert cache.match_prefix(tokens)[1] == PAGE


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
@pytest.mark.parametrize("format", [None, "q8_0"])
def test_copies_are_independent(copied, format):
    """The chain of prefixes is longer than Python's stack. Values remain columns of the keys."""
    tokens = list(range(801))
    options = {"values_in_keys": True, "format": format, "dtype": torch.float32}
    cache = PagedKVCache(420, 2, 1, 64, 32, **options)
    sequence = cache.allocate()
    k = torch.randn(1, 1, len(tokens), 64)
    cache.append([sequence], k, token_ids=[tokens])
    branch = cache.fork(sequence)
    other = copied(cache)
    for one in (cache, other):
        one.append([branch], k[:, :, :1])  # copies the page that both share
        assert one.match_prefix(tokens)[1] == len(tokens) - 1
    for name in ("k_cache", "v_cache", "k_scale", "v_scale"):
        own, theirs = (getattr(x.layers[0], name) for x in (cache, other))
        assert (own is None and theirs is None) or torch.equal(own, theirs), name
    assert other.layers[0].v_cache.data_ptr() == other.layers[0].k_cache.data_ptr()
    assert other.layers[0].k_cache.data_ptr() != cache.layers[0].k_cache.data_ptr()


# Most of these tests run the CPU kernels, because they check the caches and not the kernels.
CACHES = [
    ("static", {"dtype": torch.float16}),
    ("static", {"format": "q8_0", "layout": "HND", "hadamard": 32}),
    ("paged", {}),
    ("paged", {"dtype": torch.float16, "layout": "HND"}),
    ("paged", {"format": "fp8_e4m3", "layout": "HND", "hadamard": 32}),
    ("paged", {"format": "q4_g32", "v_format": "q3_g64", "hadamard": 32}),
]


@pytest.mark.parametrize("kind, options", CACHES)
def test_attention_over_a_cache(kind, options):
    """A prompt is appended. Then attention appends rows, to pages that `reserve` has added."""
    sequences = Sequences(kind, **options)
    sequences.append(14, 0)
    sequences.attend(4, 1)
    sequences.step([3, 21], 5, {"softmax_scale": 0.3, "indices": None})
    sequences.step([0, 1], 6)


@pytest.mark.parametrize("kind, options", [CACHES[0], CACHES[-1]])
def test_a_step_attends_to_listed_keys(kind, options):
    """Lists may contain new rows. A refused list changes nothing."""
    sequences = Sequences(kind, "cpu", **options)
    sequences.append(14, 0)
    other, q = copy.deepcopy(sequences.cache), torch.randn(2, 2, 2, 96)
    operands = sequences.operands(q, *sequences.new(2, 1))
    step = {"causal": True, "rotary_cos": torch.rand(20, 16), "rotary_sin": torch.rand(20, 16)}
    all_rows = torch.arange(16).flip(0).int().expand(1, 1, 2, 16)
    for wrong in (all_rows + 300, all_rows.half()):
        with pytest.raises(ValueError, match="indices"):
            sequences.cache.decode_step(*operands, indices=wrong, **step)
        assert sequences.cache.seqlens(*sequences.ids_or_none()).tolist() == [14, 14]
    out = sequences.cache.decode_step(*operands, indices=all_rows, **step)
    torch.testing.assert_close(out, other.decode_step(*operands, **step))
    for one, same in zip(sequences.cache.layers, other.layers, strict=True):
        assert torch.equal(one.k_cache, same.k_cache)
    # A single key has the weight 1.
    new = sequences.new(1, 2)
    operands = sequences.operands(q[:, :, :1], *new)
    out = sequences.cache.decode_step(*operands, indices=all_rows[:, :, :1, :1] + 1)
    expected = new[1].expand(-1, 2, -1, -1).float()
    tolerance = 0.6 if "format" in options else 1e-2
    torch.testing.assert_close(out.float(), expected, atol=tolerance, rtol=0)


def test_attention_over_a_window(device):
    sequences = Sequences("paged", device, windows=[20])
    free = sequences.cache.num_free_pages
    for n in (0, 1):
        sequences.append(60, 9 * n)
        sequences.step([1, 40], 9 * n + 2)
        sequences.step(2, 9 * n + 5)
        sequences.truncate(0, sequences.lengths()[0] - 2)
        sequences.swap_out(1)
    assert sequences.lengths() == [122, 204]
    assert free - sequences.cache.num_free_pages == 2 + 2
    for left in (21, -1):
        with pytest.raises(ValueError, match=rf"window_size_left is {left}; .* in 0\.\.20"):
            sequences.step(1, 0, {"window_size_left": left})
    sequences.step(1, 0, {"window_size_left": 3})


@pytest.mark.parametrize("beams", [[0, 1, 2], [2, 0, 1], [1, 1, 1], [0, 0, 2], [2, 2, 0]])
def test_beams_of_a_static_cache(beams):
    cache = StaticKVCache(3, 10, HEADS, HEAD_DIM, num_layers=LAYERS, dtype=torch.float32)
    addresses = [layer.k_cache.data_ptr() for layer in cache.layers]
    sequences = [[], [], []]

    def append(count, token):
        new = [[token + b] * count for b in range(3)]
        for layer in range(LAYERS):
            parts = [rows(o + n, len(o), layer) for o, n in zip(sequences, new, strict=True)]
            cache.append(*(torch.cat(x) for x in zip(*parts, strict=True)), layer)
        sequences[:] = [old + more for old, more in zip(sequences, new, strict=True)]

    def check():
        for layer, tensors in enumerate(cache.layers):
            assert cache.seqlens(layer).tolist() == [*map(len, sequences)]
            for row, tokens in zip(cache.cache_batch_idx().tolist(), sequences, strict=True):
                actual = (x[row, : len(tokens)] for x in (tensors.k_cache, tensors.v_cache))
                expected = (x[0].transpose(0, 1) for x in rows(tokens, 0, layer))
                assert all(map(torch.equal, actual, expected))

    append(2, 1)
    for step in range(3):
        cache.reorder(torch.tensor(beams))
        sequences[:] = [sequences[beam] for beam in beams]
        check()
        append(2, 7 + step)
        check()
    assert [layer.k_cache.data_ptr() for layer in cache.layers] == addresses
    with pytest.raises(CacheFull, match="3 more rows do not fit: a sequence has 8 of 10"):
        append(3, 1)
    check()
    cache.truncate(1, 2)
    cache.reset([2])
    sequences[1:] = [sequences[1][:2], []]
    append(1, 4)
    with pytest.raises(ValueError, match=r"indices is 3; it must be in 0..2"):
        cache.reset([0, 3])
    check()
    cache.reset()
    sequences[:] = [[], [], []]
    check()
