"""Docstrings as Markdown, for the pages of the API: each section becomes a list of names."""

import re
from typing import Any

import griffe

_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns):(\s)((?:.+\n?)+)", re.MULTILINE)
_EXAMPLE = re.compile(r"^Example:\n((?: .*\n?|\n)+)", re.MULTILINE)  # indented, so it is code
_IN_A_PARAGRAPH = re.compile(r"(?:^|(?<=\. ))((?:\*{0,2}[\w.]+(?:, | or )?)+): ")
_ON_ITS_LINE = re.compile(r"^ +([^:\n]{1,40}): ", re.MULTILINE)


def as_markdown(text: str) -> str:
    """Titles of sections become bold, and each name in a section becomes a list item."""
    text = _EXAMPLE.sub(lambda match: f"**Example:**\n\n{match[1]}", text)
    return _SECTION.sub(_section, text)


def _section(match: re.Match[str]) -> str:
    title, blank, text = match.groups()
    if title == "Returns":
        items = text.strip()
    elif blank == "\n" or "\n        " in text:
        items = _ON_ITS_LINE.sub(r"- `\1`: ", re.sub(r"\n {5,}", " ", text))
    else:
        items = _IN_A_PARAGRAPH.sub(r"\n- `\1`: ", re.sub(r"\n +", " ", text))
    before, item, rest = items.strip().partition("- `")
    begin = f"**{title}:** {before.strip()}".rstrip()
    return f"{begin}\n\n{item}{rest}".rstrip() + "\n"


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
