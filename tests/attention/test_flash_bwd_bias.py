"""The gradients of attn_bias, a floating attn_mask and alibi_slopes: layouts, bits, splits, zeros.

Their values by shape, dtype and feature are rows of test_values.py.
"""

import math

import pytest
import torch

from tests.attention.flash_bwd_bias_check import check_bias, reference_gradients, run_ops
from tests.attention.flash_bwd_check import make_gradients
from tests.attention.flash_fwd_check import make_packed, make_qkv, visible_keys
from tests.attention.flash_fwd_options import ints
from tests.attention.head_dims import HOME
from tests.attention.test_flash_fwd_device_lengths import after_the_checks
from tests.helpers.cases import each_case
from torch_metal_attn import simulate
from torch_metal_attn.reference import attention
from torch_metal_attn.runtime import extension
from torch_metal_attn.testing.judge import normal

# GQA, two query tiles or more, partial blocks of keys.
SHAPE = {"batch": 2, "heads": 4, "kv_heads": 2, "q_length": 77, "kv_length": 101, "head_dim": HOME}
WHOLE = (2, 4, 77, 101)
SLOPES = torch.tensor([0.3, 0.1, 0.02, 0.5])
# As test_values.py has slopes.
SCORES = {"softcap": 2.0, "learnable_sink": torch.tensor([3.0, 1.0, -1.0, 5.0])}
PACKED = ([40, 0, 77, 1], [50, 3, 64, 1])


def problem(**shape):
    return make_qkv(**SHAPE | shape, dtype=torch.float16)


def make_gradients_of(q, v):
    return make_gradients(q, v, q.shape[:3])


@each_case(
    "options",
    [
        *({"attn_bias": normal(*sizes)} for sizes in ((), (101,), (77, 1), (4, 77, 101))),
        {"attn_bias": normal(4, 77, 101), "dlse": False},
        {"attn_bias": normal(101, 4, 77).permute(1, 2, 0)},
        {"attn_bias": normal(77, 101).expand(WHOLE)},
        {"attn_bias": normal(2, 1, 77, 1).expand(WHOLE)},
        {"attn_bias": normal(2, 4, 80, 110)[:, :, 2:79, 9:]},
        {"attn_bias": normal(2, 4, 154, 101)[:, :, ::2]},
        SCORES | {"alibi_slopes": torch.stack([SLOPES, 2 * SLOPES, SLOPES])[::2]},
    ],
)
def test_any_dimensions_and_strides(options, device):
    """The result is of the bias' shape, contiguous, whatever the bias' strides."""
    check_bias(*problem(), **options, causal=True, device=device)


def test_what_no_query_sees_is_zero(device):
    q, k, v = problem()
    options = {"window_size_left": 9, "window_size_right": 4, "q_offset": -5}
    found = check_bias(q, k, v, **options, attn_bias=normal(*WHOLE), device=device)["attn_bias"]
    hidden = ~visible_keys(q, k, options)
    assert hidden.any()
    assert (found[hidden] == 0).all()
    found = check_bias(q, k, v, **options, attn_bias=normal(101), device=device)["attn_bias"]
    assert (found[hidden.flatten(0, 2).all(0)] == 0).all()


def test_lowest_and_infinite_biases(device):
    bias = normal(4, 77, 101)
    bias[:, :, 10:20] = -math.inf
    bias[:, 30:40, :30] = torch.finfo(torch.float32).min
    bias[:, 50] = -math.inf
    q, k, v = problem()
    given = (*make_gradients_of(q, v), q, k, v, [])
    options = {"attn_bias": bias, "causal": True}
    found = run_ops(*given, device, options)["attn_bias"]
    exact = reference_gradients(*given, options)["attn_bias"]
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)
    assert (found[:, 50] == 0).all()
    assert (found[:, :, 10:20] == 0).all()


def test_packed(device):
    """With rows of no sequence; parts of the bias beyond a sequence's lengths have none."""
    shape = {"heads": 4, "kv_heads": 2, "head_dim": HOME, "dtype": torch.float16}
    q, k, v, *packing = make_packed(*PACKED, **shape)
    q = torch.cat([q, torch.full_like(q[:9], math.nan)])
    packing[2:] = [80, 71]
    options = {"causal": True, "alibi_slopes": SLOPES, "attn_bias": normal(4, 4, 80, 71)}
    found = check_bias(q, k, v, *packing, **options, device=device)["attn_bias"]
    for b, (rows, keys) in enumerate(zip(*PACKED, strict=True)):
        assert (found[b, :, rows:] == 0).all()
        assert (found[b, :, :, keys:] == 0).all()


def test_no_rows(device):
    """Nothing is launched, and every element is 0."""
    for shape in ({"q_length": 0}, {"kv_length": 0}, {"batch": 0}):
        q, k, v = problem(**shape)
        sizes = [q.shape[0], 4, q.shape[2], k.shape[2]]
        for bias in (normal(*sizes), normal(*(min(size, 1) for size in sizes)), normal(1)):
            options = {"attn_bias": bias, "alibi_slopes": SLOPES}
            found = run_ops(*make_gradients_of(q, v), q, k, v, [], device, options)
            for name, gradient in found.items():
                assert gradient.shape == options[name].shape
                assert (gradient == 0).all()


def explained(q, k, v, **options):
    lse = torch.zeros(q.shape[:3])
    dout = v.new_empty(1, 1, 1, v.shape[3]).expand(*q.shape[:3], v.shape[3])
    op = torch.ops.metal_attn_explain.flash_bwd_bias
    return extension.launches(op(dout, q, k, v, lse, lse, **options))[0]


@pytest.mark.parametrize("sizes", [(33,), (1,), (2, 1, 1)])
def test_a_long_walk_is_split(sizes):
    """One row of keys for many queries; and one element for all."""
    qkv = problem(batch=1, heads=2, kv_heads=2, q_length=513, kv_length=33)
    assert explained(*qkv, attn_bias=normal(*sizes))["splits"] > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_partial_results_are_linear_in_the_bias(dtype):
    """Parts keep the GPU busy; a large bias has none."""
    q, k = torch.empty(2, 64, 16, 1, 64, dtype=dtype).expand(2, 64, 16, 4096, 64)
    for sizes in ((4096, 4096), (4096,), (16, 4096, 1), (1,), (64, 1, 1, 1)):
        found = explained(q, k, k, attn_bias=torch.zeros(sizes))
        columns, rows, depth = found["grid"]
        assert found["splits"] == 1 or columns * rows * depth < 2 * 240
        assert columns * rows * depth >= min(240, 64 * 16)


def test_two_runs_have_the_same_bits(device):
    q, k, v = problem(q_length=200)
    for options in ({"attn_bias": normal(101)}, SCORES | {"alibi_slopes": SLOPES}):
        given = (*make_gradients_of(q, v), q, k, v, [], device, options | {"causal": True})
        first, second = (run_ops(*given) for _ in range(2))
        assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("op", ["bias", "slopes"])
def test_impossible_lengths_are_nan(op, monkeypatch):
    """On mps nobody else sees them: nothing is read outside, and what they touch is NaN."""
    q, k, v = make_qkv(batch=3, dtype=torch.float16)
    lengths = ints(60, 30, 65)
    dout, dlse = make_gradients_of(q, v)
    options = {"attn_bias": normal(3, 1, 33, 65), "alibi_slopes": normal(3, 2)}
    options["seqused_k"] = lengths
    _, lse = attention(q, k, v, **options)
    with simulate(check=True):
        after_the_checks(monkeypatch, lengths, [60, 66, 65])
        run = getattr(torch.ops.metal_attn, f"flash_bwd_{op}")
        found = run(dout, q, k, v, lse, dlse, **options)
    assert found[1].isnan().all()
    assert found[::2].isfinite().all()


@pytest.mark.parametrize("op", ["bias", "slopes"])
def test_registration(op):
    q, k, v = problem()
    dout, dlse = make_gradients_of(q, v)
    run = getattr(torch.ops.metal_attn, f"flash_bwd_{op}").default
    added = {"attn_bias": normal(1, 77, 101).half(), "alibi_slopes": SLOPES.clone()}
    torch.library.opcheck(run, (dout, q, k, v, dlse, dlse), added)
    added["attn_bias"].requires_grad_()
    with pytest.raises(NotImplementedError, match=f"flash_bwd_{op} has no gradient"):
        run(dout, q, k, v, dlse, dlse, **added).sum().backward()


@pytest.mark.parametrize("sizes", [WHOLE, (101,), (1, 77, 1)])
def test_the_cpu_without_the_simulator(sizes):
    check_bias(*problem(), attn_bias=normal(*sizes), alibi_slopes=SLOPES, device="cpu")
    packed = make_packed(*PACKED, heads=4, kv_heads=2, head_dim=HOME)
    check_bias(*packed, attn_bias=normal(77, 64), alibi_slopes=SLOPES, device="cpu")
