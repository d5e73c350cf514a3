"""Gradients of sharp softmaxes, against twice the error of torch's operations.

The gradients of the scores nearly cancel, so the rounding of out and of the log-sum-exp matters.
"""

import math
from functools import partial

import pytest
import torch

from tests.attention.flash_bwd_check import check_flash_bwd
from tests.attention.flash_fwd_check import DTYPES, hold, make_qkv, pack
from tests.attention.held_cases import HOME
from tests.helpers.mutants import mutant_tests
from torch_metal_attn.reference import attention
from torch_metal_attn.testing.judge import largest, near, on
from torch_metal_attn.testing.tf32 import as_multiplied

ADDED = ("attn_bias", "attn_mask", "alibi_slopes", "learnable_sink")
# GQA, and more than one block of keys.
SHAPE = {"heads": 4, "kv_heads": 2, "q_length": 21, "kv_length": 70, "head_dim": HOME}


def uniform(*shape, size=9.0, seed=0):
    return size * (2 * torch.rand(shape, generator=torch.Generator().manual_seed(seed)) - 1)


def sharp_qkv(size=9.0, batch=1, heads=4, kv_heads=2, q_length=21, kv_length=70, head_dim=HOME):
    sizes = [(heads, q_length), (kv_heads, kv_length), (kv_heads, kv_length)]
    return [uniform(batch, *rows, head_dim, size=size, seed=i) for i, rows in enumerate(sizes)]


def everything():
    added = {
        "attn_bias": uniform(21, 1, size=1.0),  # the same for all keys
        "alibi_slopes": torch.tensor([0.3, 0.1, 0.02, 0.5]),
        "learnable_sink": torch.tensor([5.0, 1.0, -math.inf, 8.0]),
    }
    dropout = {"dropout_p": 0.3, "rng_state": torch.tensor([5, 7])}
    return sharp_qkv(3.0), {"dlse": True, "softcap": 20.0} | added | dropout


def large_sinks():
    """Sinks with nearly all weight. The rounding of a sink affects every row."""
    qkv, options = everything()
    return qkv, options | {"learnable_sink": torch.tensor([20.4, 31.2, 25.56, 30.56])}


# Functions that return (q, k, v) and the options.
SHARP = {
    "values to 9": lambda: (sharp_qkv(), {}),
    "torch's sample": lambda: (
        sharp_qkv(batch=4, kv_heads=4, q_length=3, kv_length=7),
        {"attn_mask": uniform(3, 7, seed=4)},
    ),
    # Values with a large mean: dout v^T is nearly the same for all keys, even in a flat softmax.
    "offset values": lambda: ([*make_qkv(**SHAPE)[:2], make_qkv(**SHAPE)[2] + 30], {}),
    "first rows": lambda: (make_qkv(**SHAPE), {"causal": True, "q_offset": 0, "dlse": True}),
    "everything": everything,
    "large sinks": large_sinks,
}


def differentiate(attend, leaves, dout, dlse, dtype=None):
    leaves = {n: x.detach().to(dtype, copy=True).requires_grad_() for n, x in leaves.items()}
    out, lse = attend(**leaves)
    loss = (out * dout.to(out)).sum()
    if dlse is not None:
        loss = loss + (lse * dlse.to(lse)).sum()
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def check_sharp(name, dtype, device):
    """Checks every gradient of autograd against twice the error of torch's operations."""
    qkv, options = SHARP[name]()
    leaves = {n: x.to(dtype) for n, x in zip("qkv", qkv, strict=True)}
    leaves |= {n: options.pop(n) for n in ADDED if n in options}
    generator = torch.Generator().manual_seed(3)
    q = leaves["q"]
    dout = torch.randn(q.shape, generator=generator).to(dtype)
    dlse = torch.randn(q.shape[:-1], generator=generator) if options.pop("dlse", False) else None

    def reference(compute_dtype=None):
        return lambda **arguments: attention(**arguments, **options, compute_dtype=compute_dtype)

    def kernels(**arguments):
        return torch.ops.metal_attn.flash_fwd(**on(device, arguments | options))

    exact = differentiate(reference(torch.float64), leaves, dout, dlse, torch.float64)
    with as_multiplied():
        composed = differentiate(reference(), leaves, dout, dlse)
    actual = differentiate(kernels, leaves, dout, dlse)
    errors = {leaf: largest(composed[leaf].double() - exact[leaf]) for leaf in exact}
    if name == "everything":
        # A slope's gradient is one number a head, so torch's error can be small by chance. The
        # error for q, k and v that are not rounded to dtype is allowed too.
        unrounded = leaves | dict(zip("qkv", qkv, strict=True))
        rounded_slopes, exact_slopes = (
            differentiate(reference(dtype), unrounded, dout, dlse, dtype)["alibi_slopes"].double()
            for dtype in (torch.float32, torch.float64)
        )
        errors["alibi_slopes"] = max(errors["alibi_slopes"], largest(rounded_slopes - exact_slopes))
    hold([near(leaf, x, exact[leaf], errors[leaf]) for leaf, x in actual.items()])


# Two dtypes if other tests compile the same kernels, otherwise only the dtype of the mutants.
CASES = [
    *((name, dtype) for name in ("values to 9", "offset values") for dtype in DTYPES[:2]),
    ("torch's sample", torch.float32),
    ("first rows", torch.float16),
    *((name, torch.float16) for name in ("everything", "large sinks")),
]


@pytest.mark.parametrize("name, dtype", CASES)
def test_as_exact_as_torch(name, dtype, device):
    check_sharp(name, dtype, device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SHARP)
def test_as_exact_as_torch_without_the_simulator(name, dtype):
    check_sharp(name, dtype, "cpu")


@pytest.mark.parametrize("options", [{}, {"window_size_left": 0, "window_size_right": 0}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_one_visible_key(dtype, options, device):
    """A softmax of one key is constant, so its gradient is 0."""
    shape = {"q_length": 9, "kv_length": 9 if options else 1, "head_dim": HOME}
    leaves = [x.to(dtype).to(device).requires_grad_() for x in make_qkv(**shape)]
    out, _ = torch.ops.metal_attn.flash_fwd(*leaves, **options)
    dq, dk, _ = torch.autograd.grad(out, leaves, torch.ones_like(out) / 3)
    # The weights of 16-bit dtypes are not divided by their sum.
    rounding = 1e-12 if dtype == torch.float32 else 1e-6
    assert dq.abs().max() < rounding
    assert dk.abs().max() < rounding


def test_weights_of_huge_scores_add_up(device):
    """The log-sum-exp of these rows, in base 2, is rounded to integers."""
    q, k, v = make_qkv(heads=1, q_length=9, kv_length=70, head_dim=HOME)
    masked = -torch.tensor([3e7, 4.1e7, 5.7e7, 6.3e7, 7.9e7, 9.1e7, 3.3e7, 2.9e7, 0.0])
    leaves = [x.to(device).requires_grad_() for x in (q, k, v)]
    bias = masked[:, None].expand(9, 70).to(device)
    out, _ = torch.ops.metal_attn.flash_fwd(*leaves, attn_bias=bias)
    _, _, dv = torch.autograd.grad(out, leaves, torch.ones_like(out))
    torch.testing.assert_close(dv.sum(2), torch.full_like(dv[:, :, 0], 9.0))


def test_packed(device):
    sequences = [sharp_qkv(q_length=q, kv_length=k) for q, k in ((21, 70), (0, 3), (5, 1))]
    q, k, v, *packing = pack([x.half() for x in sequence] for sequence in sequences)
    q = torch.cat([q, q[:2]])  # the last two rows belong to no sequence
    check_flash_bwd(q, k, v, *packing, run_forward=True, device=device)


HALF = {"dtype": torch.float16, "device": "cpu"}
MUTANTS = {
    partial(check_sharp, "offset values", **HALF): """
        dq: no second pass: if ({~!any_simdgroup(second_pass, votes, simdgroup, lane) => true~})
        dq: second pass of one SIMD group: (pass > 0 && {~!second_pass => simdgroup > 0~})
        dq: second pass adds: deltas[i] = {~=> -~} error.delta_error;
        dq: second pass with values:
            {~gradients.fill(0.0f => multiply_transposed<ELEMENT, V_COLUMNS>(gradients, dout_tile,
            v_lane~});
        dq: no barrier after the vote [race or uninitialised]:
            {~threadgroup_barrier(mem_flags::mem_threadgroup); =>~} float any
    """,
    partial(check_sharp, "values to 9", **HALF | {"dtype": torch.float32}): """
        dkv: weights not divided by their sum: exists ? {~statistics.weight_factor(query) => 1.0f~}
    """,
    partial(check_sharp, "everything", **HALF): """
        dq: rounded delta: Fragment<float>(deltas[i] {~+ error.delta_error =>~}, 0.0f)
        dq: sink not in the sum: {~sum -= sink_weight * row_delta; =>~}
        dq: gradient of the log-sum-exp not in the sum: sum - {~=> 0.0f *~} dlse;
    """,
    partial(check_sharp, "large sinks", **HALF): """
        dq: sink not in the sum of weights: {~row_sum += sink_weight; =>~}
        bias: rounded lse_log2: {~fma(-M_LN2_F, rounded_off(lse, lse_log2), 1.0f) => 1.0f~}
        dq: normaliser not stored: Fragment<float>({~error.normaliser => 1.0f~}, 0.0f)
        bias: weights of a bias not divided by their sum: {~weight *= weight_factors[i]; =>~}
    """,
}

test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(MUTANTS, "flash_bwd_{}")
