"""Prints the tracked lines of each folder and the folder's budget, for `make lint` and CI."""

import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The budget of each folder. A file counts for the longest of these prefixes of its path.
BUDGET = {
    "": 1480,
    ".ci/": 1140,
    "bench/": 4300,
    "csrc/": 12080,
    "csrc/simulator/": 3440,
    "docs/": 5890,
    "shaders/": 9300,
    "tests/": 37480,
    "tests/simulator/": 5840,
    "torch_metal_attn/": 27200,
    "torch_metal_attn/simulator/": 11850,
}


def count(root: Path) -> Counter[str]:
    command = ["git", "-C", str(root), "ls-files", "-z"]
    names = subprocess.run(command, capture_output=True, text=True).stdout.split("\0")
    lines = Counter[str]()
    for name in filter(None, names):
        folder = max((prefix for prefix in BUDGET if name.startswith(prefix)), key=len)
        path = root / name
        lines[folder] += path.read_bytes().count(b"\n") if path.is_file() else 0
    return lines


if __name__ == "__main__":
    lines = count(ROOT)
    rows = [(folder or "others", lines[folder], budget) for folder, budget in BUDGET.items()]
    rows.append(("all", sum(row[1] for row in rows), sum(BUDGET.values())))
    for folder, used, budget in rows:
        print(f"{folder:<28} {used:7} lines, {used - budget:+6} of {budget}")
