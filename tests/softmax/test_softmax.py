"""The kernels `softmax` and `apply_causal_mask` against float64, on the best device.

Without an Apple GPU the shader text runs in the simulator, with every check on.
"""

import itertools
import math
import mmap

import pytest
import torch

from bench import bench_memory
from torch_metal_attn import simulate
from torch_metal_attn.runtime import extension
from torch_metal_attn.runtime.device import best_device
from torch_metal_attn.testing.judge import DTYPES, near, worst_of
from torch_metal_attn.testing.judge import normal as standard_normal

softmax = torch.ops.metal_attn.softmax
softmax_ = torch.ops.metal_attn.softmax_
apply_causal_mask_ = torch.ops.metal_attn.apply_causal_mask_

LENGTHS = [1, 7, 31, 32, 33, 65, 128, 1023, 1024, 1025, 4097]


def normal(*shape, dtype=torch.float32, seed=0, spread=3.0):
    return (spread * standard_normal(*shape, seed=seed)).to(dtype)


def oracle_of(x, dim):
    """float64, and 0 where a row is -inf alone."""
    hidden = (x == -math.inf).all(dim, keepdim=True)
    return x.double().softmax(dim).masked_fill(hidden, 0.0)


def check_close(y, x, dim):
    """At most twice torch's own error in the same dtype, beyond rounding."""
    assert y.dtype == x.dtype
    assert y.shape == x.shape
    exact = oracle_of(x, dim)
    measure = near("weights", y, exact, worst_of([(torch._safe_softmax(x, dim), exact)]))
    assert measure.ok, measure
    assert (y[exact == 0] == 0).all()


def check_softmax(x, dim=-1, *, device):
    """The op and its form in place, on a tensor of the CPU and with its strides."""
    given = x.to(device)
    y = softmax(given, dim)
    assert y.data_ptr() != given.data_ptr() or y.numel() == 0
    check_close(y.cpu(), x, dim)
    if 0 in x.stride():
        return y
    target = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)
    result = softmax_(target, dim)
    assert result.data_ptr() == target.data_ptr()
    assert target.stride() == x.stride()
    check_close(target.cpu(), x, dim)  # not the same bits: the layouts may be summed otherwise
    return y


def check_causal_mask(scores, q_offset=0, *, device):
    """In place, with the strides given: -inf exactly where masked, the same bits elsewhere."""
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(q_offset)
    expected = scores.masked_fill(~visible, -math.inf)
    target = torch.empty_strided(
        scores.shape, scores.stride(), dtype=scores.dtype, device=device
    ).copy_(scores)
    result = apply_causal_mask_(target, q_offset)
    assert result.data_ptr() == target.data_ptr()
    assert torch.equal(target.cpu(), expected)


# The source documents' kernels by name, at their shapes.
SOURCE_SHAPES = [(64, 64), (128, 128), (256, 256), (512, 512)]


@pytest.mark.parametrize("shape", SOURCE_SHAPES)
def test_softmax_kernel(shape, device):
    check_softmax(normal(*shape), device=device)


@pytest.mark.parametrize("shape", SOURCE_SHAPES)
def test_apply_causal_mask(shape, device):
    check_causal_mask(normal(*shape), device=device)
    scores = normal(*shape).to(device)
    y = softmax(apply_causal_mask_(scores)).cpu()
    check_close(y, normal(*shape).masked_fill(~torch.ones(shape).bool().tril(), -math.inf), -1)


def values():
    """Tensors, and the dimension of the call."""
    for dtype, length in itertools.product(DTYPES, LENGTHS):
        yield normal(3, length, dtype=dtype), -1
        yield normal(length, 3, dtype=dtype), 0
    yield from ((normal(2, length), -1) for length in (16384, 100_000))
    # The maximum is subtracted before anything is rounded.
    for spread in (1e-3, 30.0, 1e4, 1e37):
        yield normal(5, 257, spread=spread), -1
        yield normal(5, 257) + spread, -1
    # Each block raises the maximum, so each rescales the sum.
    yield torch.linspace(-40, 40, 5000).expand(2, 5000).clone(), -1
    yield from ((normal(3, 5, 7, 9), dim) for dim in range(-4, 4))
    # More threadgroups than one dimension of the grid holds.
    yield normal(8 * 4096 + 9, 2), -1
    for expanded in (
        normal(3, 1, 17).expand(3, 4, 17),
        normal(5, 1).expand(5, 9),
        normal(9).expand(5, 9),
    ):
        yield from ((expanded, dim) for dim in (-1, 0))
    yield normal(9, 130)[::2, ::2], -1
    many = normal(2**9, 3).view(*[2] * 9, 3).permute(8, 1, 6, 3, 0, 7, 2, 5, 4, 9)
    yield from ((many, dim) for dim in (-1, 4))
    for shape in ((0,), (0, 5), (5, 0), (2, 0, 3)):
        yield from ((torch.empty(shape), dim) for dim in range(len(shape)))


@pytest.mark.parametrize(
    "x, dim", [*values()], ids=lambda x: "x".join(map(str, getattr(x, "shape", [x])))
)
def test_values(x, dim, device):
    y = check_softmax(x, dim, device=device)
    assert 0 in x.stride() or not x.is_contiguous() or y.is_contiguous()


class TestLayouts:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_permuted(self, dtype, device):
        x = normal(2, 3, 5, 33, dtype=dtype).permute(3, 1, 0, 2)
        for dim in range(4):
            y = check_softmax(x, dim, device=device)
            assert y.stride() == torch.empty_like(x).stride()

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("start", [0, 1, 8])
    def test_padded_rows(self, start, dtype, device):
        """Rows at 16 bytes with a ragged end, or off 16 bytes, cut out of NaN."""
        memory = torch.full((5, 80), math.nan, dtype=dtype)
        memory[:, start : start + 66] = normal(5, 66, dtype=dtype)
        given = memory.clone().to(device)
        view = given[:, start : start + 66]
        x = memory[:, start : start + 66]
        check_close(softmax(view).cpu(), x, -1)
        check_close(softmax_(view).cpu(), x, -1)
        outside = torch.ones(80, dtype=torch.bool)
        outside[start : start + 66] = False
        assert given[:, outside].isnan().all()

    def test_number(self, device):
        for dim in (-1, 0):
            assert softmax(torch.tensor(3.0, device=device), dim) == 1
            assert softmax_(torch.tensor(-math.inf, device=device), dim) == 0


class TestNonFinite:
    @pytest.mark.parametrize("length", [5, 64, 2000, 40000])
    def test_rows(self, length, device):
        x = normal(7, length)
        x[0] = -math.inf
        x[1, ::2] = -math.inf
        x[2, length // 2] = math.nan
        x[3, length - 1] = math.inf
        x[4] = torch.finfo(torch.float32).min
        x[5] = -math.inf
        x[5, length // 2] = math.nan
        x[6, : length - 1] = -math.inf
        y = check_softmax(x, device=device).cpu()
        assert (y[0] == 0).all()
        assert y[2].isnan().all()
        assert y[3].isnan().all()
        assert (y[4] == 1 / length).all() or torch.allclose(y[4], torch.tensor(1 / length))
        assert y[6, -1] == 1

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_extremes(self, dtype, device):
        largest = torch.finfo(dtype).max
        x = torch.tensor([[largest, -largest, 0.0], [-largest, -largest, -math.inf]], dtype=dtype)
        y = softmax(x.to(device)).cpu()
        assert y.tolist() == [[1, 0, 0], [0.5, 0.5, 0]]


def sparse_half(elements):
    """Zeros that take no memory until they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, 2 * elements, flags=flags), dtype=torch.float16)


@pytest.fixture
def unchecked():
    """The device; the simulator's checkers take seconds for gigabytes."""
    with best_device() as best:
        yield best


def test_offsets_beyond_32_bits(unchecked):
    if unchecked.type != "cpu":
        pytest.skip("needs a mapping without memory behind it")
    far = 2**31 + 8
    memory = sparse_half(far + 4096)
    for strides in ((far, 1), (1, far // 32)):
        x = memory.as_strided((2, 33), strides)
        values = normal(2, 33, dtype=torch.float16)
        x.copy_(values)
        softmax_(x)
        check_close(x, values, -1)
        x.copy_(values)
        apply_causal_mask_(x, 3)
        assert torch.equal(x, values.masked_fill(~torch.ones(2, 33).bool().tril(3), -math.inf))


def test_masked_gradient_is_zero_even_of_nan(device):
    x = normal(3, 5).to(device).requires_grad_()
    apply_causal_mask_(x * 1).backward(torch.full_like(x, math.nan))
    visible = torch.ones(3, 5, dtype=torch.bool).tril()
    assert x.grad.cpu()[visible].isnan().all()
    assert (x.grad.cpu()[~visible] == 0).all()


class TestCausalMask:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        "q_length, kv_length", [(1, 1), (7, 31), (33, 65), (65, 33), (3, 1030)]
    )
    def test_shapes(self, q_length, kv_length, dtype, device):
        for q_offset in (0, 1, -1, kv_length - q_length, -q_length, kv_length):
            scores = normal(2, q_length, kv_length, dtype=dtype)
            check_causal_mask(scores, q_offset, device=device)

    @pytest.mark.parametrize("q_offset", [2**31 - 1024, -(2**31 - 1024)])
    def test_largest_offsets(self, q_offset, device):
        check_causal_mask(normal(5, 9), q_offset, device=device)

    def test_long_row(self, device):
        check_causal_mask(normal(2, 20001), 4097, device=device)

    def test_layouts(self, device):
        scores = normal(4, 2, 33, 36)
        for order in ((0, 1, 2, 3), (1, 0, 2, 3), (0, 1, 3, 2), (3, 2, 1, 0), (2, 0, 3, 1)):
            check_causal_mask(scores.permute(order), 2, device=device)

    @pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 3, 4), (3, 1), (1, 3)])
    def test_degenerate(self, shape, device):
        check_causal_mask(torch.zeros(shape), 0, device=device)

    @pytest.mark.parametrize("start", [0, 1, 8])
    def test_touches_nothing_else(self, start, device):
        memory = normal(3, 9, 80)
        memory[1, 2] = math.nan
        given = memory.clone().to(device)
        apply_causal_mask_(given[:, :, start : start + 66], 20)
        expected = memory.clone()
        hidden = ~torch.ones(9, 66, dtype=torch.bool).tril(20)
        expected[:, :, start : start + 66].masked_fill_(hidden, -math.inf)
        assert torch.equal(given.cpu().nan_to_num(2.0), expected.nan_to_num(2.0))

    def test_reads_no_score_and_stores_only_masked_ones(self):
        scores = torch.zeros(64, 64)
        with simulate(count=True) as run:
            apply_causal_mask_(scores)
            counters = run.counters["apply_causal_mask"]
        assert counters.loads["device"] == 0
        assert counters.store_bytes["device"] == 4 * (64 * 63 // 2)

    def test_nothing_masked_launches_nothing(self):
        with simulate() as run:
            apply_causal_mask_(torch.zeros(5, 7), 6)
            assert not run.launches
            apply_causal_mask_(torch.zeros(5, 7), 5)
            assert [launch.kernel for launch in run.launches] == ["apply_causal_mask"]


class TestCounts:
    """The inner loops do no more than they were designed to: counts an element, not times."""

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("length", bench_memory.LENGTHS)
    def test_softmax(self, length, dtype):
        items = 16 // dtype.itemsize
        counts = bench_memory.softmax(length, str(dtype).removeprefix("torch."), "contiguous")
        assert counts["loads"] == 2 / items  # two passes of 16 bytes a load
        assert counts["stores"] == 1 / items
        # A weight an element in each pass, a rescaling a load, and the merging's once a lane.
        assert counts["exps"] <= 2 + 1 / items + 0.07
        assert counts["barriers"] == (length > 1024)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_causal_mask(self, dtype):
        counts = bench_memory.causal_mask(512, str(dtype).removeprefix("torch."), "contiguous")
        assert counts["stores (bytes)"] == dtype.itemsize
        assert counts["stores"] <= 1.1 * dtype.itemsize / 16


class TestChoice:
    def test_explanation(self):
        def defines(x, op="softmax", **options):
            packed = getattr(torch.ops.metal_attn_explain, op)(x, **options)
            return extension.launches(packed)[0]["defines"]

        assert defines(torch.zeros(4, 1024))["ROW_SIMDGROUPS"] == "1"
        assert defines(torch.zeros(4, 1025))["ROW_SIMDGROUPS"] == "8"
        assert defines(torch.zeros(4, 16384))["ROW_SIMDGROUPS"] == "32"
        assert defines(torch.zeros(4, 64))["WIDE_LOADS"] == "1"
        assert defines(torch.zeros(4, 65))["WIDE_LOADS"] == "0"
        assert defines(torch.zeros(64, 4), dim=0)["WIDE_LOADS"] == "0"
        padded = torch.zeros(4, 68)[:, :66]  # its result has rows of 66
        assert defines(padded)["WIDE_LOADS"] == "0"
        assert defines(padded, op="softmax_")["WIDE_LOADS"] == "1"
