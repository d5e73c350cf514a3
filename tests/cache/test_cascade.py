"""CascadePlan reads shared pages once. Its results are those of each sequence alone."""

import pickle
import random
from functools import partial

import pytest
import torch

from tests.attention.held_cases import hold
from tests.cache.sequences import Sequences
from tests.helpers.cases import each_case
from torch_metal_attn import explain, flash_attn_with_kvcache
from torch_metal_attn.kv_cache import CascadePlan, PagedKVCache
from torch_metal_attn.simulator import simulate
from torch_metal_attn.testing import Cascade, judge
from torch_metal_attn.testing.families import draw_of

PAGE, HEADS, KV_HEADS, D = 4, 4, 2, 64

normal = partial(judge.normal, dtype=torch.float16)


def caches(pages, page=PAGE, head_dim=D, kv_heads=KV_HEADS, dtype=torch.float16):
    return (normal(pages, page, kv_heads, head_dim, seed=seed, dtype=dtype) for seed in (1, 2))


# Block table, lengths, levels of (sequences, first page, end page), and number of keys to read.
TREES = {
    "one prefix": (
        *([[5, 6, 0, 0], [5, 6, 1, 0], [5, 6, 2, 3]], [9, 12, 14]),
        *([[((0, 1, 2), 0, 2)]], 8 + 1 + 4 + 6),
    ),
    "a tree": (
        [[5, 6, 0, 0], [5, 6, 0, 1], [5, 7, 2, 0], [5, 7, 2, 3], [9, 4, 0, 0]],
        [12, 16, 10, 13, 8],
        [[((0, 1, 2, 3), 0, 1)], [((0, 1), 1, 3), ((2, 3), 1, 2)]],
        4 + 8 + 4 + 0 + 4 + 2 + 5 + 8,
    ),
    "two prefixes": (
        *([[1, 2, 3], [4, 5, 6], [1, 2, 7], [4, 5, 8]], [9, 9, 12, 10]),
        *([[((0, 2), 0, 2), ((1, 3), 0, 2)]], 8 + 1 + 4 + 8 + 1 + 2),
    ),
    "no shared page": ([[1, 2], [3, 4]], [8, 7], [], 15),
    "a sequence without keys": ([[1, 2], [1, 3], [1, 2]], [0, 8, 8], [[((1, 2), 0, 1)]], 4 + 4 + 4),
    "a page that is not full": ([[1, 2], [1, 2]], [6, 7], [[((0, 1), 0, 1)]], 4 + 2 + 3),
    "the same sequence twice": ([[1, 2], [1, 2]], [8, 8], [[((0, 1), 0, 2)]], 8),
}


@pytest.mark.parametrize("name", TREES)
def test_levels_and_keys_of_a_plan(name):
    table, lengths, levels, keys = TREES[name]
    plan = CascadePlan(torch.tensor(table), torch.tensor(lengths), PAGE)
    actual = [[(s.sequences, s.first, s.end) for s in level] for level in plan.levels]
    assert actual == levels
    assert plan.keys_read == keys
    assert plan.keys_alone == sum(lengths)


SIZES = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": D, "v_head_dim": D, "page": PAGE}
SIZES |= {"dtype": "float16", "causal": True, "shared": 1, "branched": 1, "own": (4, 8, 2, 5, 0)}
# Some cases have more queries than the last page has keys.
VALUES = {
    "a tree": {},
    "one prefix": {"shared": 2, "branched": 0, "own": (1, 4, 6)},
    "a branch with one sequence": {"own": (1, 4, 6)},
    "two prefixes": {"shared": 0, "branched": 2, "own": (1, 1, 4, 2)},
    "no shared page": {"shared": 0, "branched": 0, "own": (8, 7)},
    "the same sequence twice": {"branched": 0, "own": (0, 0)},
    "several queries": {"q_length": 7},
    "not causal": {"q_length": 7, "causal": False},
    "keys to the right": {"q_length": 7, "causal": False, "window_size_right": 1},
    "a window that hides keys": {"q_length": 7, "window_size_left": 6},
    "a window that hides nothing": {"q_length": 7, "window_size_left": 15},
    "a sink": {"learnable_sink": "float32", "softcap": 2.0},
}


@pytest.mark.parametrize("name", VALUES)
def test_values(name, device):
    hold([Cascade(**SIZES | VALUES[name])], device)


def test_a_sequence_without_keys(device):
    plan = CascadePlan([[1, 2], [1, 3], [1, 2]], [0, 8, 8], PAGE, device=device)
    out = plan.attend(*(x.to(device) for x in (normal(3, 1, HEADS, D), *caches(4))))
    assert (out[0] == 0).all()
    assert (out[1:] != 0).all()


@pytest.mark.parametrize("left, shared", [(6, False), (15, True)])
def test_pages_that_a_window_hides_are_not_shared(left, shared):
    plan = CascadePlan([[1, 2]] * 2, [8] * 2, PAGE, 3, window_size=(left, 0))
    assert bool(plan.levels) == shared


def test_random_cases():
    hold([draw_of(Cascade, random.Random(seed)) for seed in range(60)], torch.device("cpu"))


def test_rounded_parts():
    """`fuzz` found this case: in one column, the rounding errors of two parts add up."""
    sizes = {"page": 1, "shared": 6, "own": (5, 0, 1), "q_length": 2, "causal": True}
    hold([Cascade(dtype="bfloat16", seed=1631031350, **sizes)], torch.device("cpu"))


@pytest.mark.parametrize(
    "kind, options",
    [("paged", {"format": "q3_g32", "layout": "HND"}), ("paged latent", {"dtype": torch.float16})],
)
def test_forks_of_a_paged_cache(kind, options, device):
    sequences = Sequences(kind, device, **options)
    sequences.append(34, 0)
    sequences.swap([0, 0])
    sequences.append(5, 1)
    plan = sequences.cache.cascade(sequences.ids, q_length=2)
    assert [[(s.sequences, s.end) for s in level] for level in plan.levels] == [[((0, 1), 2)]]
    (layer,), q = sequences.cache.layers, judge.normal(2, 2, 2, 96, seed=9)
    scores = {"softmax_scale": 0.1, "k_scale": layer.k_scale, "v_scale": layer.v_scale}
    out = plan.attend(q.transpose(1, 2).to(device), layer.k_cache, layer.v_cache, **scores)
    sequences.check(out.transpose(1, 2), q, {"softmax_scale": 0.1, "causal": True})


STALE = [
    (lambda both: both.append(1, 3), "is for 39 rows of sequence 2, and now it has 40; make a"),
    (lambda both: both.truncate(1, 38), "is for 39 rows of sequence 3, and now it has 38"),
    (lambda both: both.cache.free(both.ids[0]), "there is no sequence 2"),
]


@each_case("change, message", STALE)
def test_a_stale_plan_is_refused(change, message):
    sequences = Sequences("paged")
    sequences.append(34, 0)
    sequences.swap([0, 0])
    sequences.append(5, 1)
    (layer,), plan = sequences.cache.layers, sequences.cache.cascade(sequences.ids)
    q = judge.normal(2, 1, 2, 96)
    change(sequences)
    with pytest.raises(ValueError, match=message):
        plan.attend(q, layer.k_cache, layer.v_cache)


def test_a_plan_is_valid_for_layers_of_its_length():
    """A plan is valid for a layer once the layer has as many rows as the plan."""
    cache = PagedKVCache(9, 4, 1, 8, num_layers=2)
    ids = [cache.allocate(), cache.allocate()]
    rows, q = normal(2, 1, 3, 8), normal(2, 1, 1, 8)
    cache.append(ids, rows, rows, 0)
    plan = cache.cascade(ids)
    plan.attend(q, cache.layers[0].k_cache, cache.layers[0].v_cache)
    with pytest.raises(ValueError, match="for 3 rows of sequence 0, and now it has 0"):
        plan.attend(q, cache.layers[1].k_cache, cache.layers[1].v_cache)
    cache.append(ids, rows, rows, 1)
    plan.attend(q, cache.layers[1].k_cache, cache.layers[1].v_cache)
    cache.reserve(ids, 9)  # adds pages that the plan does not have
    plan.attend(q, cache.layers[0].k_cache, cache.layers[0].v_cache)


def test_plans_of_layers_with_windows():
    """A step frees pages that no plan reads. Layers with another window have other pages."""
    cache = PagedKVCache(40, 4, 1, 8, num_layers=4, windows=[-1, -1, 5, 5])
    ids = [cache.allocate(), cache.allocate()]
    rows, q = normal(2, 1, 1, 8), normal(2, 1, 1, 8)
    for _ in range(14):
        for layer, tensors in enumerate(cache.layers):
            cache.append(ids, rows, rows, layer)
            if layer % 2 == 0:
                plan = cache.cascade(ids, layer=layer)
            plan.attend(q, tensors.k_cache, tensors.v_cache)
    assert (cache.block_table(ids, 2) < 0).any()
    copied = pickle.loads(pickle.dumps(cache))
    plan = copied.cascade(ids, layer=2)
    with pytest.raises(ValueError, match="for other pages than those of layer 1; layers with"):
        plan.attend(q, copied.layers[1].k_cache, copied.layers[1].v_cache)
    copied.append(ids, rows, rows, 3)
    assert copied._storage._stored[1].k_cache.data_ptr() == copied.layers[3].k_cache.data_ptr()


def bytes_read(shared, sequences, heads, with_plan, short=0):
    """Bytes that flash_decode loads for sequences with `shared` common pages and 5 other keys.

    short: the number of further sequences, which share another page.
    """
    page, batch = 16, sequences + short
    k_cache, v_cache = caches(shared + 1 + batch, page, 64, 1)
    table = [[*range(shared), shared + 1 + b] for b in range(sequences)]
    table += [[shared, shared + 1 + b] + [0] * (shared - 1) for b in range(sequences, batch)]
    lengths = [shared * page + 5] * sequences + [page + 5] * short
    q = normal(batch, 1, heads, 64)
    plan = CascadePlan(table, lengths, page)
    seqlens, tables = (torch.tensor(x, dtype=torch.int32) for x in (lengths, table))
    with simulate(count=True) as run:
        if with_plan:
            plan.attend(q, k_cache, v_cache, num_splits=1)
        else:
            where = {"cache_seqlens": seqlens, "block_table": tables}
            flash_attn_with_kvcache(q, k_cache, v_cache, **where, num_splits=1)
    return run.counters["flash_decode"].load_bytes["device"]


@pytest.mark.parametrize("sequences, heads", [(2, 4), (8, 4)])
def test_a_prefix_is_read_once(sequences, heads):
    """K and V of 256 more keys are 64 kB. Without a plan, each sequence reads them."""
    keys = 2 * 256 * 64 * 2

    def added(with_plan):
        longer, shorter = (bytes_read(n, sequences, heads, with_plan) for n in (32, 16))
        return longer - shorter

    assert keys <= added(True) <= 1.05 * keys
    assert added(False) >= sequences * keys


def test_a_prefix_is_read_only_for_its_queries():
    """Otherwise, 448 query rows of another prefix would read this prefix three times."""
    keys = 2 * 256 * 64 * 2
    longer = bytes_read(32, 2, 32, True, short=14) - bytes_read(16, 2, 32, True, short=14)
    assert keys <= longer <= 1.05 * keys


def test_explain_lists_the_calls_of_a_plan():
    table, lengths, _, _ = TREES["one prefix"]
    plan = CascadePlan(table, lengths, PAGE)
    explained = explain(plan.attend, normal(3, 1, HEADS, D), *caches(8))
    assert [row.op for row in explained.rows] == ["flash_decode", "flash_decode", "merge_state_"]
    keys = 2 * KV_HEADS * D * 2  # bytes of a key and its value
    alone, shared, _ = (row.cost.bytes for row in explained.rows)
    results = 3 * HEADS * (2 * D * 2 + 4)
    assert alone - 11 * keys - results < 200
    assert 0 < shared - 8 * keys - results < 200
    assert "CascadePlan: 3 calls of metal_attn" in str(explained)


def test_min_pages():
    """A prefix of fewer pages than min_pages is read as a part of longer prefixes."""
    table = [[5, 6, 1, 0], [5, 6, 1, 2], [5, 7, 3, 0], [5, 7, 4, 0]]
    plan = CascadePlan(table, [16] * 4, PAGE, min_pages=2)
    actual = [[(s.sequences, s.first, s.end) for s in level] for level in plan.levels]
    assert actual == [[((0, 1), 0, 3), ((2, 3), 0, 2)]]


def test_no_sequences():
    plan = CascadePlan([], [], PAGE)
    k_cache, v_cache = caches(2)
    assert plan.attend(normal(0, 1, HEADS, D), k_cache, v_cache).shape == (0, 1, HEADS, D)


def attend(plan=None, q=(3, 1), page=PAGE, **options):
    plan = plan or CascadePlan(*TREES["one prefix"][:2], PAGE)
    return plan.attend(normal(*q, HEADS, D), *caches(8, page), **options)


def plan_of(**changes):
    return CascadePlan(**{"block_table": [[1]], "seqlens": [1], "page_size": PAGE} | changes)


WIDE = {"block_table": [[1]] * 2, "seqlens": [4] * 2, "causal": False}
PLANS = [
    ({"block_table": [[1], [1, 2]], "seqlens": [1, 1]}, "block_table has rows of different len"),
    ({"seqlens": [1, 1]}, "block_table has 1 row; it must have 2"),
    ({"seqlens": [5]}, r"seqlens\[0\] is 5; it must be in 0\.\.4, the keys of"),
    ({"block_table": [[1.5]]}, r"block_table\[0\]\[0\] is 1.5; it must be an int"),
    ({"block_table": [[2**31]]}, r"block_table\[0\] has 2147483648; it must fit int32"),
    ({"q_length": 0}, "q_length is 0; it must be at least 1"),
    (WIDE | {"q_length": 2**30}, r"q_length is 1073741824; it must be in 1\.\.1073741823"),
]
INVALID_CALLS = [
    *((partial(plan_of, **changes), message) for changes, message in PLANS),
    (lambda: attend(q=(3, 2)), r"q has shape \(3, 2, 4, 64\); the plan is for \(3, 1, H, D\)"),
    (lambda: attend(page=5), "k_cache has pages of 5 keys; the plan is for 4"),
    (lambda: attend(alibi_slopes=torch.ones(4)), "unexpected keyword argument 'alibi_slopes'"),
    (lambda: attend(k_scale=torch.ones(3, 2)), r"k_scale has .*; in a plan it must be \(Hkv,\)"),
    (lambda: attend(CascadePlan([[9] * 2] * 3, [8] * 3, PAGE)), r"is 9; it must be in 0\.\.7"),
]


@each_case("call, message", INVALID_CALLS)
def test_invalid_calls_are_refused(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
