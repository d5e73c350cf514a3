"""The progress of a long command: one changing line on a terminal, plain lines in a file."""

import os
import sys
import time
from collections.abc import Callable
from typing import TextIO


class Progress:
    """Progress on stderr: a line rewritten for each step, or one for each group of steps."""

    def __init__(
        self,
        total: int | None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        ends: float | None = None,
    ) -> None:
        self._total, self._clock, self._ends = total, clock, ends
        self._stream = sys.stderr if stream is None else stream
        self._done, self._group = 0, ""
        self._start = clock()
        self._width = 0

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *raised: object) -> None:
        self.end()

    def step(self, group: str, text: str = "") -> None:
        """Show that a step begins. group is "" if the caller prints a line for each step."""
        of_total = "" if self._total is None else f"/{self._total}"
        line = f"[{self._done + 1}{of_total}] {group}".rstrip()
        if self._stream.isatty():
            left = self._left()
            left = f"  {left} left" if left else ""
            room = self._columns() - 1 - len(left)  # a full line would scroll
            self._write(f"{line} {text}"[: max(room, 0)] + left)
        elif group != self._group:
            print(line, file=self._stream, flush=True)
        self._group = group
        self._done += 1

    def say(self, text: str) -> None:
        """Print text on stdout after clearing the changing line."""
        self.end()
        print(text, flush=True)

    def end(self) -> None:
        if self._stream.isatty():
            self._write("")
            self._stream.write("\r")
            self._stream.flush()

    def _write(self, line: str) -> None:
        self._stream.write("\r" + line.ljust(self._width))
        self._stream.flush()
        self._width = len(line)

    def _columns(self) -> int:
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
        except OSError:  # unknown, or the stream is no terminal although isatty() says so
            columns = 0
        return min(columns or 80, 100)

    def _left(self) -> str:
        lefts = []
        if self._ends is not None:
            lefts.append(max(self._ends - self._clock(), 0.0))
        if self._total is not None and self._done > 0:
            pace = (self._clock() - self._start) / self._done
            lefts.append(pace * (self._total - self._done))
        if not lefts:
            return ""
        seconds = round(min(lefts))
        return f"{seconds // 60}:{seconds % 60:02}"
