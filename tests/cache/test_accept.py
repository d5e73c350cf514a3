"""`accept` keeps the rows of one path of a tree of new tokens, without gaps, in every layer."""

import pytest
import torch

from tests.cache.sequences import Sequences, tables
from tests.cache.test_kv_cache import HEAD_DIM, HEADS, LAYERS, PAGE, append, check, make, verify
from tests.decode.tree_problems import mask_of
from tests.helpers.cases import each_case
from torch_metal_attn.kv_cache import CacheFull, LatentCache, StaticKVCache, StaticLatentCache
from torch_metal_attn.kv_cache.trees import moves
from torch_metal_attn.simulator import simulate

# 0 is a root with the children 1 and 2; 2 has 3 and 4, 4 has 5; 6 is another root.
TREE = [-1, 0, 0, 2, 2, 4, -1]
# For each step: the trees of both sequences, as parents, and the paths to accept.
STEPS = (
    ((TREE, TREE), ([0, 2, 4, 5], [0, 2, 3])),
    ((TREE, [-1, 0, 1, 0, -1, 4, 5]), ([6], [4, 5, 6])),
    (([-1, -1, 1, 0, 2, 2, 5], [-1, 0, 0, 1, 1, 0, 0]), ([1, 2, 5], [])),
    ((TREE, TREE), ([0, 1], [0, 2, 4, 5])),
)
CACHES = [
    ("static", {"format": "q8_0", "layout": "HND"}),
    ("static latent", {"dtype": torch.float16}),
    ("paged", {"dtype": torch.float16}),
    ("paged", {"format": "q8_0"}),
    ("paged", {"format": "fp8_e4m3", "layout": "HND"}),
    ("paged", {"format": "q4_0", "layout": "HND"}),
    ("paged latent", {"layout": "HND"}),
    ("paged latent", {"format": "q3_g32"}),
    ("static latent", {"format": "fp8_e4m3"}),
    ("static latent", {"format": "q4_0", "hadamard": 32}),
]


@pytest.mark.parametrize("kind, options", CACHES)
def test_accepted_paths_are_kept(kind, options):
    accept_paths(kind, options)


@pytest.mark.parametrize(
    "kind, options, form", [(*CACHES[3], "tree_mask"), (*CACHES[1], "parents")]
)
def test_accepted_paths_are_kept_on_the_device(kind, options, form, device):
    accept_paths(kind, options, form, device)


def accept_paths(kind, options, form="parents", device="cpu"):
    """Accepts paths in forks, which share pages. Rows are rotated by their depth in the tree."""
    sequences, rotary = Sequences(kind, device, **options), tables(32)
    rotary |= {"rotary_first_column": 64}
    sequences.append(13, 0, **rotary)
    sequences.swap([0, 0])
    sequences.swap([1, 0])
    for number, (parents, paths) in enumerate(STEPS):
        tree_options = {"parents": torch.tensor(parents).int()}
        if form == "tree_mask":
            tree_options = {"tree_mask": torch.stack([mask_of(tree) for tree in parents])}
        sequences.step(7, 20 * number, rotary | tree_options)
        sequences.accept(paths, parents)
        sequences.step(3, 20 * number + 10, rotary)


OLD = {0: [1] * (PAGE - 2 + len(TREE))}


def cache_with_a_tree(num_pages=12):
    cache = make(num_pages)
    append(cache, {cache.allocate(): []}, OLD, known=False)
    return cache


@pytest.mark.parametrize("kind", ["paged", "static"])
def test_a_second_accept_is_refused(kind):
    """The tree is gone after the first accept, so a second accept would remove accepted rows."""
    sequences = Sequences(kind)
    sequences.append(9, 0)
    for path in ([0, 2, 4, 5], [0, 1]):
        sequences.step(7, 5, {"parents": torch.tensor(TREE).int()})
        sequences.accept([path] * 2, [TREE] * 2)
        if sequences.paged:
            sequences.swap_out(0)
        for tree in (TREE, [-1]):
            with pytest.raises(ValueError, match=rf"\[0\] has {len(tree)} tokens?, and .* 0 rows"):
                sequences.cache.accept(sequences.ids, [[0]] * 2, [tree] * 2)
    sequences.step(1, 9)


def test_a_full_cache_is_not_changed():
    cache = cache_with_a_tree(2)
    fork = cache.fork(0)
    with pytest.raises(CacheFull, match="3 new rows of 1 sequence need 2 more pages, and 0 of 2"):
        cache.accept([0], [[0, 2, 4, 5]], [TREE])
    check(cache, OLD | {fork: OLD[0]})


def test_accepted_tokens_match_prefixes():
    """In the HND layout, the heads of a row are not next to each other."""
    cache, old = make(layout="HND"), [1] * (PAGE - 2)
    id = cache.allocate()
    append(cache, {id: []}, {id: old})
    accepted = verify(cache, {id: old}, {id: (TREE, [*range(100, 107)])}, {id: [0, 2]}, known=True)
    assert accepted[id] == [*old, 100, 102]
    copied, matched = cache.match_prefix(accepted[id])
    assert matched == PAGE
    check(cache, accepted | {copied: accepted[id]})
    assert cache.match_prefix([*old, 100, 101])[1] == 0


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


def test_sequences_share_dispatches():
    """All sequences share a launch per tensor, layer and round. Without a move there is none."""
    cache = cache_with_a_tree()
    append(cache, {cache.allocate(): [], cache.allocate(): []}, {1: OLD[0], 2: OLD[0]})
    with simulate() as run:
        cache.accept([0, 1], [[0, 2, 4, 5], [6]], [TREE] * 2)
        moved = len(run.launches)
        cache.accept([2], [[0, 1]], [[-1, 0, 1]])
    assert moved == 2 * LAYERS * len(moves([0, 2, 4, 5]))
    assert len(run.launches) == moved


REFUSED = [
    (([9], [[0]], [TREE]), "there is no sequence 9"),
    (([0], [[0], [0]], [TREE]), "paths has 2 rows; it must have 1, one per sequence"),
    (([0], [0], [TREE]), r"paths\[0\] is 0; it must be a sequence of ints"),
    (([0], 3, [TREE]), "paths is 3; it must be a row of ints"),
    (([0], [[0]], [[0.5]]), r"parents\[0\]\[0\] is 0.5; it must be an int"),
    (([0], [[1]], [TREE]), r"and the parent of token 1 is 0; paths\[0\]\[0\] must be a root"),
    (([0], [[0, 3]], [TREE]), r"paths\[0\]\[1\] must be a child of token 0"),
    (([0], [[7]], [TREE]), r"paths\[0\]\[0\] is 7; it must be in 0\.\.6, the tokens of the tree"),
    (([0], [[0]], [[0, 0]]), r"parents\[0\]\[0\] is 0; it must be -1, for a root, or an earlier"),
    (([0], [[0]], [[-1] * 14]), r"parents\[0\] has 14 tokens, and the sequence 13 rows"),
]


@each_case("arguments, message", REFUSED)
def test_invalid_arguments_are_refused(arguments, message):
    cache = cache_with_a_tree()
    with pytest.raises((TypeError, ValueError), match=message):
        cache.accept(*arguments)
    check(cache, OLD)


def test_a_refused_tree_allocates_no_page():
    sequences, free = Sequences("paged"), 40
    for parents, message in (([-1, 1], "parents is 1 for token 1 of"), ([-1], "parents has shape")):
        with pytest.raises(ValueError, match=message):
            sequences.step(2, 0, {"parents": torch.tensor(parents).int()})
        assert sequences.cache.num_free_pages == free
        assert sequences.cache.seqlens(sequences.ids).tolist() == [0, 0]


@each_case(
    "arguments, message",
    [
        (([3], [[0]], [TREE]), "indices is 3; it must be in 0..2"),
        (([1, 1], [[0]] * 2, [TREE] * 2), r"indices are \[1, 1\]; each sequence may occur"),
        ((1, [[1]], [TREE]), "indices is 1; it must be a sequence of ints"),
        (([0], [[0]], [TREE]), "sequence 0 has layers of 7 and of 8 rows"),
    ],
)
def test_static_caches_refuse_invalid_arguments(arguments, message):
    cache = StaticKVCache(3, 16, HEADS, HEAD_DIM, num_layers=LAYERS)
    for layer, lengths in enumerate(([8, 7, 7], [7, 7, 7])):
        cache.advance(lengths, layer)
    with pytest.raises((TypeError, ValueError), match=message):
        cache.accept(*arguments)
    assert cache.seqlens().tolist() == [8, 7, 7]
