"""The exit status of a command, and its message for a user's error."""

import contextlib
import io
import os
import sys
from collections.abc import Callable

from .toolchain import ToolchainError

INTERRUPTED = 130  # as after SIGINT
PIPE_CLOSED = 141  # as after SIGPIPE


class BadRequest(ValueError):
    """Wrong arguments of a command. The message says what is wrong."""


def exit_status(command: Callable[[], bool]) -> int:
    """Run a command; the status is 0 if it returns True, 1 if it returns False, 2 on an error.

    Errors are a BadRequest, a missing compiler and a file that cannot be used. Ctrl-C and a closed
    pipe, as in `... | head`, give the status that a shell shows for them.
    """
    try:
        passed = command()
        if sys.stdout is not None:  # it is None if the shell closed it with `>&-`
            sys.stdout.flush()
        return 0 if passed else 1
    except BrokenPipeError:
        # Python would report buffered output that it cannot write at exit.
        with contextlib.suppress(io.UnsupportedOperation):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except (BadRequest, ToolchainError, OSError) as error:
        what = str(error)
        if isinstance(error, OSError) and error.strerror:
            what = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        print(f"error: {what}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
