"""Fresh processes by forks, which share one import of torch."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.helpers.patience import HANG_SECONDS

# The server process does not import torch_metal_attn, because some programs test that import. macOS
# cannot fork a process that loaded Metal.
context = multiprocessing.get_context("spawn" if sys.platform == "darwin" else "forkserver")
context.set_forkserver_preload(["torch", "torch._dynamo", "pytest"])


def run_alone(program, *arguments, **environment):
    done = run_program(program, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_program(program, *arguments, folder=None, **environment):
    """Runs Python text like `python -c` in `folder`, with torch already imported."""
    with tempfile.TemporaryDirectory() as place:
        outputs = [Path(place) / name for name in ("stdout", "stderr")]
        options = [str(argument) for argument in arguments]
        child = context.Process(
            target=_execute,
            args=(program, options, dict(os.environ) | environment, folder or os.getcwd(), outputs),
        )
        child.start()
        child.join(HANG_SECONDS)
        if child.is_alive():
            child.kill()
            child.join()
            raise TimeoutError(f"still running after {HANG_SECONDS} s: {program}")
        texts = [path.read_text(encoding="utf-8") for path in outputs]
    return subprocess.CompletedProcess(options, child.exitcode, *texts)


def _execute(program, arguments, environment, folder, outputs):
    for number, path in enumerate(outputs, 1):
        with path.open("wb") as file:
            os.dup2(file.fileno(), number)
    # A shell may start background jobs with interrupts ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})


def in_child(function, *arguments):
    """The result of `function`, converted to JSON and back, or the repr of its exception."""
    return in_children(1, function, *arguments)[0]


def in_children(count, function, *arguments):
    """The results of `function` in `count` children that run at the same time.

    Call it in the main thread: a child that another thread forks loses the main thread's state in
    torch, and waits for missing threads if there is a process group of gloo.
    """
    children = []
    for _ in range(count):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                result = function(*arguments)
            except BaseException as error:
                result = repr(error)
            with open(writer, "w") as pipe:
                json.dump(result, pipe)
            os._exit(0)
        os.close(writer)
        children.append((child, reader))
    results = []
    for child, reader in children:
        with open(reader) as pipe:
            results.append(json.load(pipe))
        os.waitpid(child, 0)
    return results
