"""DDP and FSDP2 over processes, with and without ring attention, train as one process does."""

import pytest
import torch

from tests.distributed import training


@pytest.fixture(scope="module")
def expected():
    start = [x.detach().clone() for x in training.Model().parameters()]
    trained = training.alone()
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(start, trained, strict=True))
    return trained


@pytest.mark.parametrize("way", training.WAYS)
def test_training_is_that_of_one_process(way, processes, expected):
    for found in processes:
        torch.testing.assert_close(found["trained"][way], expected, rtol=1e-5, atol=1e-6)
