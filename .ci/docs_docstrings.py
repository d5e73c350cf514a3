"""Docstrings as Markdown, for the API's pages: each section is a list of its names."""

import re
from typing import Any

import griffe

_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns):(\s)((?:.+\n?)+)", re.MULTILINE)
_EXAMPLE = re.compile(r"^Example:\n((?: .*\n?|\n)+)", re.MULTILINE)  # indented, so it is code
_NAMES = r"((?:\*{0,2}[\w.]+(?:, | or )?)+): "


def as_markdown(text: str) -> str:
    """Sections begin in bold. Their names are items, each on its line or after a full stop."""
    text = _EXAMPLE.sub(lambda found: f"**Example:**\n\n{found[1]}", text)
    return _SECTION.sub(_section, text)


def _section(found: re.Match[str]) -> str:
    title, blank, text = found.groups()
    run_on = blank == " "
    text = re.sub(r"\n +" if run_on else r"\n {5,}", " ", text)
    begin, item = (r"(?:^|(?<=\. ))", r"\n- `\1`: ") if run_on else (r"^ *", r"- `\1`: ")
    items = re.sub(begin + _NAMES, item, text, flags=re.MULTILINE).strip()
    return f"**{title}:**\n\n{items}\n" if items[0] == "-" else f"**{title}:** {items}\n"


class Docstrings(griffe.Extension):
    """Rewrites the docstring of each object that griffe has read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
