"""Runs a test's function in several processes that talk through gloo."""

import os
import socket
from datetime import timedelta

import torch

from tests.helpers import forks
from tests.helpers.shared import locked


def run_in_processes(function, processes, path):
    """What `function(rank)` returned in each of them, once for all workers; `path` is for that."""
    results = [path / f"{rank}.pt" for rank in range(processes)]
    with locked(path):
        if not all(result.exists() for result in results):
            _start(function, processes, path)
    return [torch.load(result) for result in results]


def _start(function, processes, path):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    torch.multiprocessing.start_processes(
        _run,
        (function, processes, port, str(path)),
        nprocs=processes,
        start_method=forks.context.get_start_method(),
    )


def _run(rank, function, processes, port, path):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    # A process that waits in vain fails the test, long before gloo's own 30 minutes.
    limit = timedelta(minutes=2)
    torch.distributed.init_process_group("gloo", timeout=limit, rank=rank, world_size=processes)
    try:
        torch.save(function(rank), f"{path}/{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()
