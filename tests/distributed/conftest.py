"""The results of every case in four processes, which are started once."""

import pytest
import torch

from tests.distributed import refusals, ring_cases, training
from tests.helpers.processes import run_in_processes
from tests.helpers.shared import folder_of_all_workers


def every_case(rank):
    # Every process of the default group must call new_group, in the same order.
    groups = {n: torch.distributed.new_group(list(range(n))) for n in (1, 2, 3)}
    groups[4] = None
    return {
        "ring": {
            name: ring_cases.run(case, groups[case.processes])
            for name, case in ring_cases.CASES.items()
            if rank < case.processes
        },
        "refused": refusals.errors(rank),
        "groups": refusals.of_groups(rank, groups[2]),
        "trained": training.every_way(),
    }


@pytest.fixture(scope="session")
def processes(tmp_path_factory):
    folder = folder_of_all_workers(tmp_path_factory)
    return run_in_processes(every_case, 4, folder / "processes")
