"""The kernels `merge_state` and `merge_splits` against float64, on the best device.

Without an Apple GPU the shader text runs in the simulator, with every check on.
"""

import math

import pytest
import torch

from bench import bench_memory
from torch_metal_attn import reference
from torch_metal_attn.testing.judge import DTYPES, ROUNDING, near, near_statistic, worst_of
from torch_metal_attn.testing.judge import normal as standard_normal
from torch_metal_attn.testing.merges import union

merge_state = torch.ops.metal_attn.merge_state
merge_state_ = torch.ops.metal_attn.merge_state_
merge_splits = torch.ops.metal_attn.merge_splits


def normal(*shape, dtype=torch.float32, seed=0, spread=1.0):
    return (spread * standard_normal(*shape, seed=seed)).to(dtype)


def check_union(out, lse, outs, lses, sink=None):
    """Holds a result to the definition in float64, of outs (..., S, D) and lses (..., S)."""
    oracle, oracle_lse = union(
        outs.double(), lses.double(), None if sink is None else sink.double()
    )
    torchs, torchs_lse = union(outs, lses, None if sink is None else sink.float())
    error = worst_of([(torchs.to(out.dtype), oracle)])
    measure = near("out", out, oracle, error)
    assert measure.ok, measure
    slack = 2 * worst_of([(torchs_lse, oracle_lse)])
    measure = near_statistic("lse", lse, oracle_lse, 2**-22, slack)
    assert measure.ok, measure


def by_rows(lse, packed):
    return lse.transpose(0, 1) if packed else lse


def check_state(out_a, lse_a, out_b, lse_b, *, device):
    """The op on tensors of the CPU, with their strides; returns its result."""
    tensors = (out_a, lse_a, out_b, lse_b)
    out, lse = (t.cpu() for t in merge_state(*(t.to(device) for t in tensors)))
    packed = out_a.dim() == 3
    outs = torch.stack([out_a, out_b], -2)
    lses = torch.stack([by_rows(lse_a, packed), by_rows(lse_b, packed)], -1)
    assert (out.dtype, lse.dtype) == (out_a.dtype, torch.float32)
    check_union(out, by_rows(lse, packed), outs, lses)
    empty_b = by_rows(lse_b == -math.inf, packed) & by_rows(lse_a != -math.inf, packed)
    empty_a = by_rows(lse_a == -math.inf, packed) & by_rows(lse_b != -math.inf, packed)
    for rows, other, other_lse in ((empty_b, out_a, lse_a), (empty_a, out_b, lse_b)):
        assert torch.equal(bits(out[rows]), bits(other[rows]))
        assert torch.equal(bits(by_rows(lse, packed)[rows]), bits(by_rows(other_lse, packed)[rows]))
    return out, lse


def bits(x):
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def check_splits(outs, lses, *, dtype=None, sink=None, device):
    def there(t):
        return None if t is None else t.to(device)

    out, lse = merge_splits(there(outs), there(lses), out_dtype=dtype, learnable_sink=there(sink))
    dtype = dtype or torch.float32
    assert out.dtype == dtype
    check_union(out.cpu(), lse.cpu(), outs, lses, None if sink is None else sink[:, None, None])
    return out.cpu(), lse.cpu()


def some_states(*shape, dtype=torch.float32, packed=False, seed=0, spread=3.0):
    rows = (shape[1], shape[0]) if packed else shape[:-1]
    for i in (0, 1):
        yield normal(*shape, dtype=dtype, seed=seed + i)
        yield normal(*rows, spread=spread, seed=seed + i + 2)


def some_partials(*shape, seed=0, spread=3.0):
    return normal(*shape, seed=seed), normal(*shape[:-1], spread=spread, seed=seed + 1)


class TestState:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("head_dim", [1, 8, 33, 64, 80, 128, 511, 512])
    def test_head_dims(self, head_dim, dtype, device):
        for shape in ((2, 3, 7, head_dim), (7, 3, head_dim)):
            states = some_states(*shape, dtype=dtype, packed=len(shape) == 3)
            check_state(*states, device=device)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_attention_over_a_union_of_keys(self, dtype, device):
        """What it is for: two halves of the keys are all of them."""
        q, k, v = (normal(2, 3, 5, 16, seed=i) for i in range(3))
        whole, whole_lse = reference.attention(q.double(), k.double(), v.double())
        halves = []
        for part in (slice(0, 2), slice(2, 5)):
            out, lse = reference.attention(q, k[:, :, part], v[:, :, part])
            halves += [out.to(dtype).to(device), lse.to(device)]
        out, lse = (t.cpu().double() for t in merge_state(*halves))
        assert (out - whole).abs().max() <= 3 * ROUNDING[dtype] * whole.abs().max() + 1e-6
        assert (lse - whole_lse).abs().max() < 1e-5

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_state_without_keys_changes_nothing(self, dtype, device):
        out_a, lse_a, out_b, lse_b = some_states(2, 3, 8, 64, dtype=dtype)
        lse_a[0] = -math.inf
        out_a[0] = math.nan
        lse_b[:, 1] = -math.inf
        out_b[:, 1] = math.inf
        out_b[0, 0, 0] = -0.0
        out, lse = check_state(out_a, lse_a, out_b, lse_b, device=device)
        assert (out[0, 1] == 0).all()
        assert (lse[0, 1] == -math.inf).all()
        assert out[0, 0, 0].signbit().all()

    @pytest.mark.parametrize("head_dim", [63, 64])
    def test_nan_and_infinities(self, head_dim, device):
        out_a, lse_a, out_b, lse_b = some_states(1, 1, 8, head_dim)
        out_a[0, 0, 0] = math.nan
        lse_a[0, 0, 1] = math.nan
        lse_b[0, 0, 2] = math.nan
        out_b[0, 0, 3] = math.inf
        lse_b[0, 0, 4] = math.inf  # has no weights, as in softmax
        lse_a[0, 0, 5], out_a[0, 0, 5], lse_b[0, 0, 5] = -200.0, math.inf, 200.0
        tensors = [t.to(device) for t in (out_a, lse_a, out_b, lse_b)]
        for order in (tensors, tensors[2:] + tensors[:2]):
            out, lse = (t.cpu() for t in merge_state(*order))
            for row in (0, 1, 2, 4, 5):
                assert out[0, 0, row].isnan().all()
            assert (out[0, 0, 3] == math.inf).all()
            assert lse[0, 0].isnan().tolist() == [False, True, True, False, True] + [False] * 3

    @pytest.mark.parametrize("spread", [1e-3, 100.0, 1e4, 1e37])
    def test_any_magnitude(self, spread, device):
        check_state(*some_states(2, 2, 9, 32, spread=spread), device=device)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_layouts(self, dtype, device):
        """(B, L, H, D) seen as (B, H, L, D), rows off 16 bytes, expanded, cut out of NaN."""
        out_a, lse_a, out_b, lse_b = some_states(2, 3, 5, 32, dtype=dtype)
        transposed = out_a.transpose(1, 2).contiguous().transpose(1, 2)
        out, _ = check_state(transposed, lse_a, out_b, lse_b, device=device)
        assert out.stride() == transposed.stride()
        memory = torch.full((2, 3, 5, 48), math.nan, dtype=dtype)
        for start in (8, 1):
            part = memory[..., start : start + 32]
            part.copy_(out_a)
            check_state(out_b, lse_b, part, lse_a, device=device)
        one = out_a[:, :1].expand(2, 3, 5, 32)
        check_state(one, lse_a[:1].expand(2, 3, 5), out_b, lse_b, device=device)
        steps = normal(2, 3, 10)[..., ::2]
        check_state(
            out_a, steps, out_b, lse_b.permute(2, 1, 0).contiguous().permute(2, 1, 0), device=device
        )

    @pytest.mark.parametrize("shape", [(0, 3, 5, 8), (2, 0, 5, 8), (2, 3, 0, 8)])
    def test_empty(self, shape, device):
        out, lse = check_state(*some_states(*shape), device=device)
        assert (out.shape, lse.shape) == (shape, shape[:-1])


def check_in_place(out_a, lse_a, out_b, lse_b, *, device, **options):
    """`merge_state_` writes the bits of `merge_state`, and nothing but state a."""
    given = [t.to(device) for t in (out_a, lse_a, out_b, lse_b)]
    expected = merge_state(*given, **options)
    written = [given[0].clone(), given[1].clone(), *given[2:]]
    before = [t.clone() for t in given[2:]]
    assert merge_state_(*written, **options) is None
    for mine, theirs in zip(written, (*expected, *before), strict=True):
        assert torch.equal(bits(mine), bits(theirs))
        assert mine.stride() == theirs.stride()


def check_masked(out_a, lse_a, out_b, lse_b, mask, *, device):
    """`merge_state_` with a mask keeps the bits of state a where it is false."""
    states = out_a, lse_a, out_b, lse_b
    merged, written = ([t.to(device, copy=True) for t in states] for _ in range(2))
    merge_state_(*merged)
    merge_state_(*written, mask=mask.to(device))
    packed = out_a.dim() == 3
    rows = mask[:, None] if packed else mask[:, None, :]
    for i, taken in enumerate((rows[..., None], by_rows(rows, packed))):
        expected = torch.where(taken, bits(merged[i].cpu()), bits(states[i]))
        assert torch.equal(bits(written[i].cpu()), expected)


class TestInPlace:
    """FlashInfer's merge_state_in_place."""

    @pytest.mark.parametrize("head_dim, dtype", [(33, torch.float32), (64, torch.float16)])
    @pytest.mark.parametrize("packed", [False, True])
    def test_same_bits(self, packed, head_dim, dtype, device):
        """Rows over several SIMD groups, and as one view in another order of dimensions."""
        shape = (7, 3, head_dim) if packed else (2, 3, 7, head_dim)
        states = list(some_states(*shape, dtype=dtype, packed=packed))
        states[1].flatten()[:2] = -math.inf
        states[3].flatten()[1:4] = -math.inf
        check_in_place(*states, device=device)
        states[0] = states[0].transpose(0, 1).contiguous().transpose(0, 1)
        check_in_place(*states, device=device)

    def test_a_gradient_is_refused_in_backward(self):
        """Not dropped: out_a holds what requires grad afterwards, by keywords too."""
        out_a, lse_a, out_b, lse_b = (t.clone() for t in some_states(2, 3, 5, 16))
        merge_state_(out_a, lse_a, out_b=out_b.requires_grad_(), lse_b=lse_b)
        with pytest.raises(NotImplementedError, match=r"out_b requires grad: .*use merge_state"):
            out_a.sum().backward()

    @pytest.mark.parametrize("packed", [False, True])
    def test_mask(self, packed, device):
        """FlashInfer's: rows without it keep their bits, whatever they and the others hold."""
        states = list(some_states(*((7, 3, 64) if packed else (2, 3, 7, 64)), packed=packed))
        states[0].flatten()[::5], states[1].flatten()[::4] = math.nan, -math.inf
        states[2][1], states[3].flatten()[1::4] = math.nan, math.inf
        if packed:  # theirs are (tokens, heads)
            states[1::2] = (t.t().contiguous().t() for t in states[1::2])
        mask = (torch.arange(28) % 3 != 1).view(2, 14)[:, ::2]
        check_masked(*states, mask[0] if packed else mask, device=device)


class TestInfinityIsEmpty:
    """+inf for no keys, as flash-attn 2 and vLLM have it; without being asked it is no number."""

    @pytest.mark.parametrize("head_dim", [33, 64])
    def test_state(self, head_dim, device):
        states = list(some_states(2, 3, 5, head_dim))
        states[1][0], states[0][0] = -math.inf, math.nan
        states[3][:, 1], states[2][:, 1] = -math.inf, math.nan
        theirs = [t.masked_fill(t == -math.inf, math.inf) for t in states]
        expected = check_state(*states, device=device)
        on_device = [t.to(device) for t in theirs]
        found = merge_state(*on_device, infinity_is_empty=True)
        for ours, meant in zip(found, expected, strict=True):
            assert torch.equal(bits(ours.cpu()), bits(meant))
        check_in_place(*theirs, device=device, infinity_is_empty=True)
        assert merge_state(*on_device)[0].isnan().any()

    def test_splits(self, device):
        outs, lses = some_partials(2, 2, 3, 40, 36)
        lses[..., ::3], lses[1, 1] = -math.inf, -math.inf
        outs[lses == -math.inf] = math.nan
        expected = check_splits(outs, lses, device=device)
        theirs = lses.masked_fill(lses == -math.inf, math.inf)
        found = merge_splits(outs.to(device), theirs.to(device), infinity_is_empty=True)
        for ours, meant in zip(found, expected, strict=True):
            assert torch.equal(bits(ours.cpu()), bits(meant))

    def test_gradients(self, device):
        states = list(some_states(2, 3, 5, 16))
        states[1][0], states[3][:, 1] = -math.inf, -math.inf
        found = []
        for empty in (-math.inf, math.inf):
            given = [t.masked_fill(t == -math.inf, empty).to(device) for t in states]
            given = [t.requires_grad_() for t in given]
            out, lse = merge_state(*given, infinity_is_empty=empty > 0)
            loss = out.square().sum() + lse.masked_fill(lse == -math.inf, 0.0).sum()
            found.append(torch.autograd.grad(loss, given))
        for ours, meant in zip(*found, strict=True):
            assert torch.equal(ours, meant)


class TestSplits:
    """llama.cpp's flash_attn_vec_reduce, and the end of every decode that splits its keys."""

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("splits", [1, 2, 7, 32, 33, 100, 1024])
    def test_flash_attn_vec_reduce(self, splits, dtype, device):
        for head_dim in (33, 64, 128):
            partials = some_partials(1, 3, 2, splits, head_dim)
            check_splits(*partials, dtype=dtype, device=device)

    @pytest.mark.parametrize("head_dim", [1, 4, 28, 36, 256, 510, 512])
    def test_head_dims(self, head_dim, device):
        check_splits(*some_partials(2, 3, 5, 6, head_dim), device=device)

    @pytest.mark.parametrize("sink_dtype", DTYPES)
    def test_sink(self, sink_dtype, device):
        """One more logit without a value: large, small and none, with and without keys."""
        outs, lses = some_partials(2, 5, 3, 7, 32)
        sink = torch.tensor([-1.0, 30.0, -30.0, -math.inf, 0.5], dtype=sink_dtype)
        lses[1, :, 1] = -math.inf
        out, lse = check_splits(outs, lses, sink=sink, device=device)
        assert torch.equal(lse[1, :, 1], sink.float())
        assert (out[1, :, 1] == 0).all()
        sink[0] = math.nan
        out, lse = check_splits(outs, lses, sink=sink, device=device)
        assert out[:, 0].isnan().all()

    @pytest.mark.parametrize("head_dim", [30, 64])
    def test_dead_partials_are_not_read(self, head_dim, device):
        outs, lses = some_partials(2, 2, 3, 40, head_dim)
        lses[..., ::3] = -math.inf
        lses[1, 1] = -math.inf
        lses[0, 0, 0, 1:] = -math.inf
        lses[0, 0, 0, 0] = 2.5
        outs[lses == -math.inf] = math.nan
        out, lse = check_splits(outs, lses, device=device)
        assert (out[1, 1] == 0).all()
        assert (lse[1, 1] == -math.inf).all()
        assert torch.equal(out[0, 0, 0], outs[0, 0, 0, 0])
        assert lse[0, 0, 0] == 2.5

    def test_nan_and_infinities(self, device):
        outs, lses = some_partials(1, 1, 6, 35, 16)
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

    @pytest.mark.parametrize("spread", [100.0, 1e37])
    def test_any_magnitude(self, spread, device):
        check_splits(*some_partials(2, 2, 9, 40, 32, spread=spread), device=device)

    @pytest.mark.parametrize("shape", [(0, 3, 5, 2, 8), (2, 0, 5, 2, 8), (2, 3, 0, 2, 8)])
    def test_empty(self, shape, device):
        out, lse = check_splits(*some_partials(*shape), device=device)
        assert (out.shape, lse.shape) == ((*shape[:3], 8), shape[:3])


@pytest.mark.parametrize("dtype", DTYPES)
class TestCounts:
    """No more moves than what has to, 16 bytes at a time: counts an element, not times."""

    def test_state(self, dtype):
        counts = bench_memory.merge("merge_state", 2, 64, str(dtype).removeprefix("torch."))
        chunk = 16 / dtype.itemsize
        assert counts["loads"] == 2 / chunk + 2 / chunk  # and both log-sum-exps, once a chunk
        assert counts["stores (bytes)"] == dtype.itemsize + 4 / 64
        assert counts["barriers"] == counts["shuffles"] == 0

    @pytest.mark.parametrize("splits", [8, 128])
    def test_splits(self, splits, dtype):
        name = str(dtype).removeprefix("torch.")
        counts = bench_memory.merge("merge_splits", splits, 128, name)
        assert counts["loads"] == splits / 4 + splits / 32
        assert counts["loads (bytes)"] <= 1.025 * splits * (4 + 4 / 128)
        assert counts["stores (bytes)"] == dtype.itemsize + 4 / 128
        assert counts["barriers"] == 0
