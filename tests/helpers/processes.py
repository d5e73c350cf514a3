"""Runs a test's function in several processes that talk through gloo."""

import tempfile
from datetime import timedelta

import torch

from tests.helpers import forks
from tests.helpers.patience import HANG_SECONDS
from tests.helpers.shared import locked


def run_in_processes(function, processes, path):
    """The results of `function(rank)`, which are kept in `path` for all workers."""
    results = [path / f"{rank}.pt" for rank in range(processes)]
    with locked(path):
        if not all(result.exists() for result in results):
            torch.multiprocessing.start_processes(
                _run,
                (function, processes, str(path), tempfile.mkdtemp(dir=path)),
                nprocs=processes,
                start_method=forks.context.get_start_method(),
            )
    return [torch.load(result) for result in results]


def _run(rank, function, processes, path, meeting):
    torch.set_num_threads(1)
    # A file and not a port, because another process may take a free port.
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting}/store",
        timeout=timedelta(seconds=HANG_SECONDS),
        rank=rank,
        world_size=processes,
    )
    try:
        torch.save(function(rank), f"{path}/{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()
