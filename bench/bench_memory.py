"""Memory traffic of memory-bound kernels, counted in the simulator, next to the minimum.

Counts are per thread; shuffles and reductions are per SIMD group, and barriers per threadgroup.
"least" is the bytes of reading each input and writing each result once.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

from bench.tables import print_table
from torch_metal_attn import simulate
from torch_metal_attn.testing import Copy, IndexScores, Merge, Rotation, Softmax, Step
from torch_metal_attn.testing.case import Case
from torch_metal_attn.testing.families import FAMILIES
from torch_metal_attn.testing.tensors import DTYPES
from torch_metal_attn.tools.costs import cost

MOVED = ("loads", "loads (bytes)", "stores", "stores (bytes)", "least")
OTHERS = ("exps", "converts", "shuffles", "reductions", "barriers")
Fields = dict[str, Any]


def traffic(case: Case, kernel: str, per: float, rows: float | None = None) -> dict[str, float]:
    """Counts of a case's launch, divided by `per`; reductions and barriers, by `rows` if given."""
    prepared = FAMILIES[type(case)].prepare(case, torch.device("cpu"))
    with simulate(count=True) as session:
        prepared.function(**prepared.arguments)
    counters = session.counters[kernel]
    assert counters.launches == 1
    moved = (counters.loads, counters.load_bytes, counters.stores, counters.store_bytes)
    least = cost(case.call, prepared.arguments).bytes
    counts = (*(x["device"] for x in moved), least)
    counted = {name: count / per for name, count in zip(MOVED, counts, strict=True)}
    for name in OTHERS[:3]:
        counted[name] = getattr(counters, name) / per
    counted["reductions"] = counters.reductions / (rows or per)
    counted["barriers"] = counters.threadgroup_barriers / (rows or per)
    return counted


# softmax and apply_causal_mask_: per element or masked element; reductions and barriers per row.
ROWS = 8
LENGTHS = (1024, 8192, 65536)  # a row has one SIMD group, one threadgroup, or a large threadgroup


def softmax(length: int, dtype: str, layout: str) -> dict[str, float]:
    """Softmax of contiguous rows, or of strided rows, which lie along the first dimension."""
    if layout == "contiguous":
        case = Softmax(shape=(ROWS, length), dim=1, dtype=dtype)
    else:
        case = Softmax(shape=(length, ROWS), dim=0, dtype=dtype)
    return traffic(case, "softmax", ROWS * length, ROWS)


def causal_mask(length: int, dtype: str, layout: str) -> dict[str, float]:
    order = () if layout == "contiguous" else ("order 10",)
    call = "apply_causal_mask_"
    case = Softmax(call=call, shape=(length, length), dtype=dtype, layout=order)
    return traffic(case, "apply_causal_mask", length * (length - 1) // 2, length)


# merge_state and merge_splits: per element of out. Barriers are those of the whole launch.
SPLITS = (8, 32, 128)
OUT_ROWS: Fields = {"batch": 1, "heads": 4, "length": 16}


def merge(call: str, splits: int, head_dim: int, dtype: str) -> dict[str, float]:
    parts: Fields = {"splits": splits} if call == "merge_splits" else {}
    case = Merge(call=call, head_dim=head_dim, dtype=dtype, **OUT_ROWS, **parts)
    return traffic(case, call, 64 * head_dim, 1)


# rope: per token and head of a grouped-query layer, whose q and k are rotated in one dispatch.
HEADS, KV_HEADS = 32, 8
ROTATIONS: dict[str, Fields] = {
    "halves": {},
    "interleaved": {"interleaved": True},
    "in place": {"call": "rope_"},
    "bfloat16 tables": {"table_dtype": "bfloat16"},
    "a quarter of the columns": {"quarter": True},
    "a quarter, in place": {"quarter": True, "call": "rope_"},
    "rows off their alignment": {"layout": ("padded 3",)},
}


def rotation(
    head_dim: int, dtype: str, length: int = 1024, quarter: bool = False, **fields: Any
) -> dict[str, float]:
    """Rotates q and k. quarter: only a quarter of the columns is rotated."""
    heads: Fields = {"heads": HEADS, "kv_heads": KV_HEADS}
    sizes: Fields = {"columns": head_dim // (4 if quarter else 1), "head_dim": head_dim}
    case = Rotation(dtype=dtype, length=length, **heads, **sizes, **fields)
    return traffic(case, "rope", (HEADS + KV_HEADS) * length)


# append_kv and copy_pages: per row of one KV head, averaged over k and v.
PAGE = 16
APPENDED: dict[str, Fields] = {
    "append": {},
    "append one row": {"length": 1},
    "append to pages of 16": {"cache": "paged"},
    "append, halves rotated": {"rotary": True},
    "append, pairs rotated": {"rotary": True, "rotary_interleaved": True},
    "append to q8_0": {"format": "q8_0"},
    "append to q4_0": {"format": "q4_0"},
    "append to fp8_e4m3": {"format": "fp8_e4m3"},
    "append to q3_g32": {"format": "q3_g32"},
    "append to q4_g64": {"format": "q4_g64"},
    "append to q4_0, rotated by 64": {"format": "q4_0", "hadamard": 64},
}


def append(
    head_dim: int, dtype: str, length: int = 256, rotary: bool = False, **fields: Any
) -> dict[str, float]:
    """Appends `length` rows to a sequence of three rows."""
    heads: Fields = {"heads": KV_HEADS, "kv_heads": KV_HEADS}
    sizes: Fields = {"head_dim": head_dim, "v_head_dim": head_dim}
    rotated: Fields = {"rotary_columns": head_dim, "by_token": False} if rotary else {}
    capacity = -(-(length + 3) // PAGE) * PAGE
    rows: Fields = {"lengths": (3,), "length": length, "capacity": capacity}
    case = Step(dtype=dtype, **heads, **sizes, **rows, **rotated, **fields)
    return traffic(case, "append_kv", 2 * KV_HEADS * length)


def copy(head_dim: int, dtype: str) -> dict[str, float]:
    copies = tuple((i, i + 4) for i in range(4))
    case = Copy(dtype=dtype, shape=(8, KV_HEADS, PAGE, head_dim), copies=copies)
    return traffic(case, "copy_pages", 4 * KV_HEADS * PAGE)


# index_scores: per key, with DeepSeek-V3.2's 64 heads of 128 columns.
INDEXED: Fields = {"heads": 64, "head_dim": 128, "kv_length": 1024}
QUERIES = (1, 2, 16, 64)


def indexed(q_length: int, dtype: str) -> dict[str, float]:
    case = IndexScores(q_length=q_length, dtype=dtype, causal=True, **INDEXED)
    return traffic(case, "index_scores", INDEXED["kv_length"])


def softmax_rows() -> Iterator[list[Any]]:
    cases = [("softmax", softmax, length) for length in LENGTHS]
    cases.append(("apply_causal_mask", causal_mask, 512))
    for (name, count, length), dtype, layout in product(cases, DTYPES, ("contiguous", "strided")):
        yield [name, layout, length, dtype, *count(length, dtype, layout).values()]


def merge_rows() -> Iterator[list[Any]]:
    cases = [("merge_state", 2), *(("merge_splits", n) for n in SPLITS)]
    for head_dim, dtype, (call, splits) in product((64, 128), DTYPES, cases):
        yield [call, splits, head_dim, dtype, *merge(call, splits, head_dim, dtype).values()]


def moved_rows() -> Iterator[list[Any]]:
    cases: list[tuple[str, Callable[..., dict[str, float]]]] = [
        (name, partial(rotation, **fields)) for name, fields in ROTATIONS.items()
    ]
    cases += [(name, partial(append, **fields)) for name, fields in APPENDED.items()]
    cases.append(("copy_pages", copy))
    for (name, count), head_dim, dtype in product(cases, (64, 128), ("bfloat16", "float32")):
        counted = count(head_dim, dtype)
        yield [name, head_dim, dtype, *(counted[column] for column in MOVED)]


def indexed_rows() -> Iterator[list[Any]]:
    for q_length, dtype in product(QUERIES, DTYPES):
        yield [q_length, dtype, *indexed(q_length, dtype).values()]


if __name__ == "__main__":
    print_table(["kernel", "rows", "length", "dtype", *MOVED, *OTHERS], softmax_rows())
    print_table(["kernel", "splits", "head dim", "dtype", *MOVED, *OTHERS], merge_rows())
    print_table(["case", "head dim", "dtype", *MOVED], moved_rows())
    print_table(["queries", "dtype", *MOVED, *OTHERS], indexed_rows())
