"""Resources that one worker of the suite makes while the other workers wait."""

import fcntl
import os
from contextlib import contextmanager


def folder_of_all_workers(tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@contextmanager
def locked(folder):
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
