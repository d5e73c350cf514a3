import pytest
from torch._dynamo import trace_rules

from torch_metal_attn.tools.doctor import torch_on_mps


@pytest.fixture(autouse=True)
def ways_of_torch_2_13(monkeypatch):
    """Whatever torch runs the tests."""
    monkeypatch.setattr(torch_on_mps, "TORCH", "2.13.0")


@pytest.fixture(autouse=True, scope="package")
def torchs_own_functions():
    """Dynamo remembers torch's functions at its first look: not those that `doctor` puts there."""
    trace_rules.get_torch_obj_rule_map()
