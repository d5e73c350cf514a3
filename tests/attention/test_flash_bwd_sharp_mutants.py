"""Planted faults in what makes gradients of sharp softmaxes exact: the check must see each."""

import torch

from tests.attention.flash_bwd_sharp import check_sharp
from tests.helpers.mutants import mutant_tests

CPU = torch.device("cpu")
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"


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
        bias: rounded origin of a bias's weights:
            {~fma(-M_LN2_F, rounded_off(lse, origin), 1.0f) => 1.0f~}
        dq: normaliser not stored: Fragment<float>({~error.normaliser => 1.0f~}, 0.0f)
        bias: weights of a bias not divided by their sum: {~weight *= weight_factors[i]; =>~}
    """,
}


test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(
    MUTANTS, "flash_bwd_{}", run=lambda shown: shown(torch.float16, CPU)
)
