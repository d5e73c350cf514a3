"""The kernels `merge_state` and `merge_splits` against float64."""

import math

import pytest
import torch

from bench import bench_memory
from tests.helpers.judged import judge
from tests.helpers.mutants import mutant_tests
from torch_metal_attn.testing import Merge
from torch_metal_attn.testing.judge import DTYPES, near, near_statistic, normal, worst_of
from torch_metal_attn.testing.merges import union
from torch_metal_attn.testing.tensors import DTYPES as NAMES

merge_state = torch.ops.metal_attn.merge_state
merge_state_ = torch.ops.metal_attn.merge_state_
merge_splits = torch.ops.metal_attn.merge_splits

PACKED = {"packed": True, "heads": 3, "length": 7}
BATCH = {"batch": 2, "heads": 3, "length": 7}
IN_PLACE = {"call": "merge_state_"}
EMPTY = {"empty": 0.3}
INFINITE = {"empty": 0.3, "infinity_is_empty": True}
SPLITS = {"call": "merge_splits", "batch": 2, "heads": 3, "length": 2}
CASES = {
    "head dims": [
        sizes | {"head_dim": head_dim, "dtype": dtype}
        for head_dim in (1, 8, 33, 64, 511, 512)
        for dtype in NAMES
        for sizes in (BATCH, PACKED | EMPTY)
    ],
    # Several SIMD groups share rows. Some views have another order of dimensions.
    "in place": [
        IN_PLACE | sizes | empty | {"head_dim": head_dim, "dtype": dtype}
        for head_dim, dtype in ((33, "float32"), (64, "float16"))
        for sizes in (PACKED, BATCH, BATCH | {"layout": ("order 210",)})
        for empty in (EMPTY, INFINITE)
    ],
    # As in FlashInfer: rows that the mask leaves out keep their bits.
    "masks": [
        IN_PLACE | sizes | empty | {"head_dim": 64, "masked": True, "dtype": dtype}
        for sizes in (PACKED, BATCH)
        for empty in (EMPTY, INFINITE)
        for dtype in NAMES
    ],
    # flash-attn 2 and vLLM return +inf for rows without keys.
    "+inf for no keys": [BATCH | INFINITE | {"head_dim": n} for n in (33, 64)],
    "layouts": [
        BATCH | {"head_dim": 32, "dtype": dtype, "layout": layout}
        for dtype in NAMES
        for layout in (("order 021",), ("padded 8",), ("padded 1",))
    ],
    "gradients": [
        sizes | empty | {"head_dim": 16, "backward": True}
        for sizes in (BATCH, PACKED)
        for empty in ({}, EMPTY, INFINITE)
    ],
    "no rows": [
        sizes | {name: 0} for sizes in (BATCH, SPLITS) for name in ("batch", "heads", "length")
    ],
    # A source kernel of llama.cpp, which decoding with splits runs.
    "flash_attn_vec_reduce": [
        SPLITS | {"splits": splits, "dtype": dtype, "head_dim": head_dim}
        for splits in (1, 2, 7, 32, 33, 100, 1024)
        for dtype in NAMES
        for head_dim in (33, 64)
    ],
    "splits of other head dims": [
        SPLITS | {"splits": 6, "head_dim": head_dim} for head_dim in (1, 4, 36, 256, 510, 512)
    ],
    # Splits without keys have an out of NaN.
    "splits without keys": [
        SPLITS | {"splits": 40, "head_dim": head_dim} | empty
        for head_dim in (30, 64)
        for empty in (EMPTY, INFINITE, {"empty": 1.0})
    ],
    "sinks": [
        SPLITS | {"splits": 7, "head_dim": 32, "sink": dtype} | empty
        for dtype in NAMES
        for empty in ({}, EMPTY, {"empty": 1.0})
    ],
}


@pytest.mark.parametrize("subject", CASES)
def test_values(subject, device):
    judge(*(Merge(**fields) for fields in CASES[subject]), device=device)


def some_states(*shape, spread=3.0):
    rows = (shape[1], shape[0]) if len(shape) == 3 else shape[:-1]
    return [spread * normal(*s, seed=i) for i, s in enumerate((shape, rows, shape, rows))]


def bits(x):
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def check_copies(dtype, device):
    """Checks that merging a state without keys keeps all bits, even the sign of a zero."""
    out_a, lse_a, out_b, lse_b = some_states(2, 3, 8, 64)
    lse_a[0], out_a[0] = -math.inf, math.nan
    lse_b[:, 1], out_b[:, 1] = -math.inf, math.inf
    out_b[0, 0, 0] = out_a[1, 1, 0] = -0.0
    out_a, out_b = out_a.to(dtype), out_b.to(dtype)
    states = (t.to(device) for t in (out_a, lse_a, out_b, lse_b))
    out, lse = (t.cpu() for t in merge_state(*states))
    assert torch.equal(bits(out[0, 0]), bits(out_b[0, 0]))
    assert torch.equal(lse[0, 0], lse_b[0, 0])
    assert torch.equal(bits(out[1, 1]), bits(out_a[1, 1]))
    assert torch.equal(lse[1, 1], lse_a[1, 1])
    assert (out[0, 1] == 0).all()
    assert (lse[0, 1] == -math.inf).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_state_without_keys_changes_nothing(dtype, device):
    check_copies(dtype, device)


@pytest.mark.parametrize("head_dim", [63, 64])
def test_nan_and_infinities(head_dim, device):
    out_a, lse_a, out_b, lse_b = some_states(1, 1, 8, head_dim)
    out_a[0, 0, 0] = math.nan
    lse_a[0, 0, 1] = math.nan
    lse_b[0, 0, 2] = math.nan
    out_b[0, 0, 3] = math.inf
    lse_b[0, 0, 4] = math.inf  # gives no weights, as in softmax
    lse_a[0, 0, 5], out_a[0, 0, 5], lse_b[0, 0, 5] = -200.0, math.inf, 200.0
    tensors = [t.to(device) for t in (out_a, lse_a, out_b, lse_b)]
    for order in (tensors, tensors[2:] + tensors[:2]):
        out, lse = (t.cpu() for t in merge_state(*order))
        for row in (0, 1, 2, 4, 5):
            assert out[0, 0, row].isnan().all()
        assert (out[0, 0, 3] == math.inf).all()
        assert lse[0, 0].isnan().tolist() == [False, True, True, False, True] + [False] * 3


def test_nan_and_infinities_of_splits(device):
    outs, lses = normal(1, 1, 6, 35, 16), 3 * normal(1, 1, 6, 35, seed=1)
    outs[0, 0, 0, 34] = math.nan
    lses[0, 0, 1, 3] = math.nan
    outs[0, 0, 2, 33] = -math.inf
    lses[0, 0, 3, 34] = math.inf
    lses[0, 0, 4, 0], outs[0, 0, 4, 0] = -1000.0, math.nan
    out, lse = (t.cpu() for t in merge_splits(outs.to(device), lses.to(device)))
    for row in (0, 1, 3, 4):
        assert out[0, 0, row].isnan().all()
    assert (out[0, 0, 2] == -math.inf).all()
    assert lse[0, 0].isnan().tolist() == [False, True, False, True, False, False]


def test_sinks_that_are_infinite_or_nan(device):
    outs, lses = normal(1, 3, 2, 7, 32), 3 * normal(1, 3, 2, 7, seed=1)
    outs[0, 0, 0], lses[0, 0, 0] = math.nan, -math.inf
    sink = torch.tensor([-math.inf, -math.inf, math.nan], device=device)
    partials = outs.to(device), lses.to(device)
    out, lse = (t.cpu() for t in merge_splits(*partials, learnable_sink=sink))
    assert (out[0, 0, 0] == 0).all()
    assert lse[0, 0, 0] == -math.inf
    assert torch.equal(out[0, 1], merge_splits(*partials)[0].cpu()[0, 1])
    assert out[0, 2].isnan().all()


@pytest.mark.parametrize("spread", [1e-3, 100.0, 1e4, 1e37])
def test_any_magnitude(spread, device):
    """Two expanded states with log-sum-exps of any strides are merged, also as splits."""
    outs, lses = normal(2, 1, 9, 2, 32).expand(2, 2, 9, 2, 32), spread * normal(2, 2, 9, 2, seed=1)
    oracle, oracle_lse = union(outs.double(), lses.double(), None)
    torchs, torchs_lse = union(outs, lses, None)
    lses = lses.to(device)
    states = (t for i in range(2) for t in (outs.to(device)[..., i, :], lses[..., i]))
    for out, lse in (merge_state(*states), merge_splits(outs.contiguous().to(device), lses)):
        measure = near("out", out.cpu(), oracle, worst_of([(torchs, oracle)]))
        assert measure.ok, measure
        slack = 2 * worst_of([(torchs_lse, oracle_lse)])
        measure = near_statistic("lse", lse.cpu(), oracle_lse, 2**-22, slack)
        assert measure.ok, measure


@pytest.mark.parametrize("name", NAMES)
def test_few_loads_and_stores_per_element(name):
    """Counts per element: loads and stores are as few as possible, of 16 bytes each."""
    itemsize = getattr(torch, name).itemsize
    counts = bench_memory.merge("merge_state", 2, 64, name)
    assert counts["loads"] == 2 * (2 * itemsize / 16)  # each chunk loads both log-sum-exps too
    assert counts["stores (bytes)"] == itemsize + 4 / 64
    assert counts["barriers"] == counts["shuffles"] == 0
    for splits in (8, 128):
        counts = bench_memory.merge("merge_splits", splits, 128, name)
        assert counts["loads"] == splits / 4 + splits / 32
        assert counts["loads (bytes)"] <= 1.025 * splits * (4 + 4 / 128)
        assert counts["stores (bytes)"] == itemsize + 4 / 128
        assert counts["barriers"] == 0


SIZES = {"batch": 2, "heads": 3, "length": 5, "empty": 0.3}


def states_of_every_kind():
    judge(
        *(Merge(**SIZES, head_dim=head_dim) for head_dim in (32, 33)),
        Merge(packed=True, heads=3, length=9, head_dim=32),
        *(
            Merge("merge_state_", packed=True, heads=3, length=2, head_dim=33, **options)
            for options in ({}, {"empty": 0.3, "infinity_is_empty": True})
        ),
        Merge("merge_state_", **SIZES, head_dim=33, masked=True),
    )
    check_copies(torch.float32, "cpu")


def splits_of_every_kind():
    sizes = SIZES | {"call": "merge_splits", "splits": 41}
    for head_dim in (36, 31):
        judge(*(Merge(**sizes, head_dim=head_dim, sink=sink) for sink in ("", "float32")))
    judge(Merge(**sizes | {"splits": 2}, head_dim=36, sink="float32"))


MUTANTS = {
    states_of_every_kind: """
        weights swapped: {~weight_a * value_a + weight_b => weight_b * value_a + weight_a~}
        not normalised: const float factor = {~normaliser.finalize() => 1.0f~};
        lse of one: {~merged_lse = normaliser.logsumexp(); =>~}
        empty a taken: Chunk merged = {~has_a ? a : b => a~}
        empty b not taken: has_a {~&& has_b =>~}
        row of another head: head = index {~/ length =>~} % heads
        past the last row [out_of_bounds]: {~&& position.y < params.shape.rows =>~}
        written before all have read [race]: {~threadgroup_barrier(mem_flags::mem_device); =>~}
        written before all have read, mem_none [race]:
            threadgroup_barrier(mem_flags::{~mem_device => mem_none~});
        written before all have read, mem_threadgroup [race]:
            threadgroup_barrier(mem_flags::{~mem_device => mem_threadgroup~});
        mask of another row: mask[row.{~offset(params.mask_strides) => row~}]
        +inf merged: lse {~== INFINITY ? -INFINITY : lse =>~}
    """,
    splits_of_every_kind: """
        maximum not subtracted: return fast::exp2(to_base_2({~x - row_max => x~}))
        sum not rescaled: {~sum *= =>~} normaliser.raise(simd_max
        maximum of one lane: {~simd_max( =>~}max(normaliser.row_max, own_lse){~) =>~}
        partials in half: sum += weights[i] * {~loaded[i] => (rint(loaded[i] * 1024.0f) / 1024.0f)~}
        dead partial read [out_of_bounds]: {~weights[i] >= 0.0f && =>~} in_row
        dead partial, weight 0 [out_of_bounds]: {~own_lse == -INFINITY ? NO_KEYS : =>~} own_weight
        splits swapped [out_of_bounds]: simd_shuffle(shared_weight, {~split => ushort(split ^ 1)~})
        last block skipped: block {~< => + 32 <=~} params.splits; block
        split past the last [out_of_bounds]: {~block + lane < params.splits => true~} ?
        lanes not summed: sum = {~sum_splits(sum) => sum~} *
        sink dropped: {~normaliser.row_sum += sink_weight; =>~}
        sink counted twice: normaliser.row_sum += {~=> 2.0f *~} sink_weight;
        sum not lowered to the sink: {~sum *= =>~} normaliser.raise(max(normaliser.row_max, logit))
        sink of another head: sink[{~row.head => 0~}]
        column past the row [out_of_bounds]: {~&& in_row =>~}) {
        past the last row [out_of_bounds]: if ({~index >= params.shape.rows => false~})
    """,
}
test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(MUTANTS, "merge")
