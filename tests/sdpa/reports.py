"""Public reports about attention on Apple GPUs, each with the call that it is about."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from tests.sdpa.sdpa_check import normal

# By module, what the page says: each report with the test that is about it.
REPORTS = {}


@dataclass(frozen=True)
class Report:
    """One report, and what a test does about it.

    names: "pytorch#195910", or several if a later one is about the same bug.
    says: what the report says that it saw, and no more than that.
    here: what this library does instead, which the test proves.
    problem: what the test calls with: the report's sizes, layout and options.
    """

    names: str
    says: str
    here: str
    problem: Callable

    def __str__(self):
        """pytorch-195910, or pytorch-174861-174945: the id of the test's case."""
        repository = self.names.split("#")[0]
        return "-".join([repository, *(name.split("#")[1] for name in self.names.split())])


def reported(*reports):
    """Runs a test for each report, which it gets as `report`, and puts them on the page."""

    def decorate(test):
        REPORTS.setdefault(test.__module__, []).extend((report, test) for report in reports)
        return pytest.mark.parametrize("report", reports, ids=str)(test)

    return decorate


def qkv(q_shape, kv_shape=None, v_shape=None, dtype=torch.float32):
    """Normal query, key and value; a shape that is not given is that of the one before."""
    kv_shape = kv_shape or q_shape
    shapes = [q_shape, kv_shape, v_shape or kv_shape]
    return [normal(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]
