"""What tests of refusals share: a ValueError, also of C++ ops that torch 2.15 calls otherwise."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from torch_metal_attn.ops.refusals import as_value_errors


@contextmanager
def refused(message: str) -> Iterator[pytest.ExceptionInfo[ValueError]]:
    """Expect a refusal whose message matches, also from an `_explain` op."""
    with pytest.raises(ValueError, match=message) as caught:
        with as_value_errors():
            yield caught
