"""Gradients of sharp softmaxes, through autograd, are as near to float64 as torch's."""

import pytest
import torch

from tests.attention.flash_bwd_check import check_flash_bwd
from tests.attention.flash_bwd_sharp import SHARP, check_sharp, sharp_qkv
from tests.attention.flash_fwd_check import DTYPES, make_qkv, pack
from tests.attention.head_dims import HOME
from tests.helpers.mutants import mutant_tests

# Both sizes of elements where kernels are shared; else one, and what the mutants share.
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
def test_the_cpu_without_the_simulator(name, dtype):
    check_sharp(name, dtype, "cpu")


@pytest.mark.parametrize(
    "dtype, options",
    [
        (dtype, options)
        for dtype in DTYPES[:2]
        for options in ({}, {"window_size_left": 0, "window_size_right": 0})
    ],
)
def test_one_visible_key(dtype, options, device):
    """A softmax of one key is constant: no gradient, where rounding was 4e-6 in float32."""
    shape = {"q_length": 9, "kv_length": 9 if options else 1, "head_dim": HOME}
    leaves = [x.to(dtype).to(device).requires_grad_() for x in make_qkv(**shape)]
    out, _ = torch.ops.metal_attn.flash_fwd(*leaves, **options)
    dq, dk, _ = torch.autograd.grad(out, leaves, torch.ones_like(out) / 3)
    # The weights of 16-bit dtypes are not divided by their sum.
    rounding = 1e-12 if dtype == torch.float32 else 1e-6
    assert dq.abs().max() < rounding
    assert dk.abs().max() < rounding


def test_weights_of_huge_scores_add_up(device):
    """Where rows are masked by large numbers, whose log-sum-exp in base 2 rounds by whole units."""
    q, k, v = make_qkv(heads=1, q_length=9, kv_length=70, head_dim=HOME)
    masked = -torch.tensor([3e7, 4.1e7, 5.7e7, 6.3e7, 7.9e7, 9.1e7, 3.3e7, 2.9e7, 0.0])
    leaves = [x.to(device).requires_grad_() for x in (q, k, v)]
    bias = masked[:, None].expand(9, 70).to(device)
    out, _ = torch.ops.metal_attn.flash_fwd(*leaves, attn_bias=bias)
    _, _, dv = torch.autograd.grad(out, leaves, torch.ones_like(out))
    torch.testing.assert_close(dv.sum(2), torch.full_like(dv[:, :, 0], 9.0))


def test_packed(device):
    """With an empty sequence, and rows of no sequence."""
    lengths = [(21, 70), (0, 3), (5, 1)]
    sequences = [
        [x.half() for x in sharp_qkv(q_length=rows, kv_length=keys)] for rows, keys in lengths
    ]
    q, cu_seqlens_q, max_seqlen_q = pack([sequence[0] for sequence in sequences])
    k, cu_seqlens_k, max_seqlen_k = pack([sequence[1] for sequence in sequences])
    v, _, _ = pack([sequence[2] for sequence in sequences])
    packing = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    q = torch.cat([q, q[:2]])
    check_flash_bwd(q, k, v, *packing, own_forward=True, device=device)


CPU = torch.device("cpu")


def sharp(name, only=None):
    """A problem of flash_bwd_sharp, in `only` if other dtypes do not show the fault."""

    def shown(dtype, device):
        check_sharp(name, only or dtype, device)

    shown.__name__ = f"sharp, {name}"
    return shown


# By the problem that shows them: the kernel, what a fault changes in its text, and where numbers
# do not show it the fault that the simulator reports.
MUTANTS = {
    sharp("offset values"): """
        dq: no second pass: if ({~!any_simdgroup(second_pass, votes, simdgroup, lane) => true~})
        dq: second pass of one SIMD group: (pass > 0 && {~!second_pass => simdgroup > 0~})
        dq: second pass adds: deltas[i] = {~=> -~} error.of_delta;
        dq: second pass with values:
            {~gradients.fill(0.0f => multiply_transposed<ELEMENT, V_COLUMNS>(gradients, dout_tile,
            v_lane~});
        dq: no barrier after the vote [race or uninitialised]:
            {~threadgroup_barrier(mem_flags::mem_threadgroup); =>~} float any
    """,
    sharp("values to 9", torch.float32): """
        dkv: weights not divided by their sum: exists ? {~statistics.weight_factor(query) => 1.0f~}
    """,
    sharp("everything"): """
        dq: rounded delta: Fragment<float>(deltas[i] {~+ error.of_delta =>~}, 0.0f)
        dq: sink not in the sum: {~sum -= sink_weight * row_delta; =>~}
        dq: gradient of the log-sum-exp not in the sum: sum - {~=> 0.0f *~} dlse;
    """,
    sharp("large sinks"): """
        dq: sink not in the sum of weights: {~row_sum += sink_weight; =>~}
        bias: rounded lse_log2 of a bias's weights:
            {~fma(-M_LN2_F, rounded_off(lse, lse_log2), 1.0f) => 1.0f~}
        dq: normaliser not stored: Fragment<float>({~error.normaliser => 1.0f~}, 0.0f)
        bias: weights of a bias not divided by their sum: {~weight *= weight_factors[i]; =>~}
    """,
}


test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(
    MUTANTS, "flash_bwd_{}", run=lambda shown: shown(torch.float16, CPU)
)
