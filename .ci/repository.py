"""The repository's URL, which its owner fills in once (docs/design/packaging.md)."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACEHOLDER = "https://github.com/OWNER/torch_metal_attn"


def url(root: Path = ROOT) -> str:
    """The URL in pyproject.toml; "" until it is filled in."""
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    match = re.search(r'^repository = "(.*)"$', text, re.MULTILINE)
    assert match is not None
    return match[1].rstrip("/")
