"""Counts of rope: each byte is moved once, in whole vectors, and heads share the tables."""

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


# Options, the columns of a row that are stored, and the number of stores.
ROWS = {
    "in place, only the rotated columns": ({"quarter": True, "call": "rope_"}, 32, 32 / 4),
    "the other columns are copied in whole vectors": ({"quarter": True}, 128, 128 / 4),
    "unaligned rows": ({"layout": ("padded 3",)}, 128, 128),
}


@pytest.mark.parametrize("name", ROWS)
def test_stores(name):
    options, columns, stores = ROWS[name]
    row = rotation(128, "float16", length=32, **options)
    assert (row["stores"], row["stores (bytes)"]) == (stores, columns * 2)
