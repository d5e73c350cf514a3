import pytest
from torch._dynamo import trace_rules


@pytest.fixture(autouse=True, scope="package")
def torchs_own_functions():
    """Dynamo remembers torch's functions at its first look: not those that `doctor` puts there."""
    trace_rules.get_torch_obj_rule_map()
