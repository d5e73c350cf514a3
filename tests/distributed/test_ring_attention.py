"""Ring attention over processes is attention in one, gradients included."""

import pytest

from tests.distributed import ring_cases


@pytest.mark.parametrize("name", ring_cases.CASES)
def test_ring_is_attention(name, processes):
    case = ring_cases.CASES[name]
    for rank in range(case.processes):
        whole, launched, alike = processes[rank]["ring"][name]
        print(name, rank, ring_cases.check(case, whole), launched)
        assert alike
