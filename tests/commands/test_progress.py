"""The progress line of a command, on a terminal and elsewhere."""

import io
import os

from torch_metal_attn.tools.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


class TestProgress:
    def test_a_terminal_shows_one_line(self):
        stream, now = Terminal(), [0.0]
        progress = Progress(3, stream, lambda: now[0])
        for text in ("a", "b", "c"):
            progress.step("group", text)
            now[0] += 30.0
        progress.end()
        assert "\n" not in stream.getvalue()
        lines = stream.getvalue().split("\r")
        assert lines[1] == "[1/3] group a"
        assert lines[2] == "[2/3] group b  1:00 left"
        assert lines[3] == "[3/3] group c  0:30 left"
        assert lines[4].strip() == ""

    def test_lines_fit_into_a_narrow_terminal(self, monkeypatch):
        """A wrapped line could not be overwritten."""
        monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((40, 20)))
        stream, now = Terminal(), [0.0]
        monkeypatch.setattr(stream, "fileno", lambda: 1)
        progress = Progress(2, stream, lambda: now[0])
        for text in ("short", "a case with a very long name " * 9):
            progress.step("group", text)
            now[0] += 30.0
        progress.end()
        lines = stream.getvalue().split("\r")
        assert max(map(len, lines)) == 39
        assert lines[2] == "[2/2] group a case with a ve  0:30 left"

    def test_a_time_limit_bounds_the_time_left(self):
        stream, now = Terminal(), [0.0]
        for total, lefts in ((None, ["1:30", "1:00"]), (3, ["1:30", "0:50"])):
            progress = Progress(total, stream, lambda: now[0], ends=now[0] + 90.0)
            progress.step("group")
            assert stream.getvalue().rstrip().endswith(f"group   {lefts[0]} left")
            now[0] += 30.0 if total is None else 25.0
            progress.step("group")
            assert stream.getvalue().rstrip().endswith(f"group   {lefts[1]} left")
        assert "[2] group" in stream.getvalue()

    def test_without_a_terminal_each_group_has_a_line(self):
        stream = io.StringIO()
        progress = Progress(3, stream)
        for group in ("x", "x", "y"):
            progress.step(group, "text")
        progress.end()
        assert stream.getvalue().splitlines() == ["[1/3] x", "[3/3] y"]
