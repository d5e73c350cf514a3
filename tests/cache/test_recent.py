"""The option `recent` of the caches keeps the last rows in full precision."""

import random

import pytest
import torch

from tests.cache.sequences import STEP, Sequences, tables
from tests.helpers.cases import each_case
from torch_metal_attn.kv_cache import CacheFull
from torch_metal_attn.simulator import runs
from torch_metal_attn.testing.judge import normal
from torch_metal_attn.with_kvcache import VERIFY_QUERIES

pytestmark = pytest.mark.usefixtures("backend")

RECENT, ROOM = 4, 4 + VERIFY_QUERIES
KINDS = ["static", "paged", "static latent", "paged latent"]
# Every kind runs on the CPU kernels. Two kinds run in the simulator, for each layout and content.
RUNS = [("reference", kind) for kind in KINDS]
RUNS += [("simulator", "static"), ("simulator", "paged latent")]
each_run = pytest.mark.parametrize("backend, kind", RUNS, indirect=["backend"])
TABLES = tables(16)


def make_sequences(kind, **options):
    return Sequences(kind, **{"format": "q4_0", "recent": RECENT, "hadamard": 32} | options)


@each_run
def test_random_steps(backend, kind):
    """Steps are checked in float64. The last rows must be exact unless they were truncated."""
    seed = int("static" in kind) + 2 * (backend == "simulator")
    r, sequences = random.Random(seed), make_sequences(kind)
    for step in range(12):
        longest, at = max(sequences.lengths()), 100 * seed + 9 * step
        operation = r.choice(("append", "append", "step", "step", "mixed", "truncate", "swap"))
        length = r.choice((1, 2, 9, 60, ROOM + 30) if operation == "append" else (1, 3, 4))
        if operation in ("append", "step", "mixed") and longest + max(length, 80) > 300:
            operation = "truncate"
        if operation == "append":
            sequences.append(length, at)
        elif operation == "step":
            sequences.step(length, at)
        elif operation == "mixed":
            sequences.step([length, r.choice((0, 1, 80))][:: r.choice((1, -1))], at)
        elif operation == "truncate":
            b = r.randrange(2)
            sequences.truncate(b, r.randint(0, sequences.lengths()[b]), keep_recent=False)
            if sequences.paged:
                sequences.swap_out(b)
        else:
            sequences.swap([r.randrange(2) for _ in range(2)])
    sequences.append(ROOM + 30 if max(sequences.lengths()) < 190 else 1, 3)
    sequences.step(2, 5)


@pytest.mark.parametrize(
    "backend, kind, interleaved",
    [
        ("reference", "static", False),
        *((backend, "paged latent", True) for backend in ("reference", "simulator")),
    ],
    indirect=["backend"],
)
def test_rotation(backend, kind, interleaved):
    sequences = make_sequences(kind)
    options = TABLES | {"rotary_interleaved": interleaved, "rotary_first_column": 80}
    sequences.append(90, 0, **options)
    sequences.truncate(1, 85)
    sequences.step(3, 5, options)
    sequences.step([70, 1], 8, options)


@each_run
def test_trees(backend, kind):
    sequences, tree = make_sequences(kind), [-1, 0, 0, 2]
    sequences.append(90, 0)
    parents = torch.tensor(tree).int()
    sequences.step(4, 3, {"parents": parents})
    sequences.accept([[0, 2, 3], [0]], [tree] * 2)
    if sequences.paged:
        sequences.swap_out(1)
    sequences.step([4, 2], 9, {"parents": parents.expand(2, 4)})
    sequences.accept([[0, 2], [0, 1]], [tree, tree[:2]])
    sequences.step(1, 9)
    # If a tree is longer than ROOM, some of its rows are not kept in full precision.
    sequences.append(ROOM + 2, 11)
    chain = [*range(-1, ROOM + 1)]
    before = [x.clone() for x in sequences.cache.layers[0].by_block()]
    with pytest.raises(ValueError, match=r"the path ends at row 1\d\d; recent keeps 4 rows in"):
        sequences.accept([chain[1:]] * 2, [chain] * 2)
    assert all(map(torch.equal, before, sequences.cache.layers[0].by_block()))
    sequences.step(1, 13)


@pytest.mark.parametrize("kind", KINDS[:2])
@each_case("steps", [[160], [160, -64, 3]])  # 160 rows overwrite older recent rows
def test_truncate_keeps_recent_rows(steps, kind):
    """truncate may remove 64 rows of the longest length. To remove more, pass keep_recent=False."""
    sequences = make_sequences(kind)
    for number, more in enumerate(steps):
        sequences.append(max(more, 0), number)
        for b in range(2):
            sequences.truncate(b, sequences.lengths()[b] + min(more, 0))
    with pytest.raises(ValueError, match=r"length is 95; recent keeps 4 .* or at least 96\."):
        sequences.truncate(1, 95)
    sequences.step(1, 3)
    sequences.truncate(0, 97)
    sequences.truncate(1, 40, keep_recent=False)
    sequences.append(3, 5)
    sequences.truncate(1, 41)  # rows that keep_recent=False gave up need not be exact
    sequences.step(1, 7)
    sequences.truncate(0, 0)
    sequences.step(1, 9)


@pytest.mark.parametrize("backend, kind", RUNS[: len(KINDS)], indirect=["backend"])
def test_rows_of_flash_attn_with_kvcache_are_not_recent(backend, kind):
    sequences = make_sequences(kind)
    sequences.append(5, 0)
    sequences.attend(2, 3)
    sequences.step(1, 5)


def test_matched_prefixes_are_codes():
    sequences = make_sequences("paged latent")
    k, v = sequences.new(20, 0)
    sequences.cache.append(*sequences.operands(k, v), token_ids=[[*range(20)], [*range(5, 25)]])
    sequences.add(k, v)
    id, matched = sequences.cache.match_prefix([*range(20)])
    assert matched == 16
    sequences.ids[0] = id
    sequences.rows[0] = [x[:, :16] for x in sequences.rows[0]]
    sequences.exact = [16, 0]
    sequences.step(1, 5)


def test_slots_of_freed_sequences_are_reused():
    cache = make_sequences("paged").cache
    for _ in range(20):
        cache.free(cache.allocate())
    assert len(cache._storage.recent._held[0]) == 4
    ids = [cache.allocate() for _ in range(9)]
    assert len({cache._sequences[id].slot for id in ids} | {0}) >= 9


def test_launches():
    """A step appends codes, then attends to recent rows. Older rows need a call and a merge."""
    sequences = make_sequences("static")
    sequences.append(3, 0)
    run = runs.current()
    if run is None:
        pytest.skip("only kernels are launched")
    for appended, more in ((0, []), (90, ["flash_decode", "merge_state"])):
        sequences.append(appended, 1)
        before = len(run.launches)
        sequences.step(1, 3, {"num_splits": 1})
        kernels = [one.kernel for one in run.launches[before:]]
        assert kernels == ["append_kv", "flash_decode", *more]


def test_backward_is_refused():
    sequences = make_sequences("static")
    sequences.append(90, 0)
    q, (k, v) = normal(2, 2, 1, 96).requires_grad_(), sequences.new(1, 3)
    out = sequences.cache.decode_step(q, k.requires_grad_(), v, **STEP)
    with pytest.raises(NotImplementedError, match="decode_step has no gradient, and q requires"):
        out.sum().backward()


def test_compiled():
    """The lengths are on the host, so the graph breaks there. Results are equal."""
    results = []
    for compiled in (False, True):
        sequences = make_sequences("paged latent")
        sequences.append(90, 0)
        step = sequences.cache.decode_step
        if compiled:
            step = torch.compile(step, backend="eager")
        rows = [(normal(2, 2, 1, 96), *sequences.new(1, n)) for n in range(2)]
        results += [step(*sequences.operands(*tensors), **STEP) for tensors in rows]
    assert all(torch.equal(a, b) for a, b in zip(results[:2], results[2:], strict=True))


def q_of(length=1, columns=96):
    return normal(2, 2, length, columns)


INVALID_STEPS = [
    ((q_of(), 1), {"window_size_left": 3}, "no option window_size_left; it"),
    ((q_of(65), 65), {}, r"k has 65 new rows; .* takes 1\.\.64, or more if causal: append"),
    ((q_of(3), 1), {"causal": True}, "q has 3 queries and k 1 new row; with recent rows and"),
    ((q_of(columns=64), 1), {}, "k has a head dim of 96 and q of 64"),
    ((q_of(), 1), {"softcap": -1.0}, "softcap is -1"),
    ((q_of(2), 2), {"parents": torch.zeros(2).int()}, "parents"),
    ((q_of(), 1), TABLES | {"parents": -torch.ones(1).int()}, "rotary_cos is given with parents"),
    ((q_of(), 1), {"rotary_cos": TABLES["rotary_cos"]}, "only one of rotary_cos and rotary_sin"),
    ((q_of(), 1), {n: x[:11] for n, x in TABLES.items()}, r"rows 11 to 11 of rotary_cos .*\.10"),
    (([1.0], 1), {}, "q is a list; it must be a tensor"),
    ((q_of(), 290), {}, "290 more rows do not fit|k has 290 new rows"),
]


@each_run
@each_case("operands, options, message", INVALID_STEPS)
def test_refused_steps_change_nothing(backend, kind, operands, options, message):
    sequences = make_sequences(kind)
    sequences.append(11, 0)
    recent = sequences.cache._storage.recent
    parts = [sequences.cache._storage, recent._rows]
    tensors = [x for part in parts for x in part.layers[0].by_block()]
    before, state = [x.clone() for x in tensors], [*recent._held[0]]
    pages = sequences.cache.num_free_pages if sequences.paged else 0
    q, length = operands
    options = {"softmax_scale": 0.3} | options
    with pytest.raises((ValueError, RuntimeError, TypeError, CacheFull), match=message):
        sequences.cache.decode_step(*sequences.operands(q, *sequences.new(length, 3)), **options)
    assert all(torch.equal(x, y) for x, y in zip(before, tensors, strict=True))
    assert state == recent._held[0]
    assert sequences.cache.seqlens(*sequences.ids_or_none()).tolist() == [11, 11]
    assert pages == (sequences.cache.num_free_pages if sequences.paged else 0)


def test_cascade_is_refused():
    with pytest.raises(ValueError, match="recent is 4"):
        make_sequences("paged").cache.cascade([0, 1])
