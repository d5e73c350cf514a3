"""Prints tables of counts."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from torch_metal_attn.tools.text_table import markdown


def print_table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a Markdown table, each row as soon as it is counted. Bytes come after their count."""
    headings = ["(bytes)" if name.endswith("(bytes)") else name for name in headings]
    for line in markdown(headings, (list(map(_cell, row)) for row in rows)):
        print(line, flush=True)
    print()


def _cell(value: Any) -> str:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return f"{value:.4g}" if isinstance(value, float) else str(value)
