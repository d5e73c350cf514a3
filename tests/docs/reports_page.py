"""docs/mps-issues.md, made from the reports: `python -m tests.docs.reports_page` writes it."""

from pathlib import Path

# Each module puts its reports on the page.
from tests.sdpa import (  # noqa: F401
    test_reported_gradients,
    test_reported_layouts,
    test_reported_lengths,
    test_reported_masks,
    test_reported_options,
)
from tests.sdpa.reports import REPORTS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "mps-issues.md"
REPOSITORIES = {
    "pytorch": "pytorch/pytorch",
    "mlx": "ml-explore/mlx",
    "ComfyUI": "Comfy-Org/ComfyUI",
}
INTRODUCTION = """\
# Reports about attention on mps

Public reports about attention on Apple GPUs, and what this library does with the same call. A
number without a name is PyTorch's.

- The second column is what the report says, with the versions that it names. None of it was
  measured here, and newer versions may differ.
- The third column is what a test proves in the simulator, with the report's sizes, dtypes and
  strides. Sizes that are not the point are smaller; those that a report leaves open were chosen.
- Problems of more than 2^31 scores are not run whole. Their launch is recorded, and its memory,
  grid, lengths and strides are checked. Then the last 8 rows are run, with all keys.

The id of a test has the report's number, so `pytest tests/sdpa -k 195910` runs one. This page
is written by `python -m tests.docs.reports_page`.
"""


def text():
    """The page."""
    parts = [INTRODUCTION]
    links = {}
    for module, reports in sorted(REPORTS.items()):
        file = f"{module.replace('.', '/')}.py"
        title = module.split("test_reported_")[1].capitalize()
        rows = [f"## {title}\n", f"Tests: [{file}](../{file})\n"]
        rows += ["| report | what the report says | what happens here | test |"]
        rows += ["| --- | --- | --- | --- |"]
        for report, test in reports:
            links |= dict(map(link, report.names.split()))
            names = ", ".join(f"[{short(name)}]" for name in report.names.split())
            rows.append(f"| {names} | {report.says} | {report.here} | `{test.__name__}` |")
        parts.append("\n".join(rows) + "\n")
    parts.append("\n".join(f"[{name}]: {address}" for name, address in links.items()) + "\n")
    return "\n".join(parts)


def short(name):
    return name.removeprefix("pytorch")


def link(name):
    """What the page calls a report, and its address; GitHub leads from there to a pull request."""
    repository, number = name.split("#")
    return short(name), f"https://github.com/{REPOSITORIES[repository]}/issues/{number}"


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
