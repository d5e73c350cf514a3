"""The kernels `softmax` and `apply_causal_mask` against float64."""

import dataclasses
import math

import pytest
import torch

from bench import bench_memory
from tests.helpers.cases import each_case
from tests.helpers.judged import judge
from tests.helpers.mutants import mutant_tests
from tests.helpers.sparse import sparse
from torch_metal_attn import simulate
from torch_metal_attn.runtime import extension
from torch_metal_attn.testing import Softmax
from torch_metal_attn.testing.judge import DTYPES, near, normal, worst_of
from torch_metal_attn.testing.tensors import DTYPES as NAMES

softmax = torch.ops.metal_attn.softmax
softmax_ = torch.ops.metal_attn.softmax_
apply_causal_mask_ = torch.ops.metal_attn.apply_causal_mask_

# The shapes of the kernels in docs/design/source-kernels.md.
SOURCE_SHAPES = [(64, 64), (128, 128), (256, 256), (512, 512)]
MASK = {"call": "apply_causal_mask_"}
LAYOUTS = [("padded 1",), ("padded 8",), ("order 10",), ("order 10", "padded 5")]
CASES = {
    "lengths": [
        {"shape": shape, "dim": dim, "dtype": dtype}
        for length in (1, 7, 31, 32, 33, 65, 128, 1023, 1024, 1025, 4097)
        for dtype in NAMES
        for shape, dim in (((3, length), -1), ((length, 3), 0))
    ],
    "softmax": [{"shape": shape} for shape in SOURCE_SHAPES],
    "long rows": [{"shape": (2, length)} for length in (16384, 100_000)],
    "dimensions": [{"shape": (3, 5, 7, 9), "dim": dim} for dim in range(-4, 4)],
    # There are more threadgroups than one dimension of the grid holds.
    "many rows": [{"shape": (8 * 4096 + 9, 2)}],
    "layouts": [
        {"shape": shape, "dim": dim, "dtype": dtype, "layout": layout}
        for dtype in NAMES
        for layout in LAYOUTS
        for shape, dim in (((5, 66), -1), ((2, 3, 5, 33), 1), ((2, 3, 5, 33), -1))
    ],
    "many dimensions": [
        {"shape": (2,) * 9 + (3,), "dim": dim, "layout": ("order 8163072549",)} for dim in (-1, 4)
    ],
    # A share of 1.0 makes rows of -inf.
    "hidden": [
        {"shape": (3, length), "hidden": share}
        for length in (5, 64, 2000, 40000)
        for share in (0.3, 1.0)
    ],
    "empty tensors": [
        {"shape": shape, "dim": dim}
        for shape in ((0,), (0, 5), (5, 0), (2, 0, 3))
        for dim in range(len(shape))
    ],
    "masks": [
        MASK | {"shape": (2, q_length, kv_length), "q_offset": q_offset, "dtype": dtype}
        for q_length, kv_length in ((1, 1), (7, 31), (33, 65), (65, 33), (3, 1030))
        for q_offset in (0, 1, -1, kv_length - q_length, -q_length, kv_length)
        for dtype in NAMES
    ],
    "apply_causal_mask": [MASK | {"shape": shape} for shape in SOURCE_SHAPES],
    "masks far away": [MASK | {"shape": (5, 9), "q_offset": s * (2**31 - 1024)} for s in (1, -1)],
    "masks of long rows": [MASK | {"shape": (2, 20001), "q_offset": 4097}],
    "masks of layouts": [
        MASK | {"shape": (4, 2, 33, 36), "q_offset": 2, "layout": layout}
        for layout in (*LAYOUTS, ("order 0132",), ("order 3210",), ("order 2031", "padded 1"))
    ],
    "empty masks": [MASK | {"shape": s} for s in ((0, 5), (5, 0), (0, 3, 4), (3, 1), (1, 3))],
}


@pytest.mark.parametrize("subject", CASES)
def test_values(subject, device):
    calls = MASK.values() if "mask" in subject else ("softmax", "softmax_")
    calls = ("softmax",) if subject == "many rows" else calls
    for call in calls:
        judge(*(Softmax(**{"call": call} | fields) for fields in CASES[subject]), device=device)


def check_close(y, x, dim=-1):
    """Checks y against float64, within twice torch's error. Zeros must be exact."""
    exact = torch._safe_softmax(x.double(), dim)
    measure = near("weights", y, exact, worst_of([(torch._safe_softmax(x, dim), exact)]))
    assert measure.ok, measure
    assert (y[exact == 0] == 0).all()


def check_softmax(x, dim=-1, *, device):
    """Checks the op and its in-place form, and returns the result."""
    source = x.to(device)
    y = softmax(source, dim)
    assert y.data_ptr() != source.data_ptr()
    check_close(y.cpu(), x, dim)
    if 0 not in x.stride():
        target = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)
        assert softmax_(target, dim).data_ptr() == target.data_ptr()
        check_close(target.cpu(), x, dim)
    return y.cpu()


SPREADS = (1e-3, 30.0, 1e4, 1e37)
TENSORS = [
    # The maximum must be subtracted first.
    *(spread * normal(5, 257) for spread in SPREADS),
    *(3 * normal(5, 257) + spread for spread in SPREADS),
    # The maximum grows with each block, so each block rescales the sum.
    torch.linspace(-40, 40, 5000).repeat(2, 1),
    *(normal(3, 1, 17).expand(3, 4, 17), normal(5, 1).expand(5, 9), normal(9).expand(5, 9)),
    normal(9, 130)[::2, ::2],
]


@each_case("x", TENSORS)
def test_magnitudes_and_strides(x, device):
    for dim in (-1, 0):
        check_softmax(x, dim, device=device)


def test_softmax_of_a_number(device):
    for dim in (-1, 0):
        assert softmax(torch.tensor(3.0, device=device), dim) == 1
        assert softmax_(torch.tensor(-math.inf, device=device), dim) == 0


@pytest.mark.parametrize("length", [5, 64, 2000, 40000])
def test_rows_that_are_not_finite(length, device):
    x = 3 * normal(6, length)
    x[0, length // 2] = math.nan
    x[1, length - 1] = math.inf
    x[2] = torch.finfo(torch.float32).min
    x[3] = -math.inf
    x[3, length // 2] = math.nan
    x[4, : length - 1] = -math.inf
    y = check_softmax(x, device=device)
    assert y[0].isnan().all()
    assert y[1].isnan().all()
    torch.testing.assert_close(y[2], torch.full((length,), 1 / length))
    assert y[4, -1] == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_extremes(dtype, device):
    largest = torch.finfo(dtype).max
    x = torch.tensor([[largest, -largest, 0.0], [-largest, -largest, -math.inf]], dtype=dtype)
    assert softmax(x.to(device)).cpu().tolist() == [[1, 0, 0], [0.5, 0.5, 0]]


def test_offsets_beyond_32_bits():
    """The simulator's checks are off, because they take seconds for gigabytes."""
    far = 2**31 + 8
    memory = sparse(far + 4096)
    for strides in ((far, 1), (1, far // 32)):
        x = memory.as_strided((2, 33), strides)
        values = normal(2, 33, dtype=torch.float16)
        with simulate():
            softmax_(x.copy_(values))
        check_close(x, values)
        with simulate():
            apply_causal_mask_(x.copy_(values), 3)
        assert torch.equal(x, values.masked_fill(~torch.ones(2, 33).bool().tril(3), -math.inf))


def test_masked_gradient_is_zero_even_of_nan(device):
    x = normal(3, 5).to(device).requires_grad_()
    apply_causal_mask_(x * 1).backward(torch.full_like(x, math.nan))
    visible = torch.ones(3, 5, dtype=torch.bool).tril()
    assert x.grad.cpu()[visible].isnan().all()
    assert (x.grad.cpu()[~visible] == 0).all()


def test_a_mask_that_hides_nothing_launches_no_kernel():
    with simulate() as run:
        apply_causal_mask_(torch.zeros(5, 7), 6)
        assert not run.launches
        apply_causal_mask_(torch.zeros(5, 7), 5)
    assert [launch.kernel for launch in run.launches] == ["apply_causal_mask"]


class TestCounts:
    """Counts of operations per element."""

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("length", bench_memory.LENGTHS)
    def test_softmax(self, length, dtype):
        items = 16 // dtype.itemsize
        counts = bench_memory.softmax(length, str(dtype).removeprefix("torch."), "contiguous")
        assert counts["loads"] == 2 / items  # two passes, with 16 bytes per load
        assert counts["stores"] == 1 / items
        # Each element has one per pass. Each load has one to rescale, and each lane one to merge.
        assert counts["exps"] <= 2 + 1 / items + 0.07
        assert counts["barriers"] == (length > 1024)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_causal_mask(self, dtype):
        """No score is loaded, and only masked scores are stored."""
        counts = bench_memory.causal_mask(512, str(dtype).removeprefix("torch."), "contiguous")
        assert counts["loads"] == 0
        assert counts["stores (bytes)"] == dtype.itemsize
        assert counts["stores"] <= 1.1 * dtype.itemsize / 16


def test_choice_of_loads_and_simd_groups():
    def defines(x, op="softmax", **options):
        packed = getattr(torch.ops.metal_attn_explain, op)(x, **options)
        return extension.launches(packed)[0]["defines"]

    assert defines(torch.zeros(4, 1024))["ROW_SIMDGROUPS"] == "1"
    assert defines(torch.zeros(4, 1025))["ROW_SIMDGROUPS"] == "8"
    assert defines(torch.zeros(4, 16384))["ROW_SIMDGROUPS"] == "32"
    assert defines(torch.zeros(4, 64))["WIDE_LOADS"] == "1"
    assert defines(torch.zeros(4, 65))["WIDE_LOADS"] == "0"
    assert defines(torch.zeros(64, 4), dim=0)["WIDE_LOADS"] == "0"
    padded = torch.zeros(4, 68)[:, :66]  # softmax's result has rows of 66
    assert defines(padded)["WIDE_LOADS"] == "0"
    assert defines(padded, op="softmax_")["WIDE_LOADS"] == "1"


def rows_of_every_kind():
    """Rows of all lengths, with wide and narrow loads, with strides, and at the end of memory."""
    for x in (
        normal(9, 65),
        torch.linspace(-30, 30, 5000).reshape(1, 5000).repeat(3, 1),
        normal(1, 17000, dtype=torch.float16),
        normal(4 * 68 - 2).as_strided((4, 66), (68, 1)),
        normal(40, 3).t(),
    ):
        check_softmax(x, device="cpu")
    x = torch.full((3, 70), -math.inf)
    x[1, 3] = 0.0
    x[2, 3] = math.nan
    check_softmax(x, device="cpu")


def masks_of_every_kind():
    mask = Softmax("apply_causal_mask_", q_offset=3)
    for shape in ((2, 33, 40), (9, 65), (2, 1100)):
        judge(dataclasses.replace(mask, shape=shape))
    judge(dataclasses.replace(mask, shape=(9, 65), layout=("order 10",)))


MUTANTS = {
    rows_of_every_kind: """
        sum not rescaled: {~row_sum *= correction; =>~}
        maximum of one lane: raise({~simd_max(row_max) => row_max~})
        sum of one lane: row_sum = {~simd_sum(row_sum) => row_sum~}
        maximum not carried: float new_max = {~row_max => MASKED_ROW_MAX~};
        one value left out: i < VALUES{~=> - 1~}; i++) { sum
        base 2: fast::exp2({~to_base_2(x - row_max) => x - row_max~})
        -inf rows are not 0: {~row_sum == 0.0f ? 0.0f : =>~} 1.0f / row_sum
        NaN lost: {~row_sum == 0.0f => !(row_sum > 0.0f)~} ? 0.0f
        scaled by 0.98: weight(items[i]) * {~=> 0.98f *~} factor
        last block skipped [everywhere]:
            block {~=> + ROW_BLOCK~} < length; block += ROW_BLOCK) { load_items
        one SIMD group's part: row_max[{~lane => 0~}];
        no barrier [uninitialised]: {~threadgroup_barrier(mem_flags::mem_threadgroup); =>~}
        barrier of mem_none [race]: threadgroup_barrier(mem_flags::{~mem_threadgroup => mem_none~});
        past the row [out_of_bounds]: {~position < length => true~} ? float(row[position * stride])
        past the row read, wide [out_of_bounds]: first {~+ ITEMS <= => <~} length
        past the row stored [race]: position >= begin {~&& position < length =>~}
        past the last row [everywhere, race]: if ({~row >= params.rows => false~})
    """,
    masks_of_every_kind: """
        diagonal hidden: query + params.q_offset {~+ 1 =>~};
        one key past the diagonal: query + params.q_offset + {~1 => 2~};
        offset ignored: query + {~params.q_offset + =>~} 1;
        query ignored: {~query + =>~} params.q_offset + 1;
        rows of the batch counted on: row {~% params.q_length =>~}
        chunk of the diagonal stored: first {~>= begin && first =>~}
        visible key stored: position {~>= begin && position =>~} < length
        last key skipped: block {~=> + 8~} < params.kv_length;
        past the row stored [race]: position >= begin {~&& position < length =>~}
    """,
}

test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(MUTANTS, "softmax")
