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
# Each kind on the CPU kernels. In the simulator, each layout and each content once.
RUNS = [("reference", kind) for kind in KINDS]
RUNS += [("simulator", "static"), ("simulator", "paged latent")]
each_run = pytest.mark.parametrize("backend, kind", RUNS, indirect=["backend"])
TABLES = tables(16)


def made(kind, **options):
    return Sequences(kind, **{"format": "q4_0", "recent": RECENT, "hadamard": 32} | options)


@each_run
def test_random_steps(backend, kind):
    """Against the definition, in float64. The last rows are exact unless they were truncated."""
    seed = int("static" in kind) + 2 * (backend == "simulator")
    r, held = random.Random(seed), made(kind)
    for step in range(12):
        longest, at = max(held.lengths()), 100 * seed + 9 * step
        what = r.choice(("append", "append", "step", "step", "mixed", "truncate", "swap"))
        length = r.choice((1, 2, 9, 60, ROOM + 30) if what == "append" else (1, 3, 4))
        if what in ("append", "step", "mixed") and longest + max(length, 80) > 300:
            what = "truncate"
        if what == "append":
            held.append(length, at)
        elif what == "step":
            held.step(length, at)
        elif what == "mixed":
            held.step([length, r.choice((0, 1, 80))][:: r.choice((1, -1))], at)
        elif what == "truncate":
            b = r.randrange(2)
            held.truncate(b, r.randint(0, held.lengths()[b]), keep_recent=False)
            if held.paged:
                held.swap_out(b)
        else:
            held.swap([r.randrange(2) for _ in range(2)])
    held.append(ROOM + 30 if max(held.lengths()) < 190 else 1, 3)
    held.step(2, 5)


@pytest.mark.parametrize(
    "backend, kind, interleaved",
    [
        ("reference", "static", False),
        *((backend, "paged latent", True) for backend in ("reference", "simulator")),
    ],
    indirect=["backend"],
)
def test_rotation(backend, kind, interleaved):
    held = made(kind)
    options = TABLES | {"rotary_interleaved": interleaved, "rotary_first_column": 80}
    held.append(90, 0, **options)
    held.truncate(1, 85)
    held.step(3, 5, options)
    held.step([70, 1], 8, options)


@each_run
def test_trees(backend, kind):
    held, tree = made(kind), [-1, 0, 0, 2]
    held.append(90, 0)
    parents = torch.tensor(tree).int()
    held.step(4, 3, {"parents": parents})
    held.accept([[0, 2, 3], [0]], [tree] * 2)
    if held.paged:
        held.swap_out(1)
    held.step([4, 2], 9, {"parents": parents.expand(2, 4)})
    held.accept([[0, 2], [0, 1]], [tree, tree[:2]])
    held.step(1, 9)
    # Of a tree that is longer than ROOM, some rows are not kept in full precision.
    held.append(ROOM + 2, 11)
    chain = [*range(-1, ROOM + 1)]
    before = [x.clone() for x in held.cache.layers[0].by_block()]
    with pytest.raises(ValueError, match=r"the path ends at row 1\d\d; recent keeps 4 rows in"):
        held.accept([chain[1:]] * 2, [chain] * 2)
    assert all(map(torch.equal, before, held.cache.layers[0].by_block()))
    held.step(1, 13)


@pytest.mark.parametrize("kind", KINDS[:2])
@each_case("steps", [[160], [160, -64, 3]])  # the first 160 rows overwrote others
def test_going_back(steps, kind):
    """Up to 64 rows back from the longest length. Further back, keep_recent must be False."""
    held = made(kind)
    for number, more in enumerate(steps):
        held.append(max(more, 0), number)
        for b in range(2):
            held.truncate(b, held.lengths()[b] + min(more, 0))
    with pytest.raises(ValueError, match=r"length is 95; recent keeps 4 .* or at least 96\."):
        held.truncate(1, 95)
    held.step(1, 3)
    held.truncate(0, 97)
    held.truncate(1, 40, keep_recent=False)
    held.append(3, 5)
    held.truncate(1, 41)  # rows that were given up need not be exact
    held.step(1, 7)
    held.truncate(0, 0)
    held.step(1, 9)


@pytest.mark.parametrize("backend, kind", RUNS[: len(KINDS)], indirect=["backend"])
def test_rows_that_others_wrote(backend, kind):
    held = made(kind)
    held.append(5, 0)
    held.attend(2, 3)
    held.step(1, 5)


def test_matched_prefixes_are_codes():
    held = made("paged latent")
    k, v = held.new(20, 0)
    held.cache.append(*held.operands(k, v), token_ids=[[*range(20)], [*range(5, 25)]])
    held.add(k, v)
    id, matched = held.cache.match_prefix([*range(20)])
    assert matched == 16
    held.ids[0] = id
    held.rows[0] = [x[:, :16] for x in held.rows[0]]
    held.exact = [16, 0]
    held.step(1, 5)


def test_slots_are_used_again():
    cache = made("paged").cache
    for _ in range(20):
        cache.free(cache.allocate())
    assert len(cache._storage.recent._held[0]) == 4
    ids = [cache.allocate() for _ in range(9)]
    assert len({cache._sequences[id].slot for id in ids} | {0}) >= 9


def test_launches():
    """A step appends codes, then attends to recent rows. Older rows need a call and a merge."""
    held = made("static")
    held.append(3, 0)
    run = runs.current()
    if run is None:
        pytest.skip("only kernels are launched")
    for appended, more in ((0, []), (90, ["flash_decode", "merge_state"])):
        held.append(appended, 1)
        before = len(run.launches)
        held.step(1, 3, {"num_splits": 1})
        kernels = [one.kernel for one in run.launches[before:]]
        assert kernels == ["append_kv", "flash_decode", *more]


def test_backward_is_refused():
    held = made("static")
    held.append(90, 0)
    q, (k, v) = normal(2, 2, 1, 96).requires_grad_(), held.new(1, 3)
    out = held.cache.decode_step(q, k.requires_grad_(), v, **STEP)
    with pytest.raises(NotImplementedError, match="decode_step has no gradient, and q requires"):
        out.sum().backward()


def test_compiled():
    """The lengths are on the host, so the graph breaks there. Results are equal."""
    results = []
    for compiled in (False, True):
        held = made("paged latent")
        held.append(90, 0)
        step = held.cache.decode_step
        if compiled:
            step = torch.compile(step, backend="eager")
        rows = [(normal(2, 2, 1, 96), *held.new(1, n)) for n in range(2)]
        results += [step(*held.operands(*tensors), **STEP) for tensors in rows]
    assert all(torch.equal(a, b) for a, b in zip(results[:2], results[2:], strict=True))


def q_of(length=1, columns=96):
    return normal(2, 2, length, columns)


STEPS = [
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
@each_case("operands, options, message", STEPS)
def test_refused_steps(backend, kind, operands, options, message):
    held = made(kind)
    held.append(11, 0)
    recent = held.cache._storage.recent
    parts = [held.cache._storage, recent._rows]
    tensors = [x for part in parts for x in part.layers[0].by_block()]
    before, state = [x.clone() for x in tensors], [*recent._held[0]]
    pages = held.cache.num_free_pages if held.paged else 0
    q, length = operands
    options = {"softmax_scale": 0.3} | options
    with pytest.raises((ValueError, RuntimeError, TypeError, CacheFull), match=message):
        held.cache.decode_step(*held.operands(q, *held.new(length, 3)), **options)
    assert all(torch.equal(x, y) for x, y in zip(before, tensors, strict=True))
    assert state == recent._held[0]
    assert held.cache.seqlens(*held.ids_or_none()).tolist() == [11, 11]
    assert pages == (held.cache.num_free_pages if held.paged else 0)


def test_no_cascade():
    with pytest.raises(ValueError, match="recent is 4"):
        made("paged").cache.cascade([0, 1])
