"""rope moves each byte once, in whole vectors, and shares the tables: counts, not times."""

import pytest
import torch

from bench.bench_rope import traffic


@pytest.mark.parametrize(
    "dtype, options",
    [
        (torch.bfloat16, {}),
        (torch.float32, {"interleaved": True}),
        (torch.bfloat16, {"inplace": True}),
    ],
    ids=str,
)
def test_prefill(dtype, options):
    """cos and sin are loaded once for the eight heads of a thread."""
    row = traffic(128, dtype, **options)
    assert row.stores == 128 / 4
    assert row.loads == 128 / 4 * (1 + 1 / 8)
    assert row.store_bytes == row.least_store_bytes
    assert row.load_bytes == row.least_store_bytes + 128 * 4 / 8


def test_in_place_leaves_the_other_columns_alone():
    row = traffic(128, torch.float16, rotary_dim=32, inplace=True, length=32)
    assert row.stores == 32 / 4
    assert row.store_bytes == row.least_store_bytes == 32 * 2


def test_other_columns_are_copied_in_whole_vectors():
    row = traffic(128, torch.float16, rotary_dim=32, length=32)
    assert row.stores == 128 / 4
    assert row.store_bytes == row.least_store_bytes


def test_rows_off_their_alignment_move_no_more_bytes():
    row = traffic(64, torch.float16, aligned=False, length=32)
    assert row.stores == 64
    assert row.store_bytes == row.least_store_bytes
