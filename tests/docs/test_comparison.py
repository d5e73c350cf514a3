"""docs/comparison.md: every cell links to a test of ours, or to a source at a fixed version."""

import re

from tests.docs.doc_pages import ROOT
from tests.helpers.cases import each_case

TEXT = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
SOURCES = dict(re.findall(r"^\[(\w+)\]: (\S+)$", TEXT, re.M))
FIXED = re.compile(
    r"https://github\.com/[\w-]+/[\w-]+/((blob|tree)/([0-9a-f]{12}|v[\d.]+)(/\S+)?|issues/\d+)"
)
TABLE = [line.strip("|").split("|") for line in TEXT.splitlines() if line.startswith("|")]
COLUMNS = [cell.strip() for cell in TABLE[0]]
LETTERS = dict(zip(COLUMNS, " hTMABF", strict=True))  # the first letters of the names of links
ROWS = {row[0].strip(): dict(zip(COLUMNS, row, strict=True)) for row in TABLE[2:]}


@each_case("feature", ROWS)
def test_every_cell_has_a_source(feature):
    for column in COLUMNS[1:]:
        cell = ROWS[feature][column].strip()
        if not cell:  # the question does not apply to the column
            assert column != "here"
            continue
        link = re.fullmatch(r"\[[^][]+\]\[(\w+)\]", cell)
        assert link, f"{column}: {cell}"
        assert link[1].startswith(LETTERS[column])
        assert link[1] in SOURCES


def test_sources_are_fixed_and_used():
    assert len(ROWS) > 15
    for name, target in SOURCES.items():
        assert f"[{name}]" in TEXT.replace(f"[{name}]:", ""), f"nothing refers to {name}"
        if name.startswith("h"):
            assert (ROOT / "docs" / target.split("#")[0]).is_file()
        else:
            assert FIXED.fullmatch(target.split("#")[0]), target


def test_no_speed_is_claimed():
    table = TEXT.split("## Sources")[0]
    assert not re.search(r"\d+(?:\.\d+)? ?(?:x|times|ms|TF\w*|%)(?: |\b)", table)
