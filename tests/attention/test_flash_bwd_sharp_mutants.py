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
    sharp("offset values"): {
        "no second pass": (
            "dq",
            "if (!any_simdgroup(second_pass, votes, simdgroup, lane))",
            "if (true)",
        ),
        "second pass of one SIMD group": (
            "dq",
            "(pass > 0 && !second_pass)",
            "(pass > 0 && simdgroup > 0)",
        ),
        "second pass adds": ("dq", "deltas[i] = error.of_delta;", "deltas[i] = -error.of_delta;"),
        "second pass with values": (
            "dq",
            "gradients.fill(0.0f);",
            "multiply_transposed<ELEMENT, V_COLUMNS>(gradients, dout_tile, v_lane);",
        ),
        "no barrier after the vote": (
            "dq",
            BARRIER + "  float any",
            "float any",
            ("race", "uninitialised"),
        ),
    },
    sharp("values to 9", torch.float32): {
        "weights not divided by their sum": (
            "dkv",
            "exists ? statistics.weight_factor(query)",
            "exists ? 1.0f",
        ),
    },
    sharp("everything"): {
        "rounded delta": (
            "dq",
            "Fragment<float>(deltas[i] + error.of_delta, 0.0f)",
            "Fragment<float>(deltas[i], 0.0f)",
        ),
        "sink not in the sum": ("dq", "sum -= sink_weight * row_delta;", ""),
        "gradient of the log-sum-exp not in the sum": (
            "dq",
            "sum - dlse;",
            "sum - 0.0f * dlse;",
        ),
    },
    sharp("large sinks"): {
        "sink not in the sum of weights": ("dq", "row_sum += sink_weight;", ""),
        "rounded origin of a bias's weights": (
            "bias",
            "fma(-M_LN2_F, rounded_off(lse, origin), 1.0f)",
            "1.0f",
        ),
        "normaliser not stored": (
            "dq",
            "Fragment<float>(error.normaliser, 0.0f)",
            "Fragment<float>(1.0f, 0.0f)",
        ),
        "weights of a bias not divided by their sum": ("bias", "weight *= weight_factors[i];", ""),
    },
}


test_mutant_is_caught, test_the_unchanged_kernels_pass = mutant_tests(
    MUTANTS, "flash_bwd_{}", run=lambda shown: shown(torch.float16, CPU)
)
