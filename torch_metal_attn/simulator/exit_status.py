"""The exit status of a command, and the line that it prints for a user's error."""

import contextlib
import io
import os
import sys
from collections.abc import Callable

from .toolchain import ToolchainError

INTERRUPTED = 130  # the status of a process that SIGINT ended
PIPE_CLOSED = 141  # the status after SIGPIPE: the reader of the output has ended


class BadRequest(ValueError):
    """A command with wrong arguments; the message says what is wrong."""


def exit_status(command: Callable[[], bool]) -> int:
    """Run a command: 0 if it returns True, 1 if False.

    2 if it cannot run: a BadRequest, no compiler, or a file that cannot be used. Ctrl-C and a
    reader that has ended, as in `... | head`, give the status that a shell shows for them.
    """
    try:
        passed = command()
        if sys.stdout is not None:  # as with `>&-`
            sys.stdout.flush()
        return 0 if passed else 1
    except BrokenPipeError:
        # Drop buffered output, or Python would write a message at its end.
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
