"""Writes the repository's URL (pyproject.toml) into the files that have a placeholder for it."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACEHOLDER = "https://github.com/OWNER/torch_metal_attn"
NOT_IN = {"pyproject.toml", ".ci/repository.py"}
EMPTY = (
    "note: [tool.torch_metal_attn] repository in pyproject.toml is empty: fill in the URL, so that "
    "the package, the README and the forms lead to the repository"
)


def url(root: Path = ROOT) -> str:
    """The repository's URL; "" until it is filled in."""
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    (address,) = re.findall(r'^repository = "(.*)"$', text, re.MULTILINE)
    return address.rstrip("/")


def files(root: Path = ROOT) -> list[Path]:
    """The files of the checkout that have the placeholder."""
    command = ["git", "grep", "--untracked", "-l", "-F", PLACEHOLDER]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True).stdout
    return [root / name for name in listed.splitlines() if name not in NOT_IN]


def write(root: Path = ROOT) -> str:
    """Write the URL into the files. Returns a report, or EMPTY if there is no URL."""
    if not url(root):
        return EMPTY
    report = []
    for path in files(root):
        text = path.read_text(encoding="utf-8").replace(PLACEHOLDER, url(root))
        path.write_text(text, encoding="utf-8")
        report.append(f"wrote {url(root)} into {path.relative_to(root)}")
    return "\n".join(report)


if __name__ == "__main__":
    print(write())
