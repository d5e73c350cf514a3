"""tests/helpers/cases.py: several cases in one test."""

import inspect

import pytest

from tests.helpers.cases import each_case


def test_every_case_runs_and_those_that_fail_are_listed():
    seen = []

    @each_case("word, number", [("one", 1), ("two", 2), ("three", 3)])
    def compare(word, number, fixture):
        seen.append(number)
        assert number == fixture, f"{number} is not {fixture}"

    assert list(inspect.signature(compare).parameters) == ["fixture"]
    with pytest.raises(AssertionError) as raised:
        compare(fixture=2)
    assert seen == [1, 2, 3]
    first, one, *_ = str(raised.value).split("\n  ")
    assert first.startswith("2 of 3 cases failed")
    assert one.startswith("case 0 ('one', 1): 1 is not 2")
    assert "case 2 ('three', 3): 3 is not 2" in str(raised.value)
    assert str(raised.value.__cause__).startswith("1 is not 2")


def test_a_case_that_skips_or_does_not_raise_fails():
    @each_case("value", [1, 2])
    def fails(value):
        if value == 1:
            pytest.skip("nothing to do")
        with pytest.raises(ValueError, match="must"):
            pass

    with pytest.raises(AssertionError, match=r"2 of 2 .*\n.*nothing to do\n.*DID NOT RAISE"):
        fails()
