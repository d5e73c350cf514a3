import pytest
from torch._dynamo import trace_rules


@pytest.fixture(autouse=True, scope="package")
def torchs_own_functions():
    """Dynamo caches torch's functions on first use. It must not cache the wrappers of `doctor`."""
    trace_rules.get_torch_obj_rule_map()
