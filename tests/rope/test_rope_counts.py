"""rope moves each byte once, in whole vectors, and shares the tables: counts, not times."""

import pytest

from bench.bench_memory import rotation


@pytest.mark.parametrize(
    "dtype, size, options",
    [
        ("bfloat16", 2, {}),
        ("float32", 4, {"interleaved": True}),
        ("bfloat16", 2, {"call": "rope_"}),
    ],
    ids=str,
)
def test_prefill(dtype, size, options):
    """cos and sin are loaded once for the eight heads of a thread."""
    row = rotation(128, dtype, **options)
    assert row["stores"] == 128 / 4
    assert row["loads"] == 128 / 4 * (1 + 1 / 8)
    assert row["stores (bytes)"] == 128 * size
    assert row["loads (bytes)"] == 128 * size + 128 * 4 / 8


def test_in_place_leaves_the_other_columns_alone():
    row = rotation(128, "float16", length=32, quarter=True, call="rope_")
    assert row["stores"] == 32 / 4
    assert row["stores (bytes)"] == 32 * 2


def test_other_columns_are_copied_in_whole_vectors():
    row = rotation(128, "float16", length=32, quarter=True)
    assert row["stores"] == 128 / 4
    assert row["stores (bytes)"] == 128 * 2


def test_rows_off_their_alignment_move_no_more_bytes():
    row = rotation(64, "float16", length=32, layout=("padded 3",))
    assert row["stores"] == 64
    assert row["stores (bytes)"] == 64 * 2
