"""Many small cases in one test, because each test costs pytest more time than a small case."""

import functools
import inspect
import reprlib

import pytest


def each_case(names, cases):
    """Like `pytest.mark.parametrize`, but one test runs all cases and lists those that fail.

    The cases share fixtures. A case must not skip, because later cases would not run.
    """
    names = [name.strip() for name in names.split(",")]
    cases = [case if len(names) > 1 else (case,) for case in cases]
    assert cases, "a test without cases passes whatever it tests"

    def decorate(test):
        @functools.wraps(test)
        def run(*arguments, **fixtures):
            failures = []
            for number, case in enumerate(cases):
                try:
                    test(*arguments, **fixtures, **dict(zip(names, case, strict=True)))
                except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
                    failures.append((_name(number, case), error))
            if failures:
                listed = [f"  {name}: {str(error).strip()}" for name, error in failures]
                count = f"{len(failures)} of {len(cases)} cases failed, the first as shown above:"
                raise AssertionError("\n".join([count, *listed])) from failures[0][1]

        signature = inspect.signature(test)
        kept = [p for name, p in signature.parameters.items() if name not in names]
        run.__signature__ = signature.replace(parameters=kept)
        return run

    return decorate


def _name(number, case):
    words = [
        getattr(value, "__name__", None) or getattr(value, "name", None) or reprlib.repr(value)
        for value in case
    ]
    return f"case {number} ({', '.join(words)})"
