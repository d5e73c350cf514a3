"""How a command line ends: its exit status, and a line for an error that is no defect of ours."""

import sys
from collections.abc import Callable

from .toolchain import ToolchainError

INTERRUPTED = 130  # as of a process that SIGINT ends


def exit_status(command: Callable[[], bool], *errors: type[Exception]) -> int:
    """Run a command: 0 if it returns True, 1 if False.

    2 if it cannot run: one of `errors`, no compiler, or a file that cannot be used.
    """
    expected: tuple[type[Exception], ...] = (*errors, ToolchainError, OSError)
    try:
        return 0 if command() else 1
    except expected as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
