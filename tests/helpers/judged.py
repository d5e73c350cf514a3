"""Checks cases of small kernels one by one. Faults of the simulator are raised."""

import torch

from torch_metal_attn.testing.families import FAMILIES


def judge(*cases, device="cpu"):
    for case in cases:
        assert not case.invalid_reason(), f"{case}: {case.invalid_reason()}"
        prepared = FAMILIES[type(case)].prepare(case, torch.device(device))
        results = prepared.function(**prepared.arguments)
        measures = [*prepared.judge(results), prepared.memory.undisturbed(prepared.written)]
        wrong = [measure for measure in measures if not measure.ok]
        assert not wrong, f"{case}: {wrong}"


def arguments(case):
    return FAMILIES[type(case)].prepare(case, torch.device("cpu")).arguments
