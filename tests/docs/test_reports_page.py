"""docs/mps-issues.md is what the reports make."""

from tests.docs import reports_page as page
from tests.sdpa.reports import REPORTS


def test_page_is_the_reports():
    written = page.PAGE.read_text(encoding="utf-8")
    assert written == page.text(), "write it with: python -m tests.docs.reports_page"


def test_every_module_and_report_is_there():
    modules = {path.stem for path in page.ROOT.glob("tests/sdpa/test_reported_*.py")}
    assert {module.split(".")[-1] for module in REPORTS} == modules
    names = [name for reports in REPORTS.values() for r, _ in reports for name in r.names.split()]
    assert len(names) == len(set(names))
