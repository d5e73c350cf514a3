"""`accept`: the rows of one path of a tree of new tokens stay, together, in every layer."""

import pytest
import torch

from tests.helpers.cases import each_case
from torch_metal_attn.kv_cache import (
    CacheFull,
    LatentCache,
    PagedKVCache,
    StaticKVCache,
    StaticLatentCache,
    trees,
)
from torch_metal_attn.kv_cache.storage import Storage
from torch_metal_attn.simulator import simulate

PAGE, HEADS, D, LAYERS, OLD = 4, 2, 32, 2, 6
# 0 is a root with the children 1 and 2; 2 has 3 and 4, 4 has 5; 6 is another root.
TREE = [-1, 0, 0, 2, 2, 4, -1]
PATHS = {
    "one round": [0, 2],
    "two rounds": [0, 2, 4, 5],
    "the second root": [6],
    "the first tokens": [0, 1],
    "nothing": [],
}


def numbered(first, count, layer, heads=HEADS):
    """(1, H, count, D) whose row i holds first + i, of any layer and head something else."""
    row = torch.arange(first, first + count)[None, None, :, None]
    head = torch.arange(heads)[None, :, None, None]
    return (row + 0.25 * head + 0.5 * layer + torch.zeros(D)).half()


def paged(**options):
    return PagedKVCache(16, PAGE, HEADS, D, num_layers=LAYERS, **options)


def started(cache):
    """A sequence of OLD rows and then a tree, whose rows are numbered from 0 and from 100."""
    id = cache.allocate()
    add(cache, [id], OLD, 0)
    add(cache, [id], len(TREE), 100)
    return id


def add(cache, ids, count, first):
    for layer in range(LAYERS):
        x = numbered(first, count, layer)
        cache.append(ids, x, -x, layer)


def stored(cache, id, tensors, layer):
    pages = cache.block_table([id])[0].long()
    length = int(cache.seqlens([id], layer))
    return [x[pages].flatten(0, 1)[:length].transpose(0, 1)[None] for x in tensors]


def assert_holds(cache, id, path):
    expected = [*range(OLD), *(100 + node for node in path)]
    for layer in range(LAYERS):
        tensors = cache.layers[layer]
        k, v = stored(cache, id, (tensors.k_cache, tensors.v_cache), layer)
        wanted = torch.cat([numbered(row, 1, layer) for row in expected], 2)
        assert torch.equal(k, wanted)
        assert torch.equal(v, -wanted)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_path_is_kept(path, layout):
    cache = paged(layout=layout)
    id = started(cache)
    cache.accept([id], [path], torch.tensor([TREE]))
    assert_holds(cache, id, path)
    assert cache.num_free_pages == 16 - -(-(OLD + len(path)) // PAGE)


def test_a_fork_keeps_the_tree():
    """Its rows are in pages that the path moves through."""
    cache = paged()
    id = started(cache)
    fork = cache.fork(id)
    cache.accept([id], [[0, 2, 4, 5]], [TREE])
    assert_holds(cache, id, [0, 2, 4, 5])
    assert_holds(cache, fork, range(len(TREE)))
    cache.accept([fork], [[6]], [TREE])
    assert_holds(cache, id, [0, 2, 4, 5])
    assert_holds(cache, fork, [6])


def test_two_forks_at_once():
    cache = paged()
    id = started(cache)
    fork = cache.fork(id)
    cache.accept([id, fork], [[0, 2, 4, 5], [0, 2, 3]], [TREE, TREE])
    assert_holds(cache, id, [0, 2, 4, 5])
    assert_holds(cache, fork, [0, 2, 3])


def test_no_page_for_a_copy_changes_nothing():
    cache = PagedKVCache(4, PAGE, HEADS, D, num_layers=LAYERS)
    id = started(cache)
    fork = cache.fork(id)
    with pytest.raises(CacheFull, match="3 rows of 1 sequences need 2 more pages, and 0 of 4"):
        cache.accept([id], [[0, 2, 4, 5]], [TREE])
    assert_holds(cache, id, range(len(TREE)))
    assert_holds(cache, fork, range(len(TREE)))


def test_tokens_of_the_path_can_be_found():
    cache = paged()
    id = cache.allocate()
    for layer in range(LAYERS):
        x = numbered(0, OLD, layer)
        cache.append([id], x, -x, layer, token_ids=[range(OLD)])
    add(cache, [id], len(TREE), 100)
    cache.accept([id], [[0, 2]], [TREE], token_ids=[[100 + node for node in range(len(TREE))]])
    assert_holds(cache, id, [0, 2])
    found, matched = cache.match_prefix([*range(OLD), 100, 102])
    assert matched == 2 * PAGE
    assert_holds(cache, found, [0, 2])
    assert cache.match_prefix([*range(OLD), 100, 101])[1] == PAGE


@pytest.mark.parametrize("format", ["q8_0", "q4_0", "fp8_e4m3"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_codes_and_scales_move(format, layout):
    cache = paged(format=format, layout=layout)
    id = started(cache)
    before = [stored(cache, id, one.by_block(), layer) for layer, one in enumerate(cache.layers)]
    path = [0, 2, 4, 5]
    cache.accept([id], [path], [TREE])
    rows = [*range(OLD), *(OLD + node for node in path)]
    for layer, one in enumerate(cache.layers):
        for had, has in zip(before[layer], stored(cache, id, one.by_block(), layer), strict=True):
            assert torch.equal(had[:, :, rows], has)


@pytest.mark.parametrize("kind", [LatentCache, StaticLatentCache])
def test_latent_rows_move_once(kind):
    cache = kind(4, 16, 24, 8)
    rows = torch.arange(7).view(1, 1, 7, 1).expand(4, 1, 7, 32).half()
    ids = [cache.allocate()] if kind is LatentCache else [0]
    cache.append(*([ids, rows[:1]] if kind is LatentCache else [rows]))
    with simulate() as run:
        cache.accept(ids, [[0, 2, 4, 5]], [TREE])
    assert [launch.kernel for launch in run.launches] == ["copy_pages"] * 2
    assert cache.layers[0].k_cache[0, :4, 0, 31].tolist() == [0, 2, 4, 5]
    assert cache.layers[0].v_cache[0, :4, 0, 23].tolist() == [0, 2, 4, 5]


def test_dispatches():
    """One for each tensor, layer and round, for all sequences; none where nothing moves."""
    cache = paged()
    ids = [started(cache) for _ in range(2)]
    with simulate() as run:
        cache.accept(ids, [[0, 2, 4, 5], [6]], [TREE] * 2)
        moved = len(run.launches)
        add(cache, ids[:1], 3, 0)
        appended = len(run.launches)
        cache.accept(ids[:1], [[0, 1]], [[-1, 0, 1]])
    assert moved == 2 * LAYERS * len(trees.moves([0, 2, 4, 5]))
    assert len(run.launches) == appended


class TestStatic:
    def started(self):
        cache = StaticKVCache(3, 16, HEADS, D, num_layers=LAYERS)
        for layer in range(LAYERS):
            x = torch.cat([numbered(0, OLD, layer), numbered(100, len(TREE), layer)], 2)
            cache.append(x.expand(3, -1, -1, -1), -x.expand(3, -1, -1, -1), layer)
        cache.reorder([2, 0, 1])
        return cache

    def test_path_is_kept(self):
        cache = self.started()
        cache.accept([2, 0], [[0, 2, 4, 5], [6]], [TREE, TREE])
        kept = {0: [6], 1: range(len(TREE)), 2: [0, 2, 4, 5]}
        for layer in range(LAYERS):
            assert cache.seqlens(layer).tolist() == [OLD + len(kept[b]) for b in range(3)]
            for b, row in enumerate(cache.cache_batch_idx().tolist()):
                rows = [*range(OLD), *(100 + node for node in kept[b])]
                wanted = torch.cat([numbered(one, 1, layer) for one in rows], 2)[0]
                k_cache, v_cache = cache.layers[layer].k_cache, cache.layers[layer].v_cache
                assert torch.equal(k_cache[row, : len(rows)].transpose(0, 1), wanted)
                assert torch.equal(v_cache[row, : len(rows)].transpose(0, 1), -wanted)

    @each_case(
        "arguments, message",
        [
            (([3], [[0]], [TREE]), "indices is 3; it must be in 0..2"),
            (([1, 1], [[0]] * 2, [TREE] * 2), r"indices are \[1, 1\]; each sequence may be there"),
            (([1], [[1]], [TREE]), "the parent of token 1 is 0"),
            ((1, [[1]], [TREE]), "indices is 1; it must be a sequence of ints"),
        ],
    )
    def test_refused(self, arguments, message):
        cache = self.started()
        with pytest.raises((TypeError, ValueError), match=message):
            cache.accept(*arguments)
        assert cache.seqlens().tolist() == [OLD + len(TREE)] * 3

    def test_layers_that_differ(self):
        cache = self.started()
        cache.advance([1, 0, 0], 1)
        with pytest.raises(ValueError, match="sequence 0 has layers of 13 and of 14 rows"):
            cache.accept([0], [[0]], [TREE])


REFUSED = [
    (([9], [[0]], [TREE]), "there is no sequence 9"),
    (([0], [[0], [0]], [TREE]), "paths has 2 rows; it must have 1, one a sequence"),
    (([0], [[0]], [TREE] * 2), "parents has 2 rows; it must have 1"),
    (([0], [0], [TREE]), r"paths\[0\] is 0; it must be a sequence of ints"),
    (([0], 3, [TREE]), "paths is 3; it must be a row of ints"),
    (([0], [[0]], [[0.5]]), r"parents\[0\]\[0\] is 0.5; it must be an int"),
    (
        ([0], [[1]], [TREE]),
        r"paths\[0\] is \[1\], and the parent of token 1 is 0; paths\[0\]\[0\] must be a root",
    ),
    (([0], [[0, 3]], [TREE]), r"paths\[0\]\[1\] must be a child of token 0"),
    (([0], [[0, 2, 1]], [TREE]), r"paths\[0\]\[2\] must be a child of token 2"),
    (([0], [[0, 0]], [TREE]), r"must be a child of token 0"),
    (([0], [[0, 6]], [TREE]), r"must be a child of token 0"),
    (([0], [[7]], [TREE]), r"paths\[0\]\[0\] is 7; it must be in 0\.\.6, the tokens of the tree"),
    (([0], [[-1]], [TREE]), r"paths\[0\]\[0\] is -1; it must be in 0\.\.6"),
    (([0], [[0]], [[0, 0]]), r"parents\[0\]\[0\] is 0; it must be -1, for a root, or an earlier"),
    (([0], [[0]], [[-1, 2, 1]]), r"parents\[0\]\[1\] is 2"),
    (([0], [[0]], [[-2]]), r"parents\[0\]\[0\] is -2"),
    (([0], [[0]], [[-1] * 14]), r"parents\[0\] has 14 tokens, and the sequence 13 rows"),
]


@each_case("arguments, message", REFUSED)
def test_refused(arguments, message):
    cache = paged()
    id = started(cache)
    with pytest.raises((TypeError, ValueError), match=message):
        cache.accept(*arguments)
    assert_holds(cache, id, range(len(TREE)))


def test_token_ids_of_another_size():
    cache = paged()
    id = started(cache)
    with pytest.raises(ValueError, match=r"token_ids has rows of \[2\] tokens; they must have \[7"):
        cache.accept([id], [[0]], [TREE], token_ids=[[1, 2]])
    assert_holds(cache, id, range(len(TREE)))


def test_layers_that_differ():
    cache = paged()
    id = started(cache)
    x = numbered(0, 1, 0)
    cache.append([id], x, x, 1)
    with pytest.raises(ValueError, match="append to all of them before accept"):
        cache.accept([id], [[0]], [TREE])


FAULTS = {
    "rows are not moved": (Storage, "move_rows", lambda self, moves: None),
    "in one round": (
        trees,
        "moves",
        lambda path: [[(origin, to) for to, origin in enumerate(path) if origin != to]],
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name, monkeypatch):
    owner, method, fault = FAULTS[name]
    monkeypatch.setattr(owner, method, fault)
    if owner is trees:
        monkeypatch.setattr("torch_metal_attn.kv_cache.paged.moves", fault)
    cache = paged()
    id = started(cache)
    with pytest.raises((AssertionError, ValueError)):
        cache.accept([id], [[0, 2, 4, 5]], [TREE])
        assert_holds(cache, id, [0, 2, 4, 5])
