"""python -m tests.helpers.count_mutants: how many planted faults each module's tables have."""

import importlib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def counts():
    """{module: its mutants}, of every module that has a table."""
    results = {}
    for path in sorted(ROOT.glob("tests/*/test_*.py")):
        if "mutant_tests(" in path.read_text():
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            tests = vars(importlib.import_module(module)).values()
            results[module] = sum(getattr(test, "planted", 0) for test in tests)
    return results


if __name__ == "__main__":
    planted = counts()
    for module, count in planted.items():
        print(f"{count:5} {module}")
    print(f"{sum(planted.values()):5} in all")
