"""Helpers for tests of refusals. In torch 2.15 errors of C++ ops have another type."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from torch_metal_attn.runtime.refusals import as_value_errors


@contextmanager
def refused(message: str) -> Iterator[pytest.ExceptionInfo[ValueError]]:
    """Expect a refusal whose message matches, also from an op of `metal_attn_explain`."""
    with pytest.raises(ValueError, match=message) as caught:
        with as_value_errors():
            yield caught


def without_data(values: dict) -> dict:
    """The same arguments with tensors on meta."""
    tensors = {name: x for name, x in values.items() if torch.is_tensor(x)}
    return values | {
        name: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        for name, x in tensors.items()
    }


def refused_alike(message: str, *calls) -> None:
    texts = []
    for call in calls:
        with refused(message) as caught:
            call()
        texts.append(str(caught.value))
    assert len(set(texts)) == 1, texts
